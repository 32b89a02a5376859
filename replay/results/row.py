"""Define one row of a run's table: all facts that are kept about one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from forebay.traces.ground.schema import TraceRequest

if TYPE_CHECKING:  # `forebay simulate` has rows, but no client and no event loop
    from forebay.replay.send.http.exchange import ClientExchange
    from forebay.replay.send.http.measure import Latency
    from forebay.traces.ground.hlog import IntervalLog


@dataclass(slots=True)  # frozen, a row would take three times as long to make
class Row:
    """The columns in order. Times are seconds from the start of the run. None is undefined.

    id: id of the request in the trace.
    bucket: length bucket of the prompt.
    session, tenant, document: as in the trace.
    input_tokens: prompt length that the trace asks for.
    asked_tokens: answer length that the trace asks for.
    prompt_tokens, output_tokens, cached_tokens: as the server counted them.
    intended_s: when the request was due.
    sent_s: when it was sent.
    first_s: first output event.
    last_s: last output event.
    done_s: end of the response.
    pacing_lag_s: how late the client began to send, for lack of processor time.
    cap_wait_s: wait for a free slot under --max-in-flight.
    ttft_response_s: time from when the request was due to its first output event.
    e2e_response_s: time from when the request was due to its last output event.
    ttft_service_s: time from when the request was sent to its first output event.
    e2e_service_s: time from when the request was sent to its last output event.
    tpot_s: mean time per output token after the first event.
    stall_s: longest gap between two output events.
    queue_ms: wait in the proxy, from its header x-forebay-queue-ms.
    status: status of the HTTP response.
    outcome: ok, rejected or failed.
    reason: code of the error, or why the request failed.
    retry_after_s: the Retry-After of a rejection.
    reject_latency_s: time from sending to the rejection.
    backend: the server, where the proxy names it (debug_headers), else the target.
    request_id: as the server returned it.
    tokens_estimated: the server did not count the tokens of each event.
    said: first words of the server, or of the system, about a rejection or failure.
    task: the session; of a sub-agent, the session that started it.
    """

    id: str
    bucket: str
    session: str | None
    tenant: str | None
    document: str | None
    input_tokens: int
    asked_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    intended_s: float | None
    sent_s: float | None
    first_s: float | None
    last_s: float | None
    done_s: float | None
    pacing_lag_s: float | None
    cap_wait_s: float | None
    ttft_response_s: float | None
    ttft_service_s: float | None
    e2e_response_s: float | None
    e2e_service_s: float | None
    tpot_s: float | None
    stall_s: float | None
    queue_ms: float | None
    status: int | None
    outcome: str
    reason: str | None
    retry_after_s: float | None
    reject_latency_s: float | None
    backend: str | None
    request_id: str | None
    tokens_estimated: bool | None
    said: str | None
    task: str | None


_UNDEFINED = dict.fromkeys(Row.__slots__)
# Times of a completed request, each the column of a metric of the log.
TIMES_OF_ROW = {
    metric: attrgetter(f"{metric}_s")
    for metric in ("ttft_response", "ttft_service", "e2e_response", "e2e_service", "tpot", "stall")
}
# Columns in a row that are attributes of one object, in the order of the columns.
_OF_REQUEST = attrgetter("session", "tenant", "document", "input_tokens", "output_tokens")
_COUNTS = attrgetter("prompt_tokens", "cached_tokens", "output_tokens", "intended_s", "sent_s")
_LATENCIES = attrgetter("pacing_lag_s", "cap_wait_s", *(f"{metric}_s" for metric in TIMES_OF_ROW))
_ENDING = attrgetter("queue_ms", "status", "outcome", "reason", "retry_after_s",
                     "reject_latency_s", "backend", "request_id")  # fmt: skip


def row_of(
    request: TraceRequest,
    bucket: str,
    exchange: "ClientExchange",
    latency: "Latency",
    task: str | None,
) -> Row:
    """Make the row of a request that was sent."""
    values: tuple[Any, ...] = (
        request.id,
        bucket,
        *_OF_REQUEST(request),
        *_COUNTS(exchange),
        latency.first_s,
        latency.last_s,
        exchange.done_s,
        *_LATENCIES(latency),
        *_ENDING(exchange),
        exchange.events.estimated if latency.first_s is not None else None,
        None if exchange.outcome == "ok" else exchange.said,
        task,
    )
    return Row(*values)


def never_sent_row(
    request: TraceRequest, bucket: str, intended_s: float | None, task: str | None
) -> Row:
    """Make the row of a scheduled request that was never sent."""
    values = {"intended_s": intended_s, "outcome": "failed", "reason": "never_sent"}
    return row_with(request, bucket, task, values)


def row_with(
    request: TraceRequest, bucket: str, task: str | None, values: Mapping[str, Any]
) -> Row:
    """Make a row with these values of a request. All other columns are None."""
    described = {
        "id": request.id,
        "bucket": bucket,
        "session": request.session,
        "tenant": request.tenant,
        "document": request.document,
        "task": task,
        "input_tokens": request.input_tokens,
        "asked_tokens": request.output_tokens,
    }
    return Row(**{**_UNDEFINED, **described, **values})


def log_row(log: "IntervalLog", row: Row) -> None:
    """Record the times of a request whose gaps between tokens are not known."""
    if row.queue_ms is not None and row.outcome == "ok":  # rejected requests: `reject`
        log.record(f"queue_wait.{row.bucket}", row.queue_ms / 1e3)
    if row.reject_latency_s is not None:
        log.record(f"reject.{row.bucket}", row.reject_latency_s)
    for metric, of_row in TIMES_OF_ROW.items():
        if (value := of_row(row)) is not None:
            log.record(f"{metric}.{row.bucket}", value)
