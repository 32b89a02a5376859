"""Read the proxy's usage ledger, or its request log in JSON, as a run of production traffic.

Times count from when a request arrived at the proxy. The line of a request is written when it ends,
so it arrived that much earlier. Lines about other events are passed over.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from forebay.analysis.runs.run import RunData
from forebay.analysis.runs.sources.rows import FileOrigin, FileRow, run_of_rows
from forebay.replay.send.http.outcome import is_admission
from forebay.traces.formats.served import file_rows
from forebay.traces.ground.errors import InputError

DIFFERS = {
    "ttft": "from arrival at the proxy",
    "e2e": "from arrival at the proxy to the last byte",
    "tpot": "(last byte - first event) / (output tokens - 1)",
}
LEDGER = FileOrigin(
    "usage ledger", DIFFERS, ("it lacks requests that reached no server, such as rejections",), True
)
REQUEST_LOG = FileOrigin(
    "request log",
    DIFFERS,
    (
        "it has the share logs.sample of the requests, or all at debug",
        "requests of paths that are not shaped, such as embeddings, are left out",
    ),
    True,
)


def load_proxy_log(path: Path, name: str | None) -> RunData:
    """Make a run of a ledger or a request log, line by line: such files are large.

    Raises:
        InputError: a line is no JSON, a request is damaged, or there is no request.
    """
    notes: list[str] = []
    rows = file_rows(path, notes=notes)
    requests = (row.values for row in rows if is_request(row.values))
    first = next(requests, None)
    if first is None:
        raise InputError(f"{path}: is a log of the proxy, and no line is an ended request")
    origin = REQUEST_LOG if "event" in first else LEDGER
    try:
        return run_of_rows(path, name, origin, _rows(path, chain([first], requests)), notes)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: a figure of a request is no number ({error})") from error


def _rows(path: Path, requests: Iterable[Any]) -> Iterator[FileRow]:
    for number, line in enumerate(requests, 1):
        try:
            yield _row(line)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: request {number} is damaged ({error!r})") from error


def is_proxy_log(line: Mapping[str, Any]) -> bool:
    """True if the first line of a file is one of a ledger or of the proxy's log in JSON."""
    return "time" in line and (
        "event" in line or {"request_id", "status", "duration_ms"} <= line.keys()
    )


def is_request(line: Mapping[str, Any]) -> bool:
    """True if a line is one request of either file."""
    if not {"time", "request_id", "status"} <= line.keys():
        return False
    if line.get("operation") == "other":  # not shaped, such as an embedding or a list of models
        return False
    return line.get("event", "request") == "request" and "duration_ms" in line


def _row(line: Mapping[str, Any]) -> FileRow:
    took_s, status = float(line["duration_ms"]) / 1e3, int(line["status"])
    due_s = datetime.fromisoformat(line["time"]).timestamp() - took_s
    row: FileRow = {
        "bucket": line.get("bucket") or "other",
        "backend": line.get("backend"),
        "tenant": line.get("tenant"),
        "request_id": line["request_id"],
        "input_tokens": line.get("prompt_tokens"),
        "intended_s": due_s,
        "sent_s": due_s,
        "queue_ms": line.get("queue_ms"),
        "status": status,
    }
    reason = line.get("reason") or ""
    if status == 200 and not reason:
        return {**row, "outcome": "ok", **_answer(line, took_s)}
    outcome = "rejected" if is_admission(status, reason) else "failed"
    return {
        **row,
        "outcome": outcome,
        "reason": reason or _reason(status),
        "reject_latency_s": took_s,
    }


def _answer(line: Mapping[str, Any], took_s: float) -> FileRow:
    """Return the known figures of a whole answer."""
    ttft_ms, output = line.get("ttft_ms"), line.get("output_tokens")
    ttft_s = None if ttft_ms is None else float(ttft_ms) / 1e3
    streamed = ttft_s is not None and output is not None and output > 1
    return {
        **{key: line.get(key) for key in ("prompt_tokens", "cached_tokens", "output_tokens")},
        "ttft_response_s": ttft_s,
        "ttft_service_s": ttft_s,
        "e2e_response_s": took_s,
        "tpot_s": (took_s - (ttft_s or 0.0)) / (output - 1) if streamed and output else None,
    }


def _reason(status: int) -> str:
    if status == 499:
        return "cancelled"
    return "stream_error" if status == 200 else f"{status // 100}xx"
