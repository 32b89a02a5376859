"""Record every finished request in the log, the table, the totals and the live figures.

The recorder measures (with `measure`) and stores; it never decides what is sent.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson
from hdrh.histogram import HdrHistogram

from forebay.proxy.telemetry.hlog import HIGHEST_US, IntervalLog, to_us
from forebay.replay.clock import Clock
from forebay.replay.exchange import ClientExchange
from forebay.replay.measure import Latency, measure
from forebay.replay.output import TableWriter
from forebay.replay.record import Row, never_sent_row, row_of
from forebay.replay.summary import METRICS, RunTotals
from forebay.traces.buckets import LengthBucket, bucket_of
from forebay.traces.schema import TraceRequest

LEAST_FLUSH_WALL_S = 0.25
LOGGED = ("sched_lag", "reject", *METRICS.values())
BEYOND = "other"  # bucket of a request that is longer than every bucket


@dataclass(slots=True)
class Live:
    """The figures of the progress line.

    The TTFT histogram has 2 significant digits, which makes its percentiles six times as fast.
    """

    sent: int = 0
    done: int = 0
    rejected: int = 0
    failed: int = 0
    ttft: Any = field(default_factory=lambda: HdrHistogram(1, HIGHEST_US, 2))

    @property
    def in_flight(self) -> int:
        return self.sent - self.done - self.rejected - self.failed


class Recorder:
    """Records the requests of one run."""

    def __init__(
        self,
        log: IntervalLog,
        table: TableWriter,
        totals: RunTotals,
        buckets: Sequence[LengthBucket],
        answers: BinaryIO | None = None,
    ) -> None:
        self.live = Live()
        self._answers = answers
        self.totals = totals
        self.log = log
        self._table = table
        self._buckets = tuple(buckets)
        self._tags = {
            bucket: {metric: f"{metric}.{bucket}" for metric in LOGGED}
            for bucket in (BEYOND, *(one.name for one in buckets))
        }

    def finished(self, request: TraceRequest, exchange: ClientExchange) -> Row:
        """Record one request that was sent, whatever its outcome."""
        latency = measure(
            exchange.intended_s,
            exchange.sent_s,
            exchange.cap_wait_s,
            exchange.events,
            exchange.output_tokens,
        )
        row = row_of(request, self._bucket(request), exchange, latency)
        self._table.add(row)
        self.totals.add(row)
        if self._answers is not None and exchange.answer is not None:
            kept = {"id": request.id, "answer": exchange.answer}
            self._answers.write(orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE))
        self._log(row, latency)
        if row.outcome == "ok":
            self.live.done += 1
            if row.ttft_response_s is not None:
                self.live.ttft.record_value(min(to_us(row.ttft_response_s), HIGHEST_US))
        elif row.outcome == "rejected":
            self.live.rejected += 1
        else:
            self.live.failed += 1
        return row

    def never_sent(self, request: TraceRequest, intended_s: float | None) -> None:
        row = never_sent_row(request, self._bucket(request), intended_s)
        self._table.add(row)
        self.totals.add(row)

    async def flush(self, now_s: float) -> None:
        """Write the interval that ends now, in small steps between which requests can be sent.

        A cancellation at any step loses nothing, and nothing is written twice.
        """
        steps = self.log.flush_steps(now_s)
        try:
            for _ in steps:
                await asyncio.sleep(0)
        finally:
            # The end of the run cancels this task, and the log has already dropped this interval:
            # write the rest of it now. No request is left to send that this could delay.
            for _ in steps:
                pass
        await self._table.write_full_groups()

    def _bucket(self, request: TraceRequest) -> str:
        return bucket_of(request.input_tokens, self._buckets) or BEYOND

    def _log(self, row: Row, latency: Latency) -> None:
        log, tags = self.log, self._tags[row.bucket]
        log.record(tags["sched_lag"], latency.pacing_lag_s + latency.cap_wait_s)
        if row.outcome == "rejected" and row.reject_latency_s is not None:
            log.record(tags["reject"], row.reject_latency_s)
        if row.outcome != "ok":
            return
        for metric, value in (
            ("queue_wait", None if row.queue_ms is None else row.queue_ms / 1e3),
            ("ttft_response", row.ttft_response_s),
            ("ttft_service", row.ttft_service_s),
            ("e2e_response", row.e2e_response_s),
            ("e2e_service", row.e2e_service_s),
            ("tpot", row.tpot_s),
            ("stall", row.stall_s),
        ):
            if value is not None:
                log.record(tags[metric], value)
        if latency.icl_s:
            log.record_each(tags["icl"], latency.icl_s)
            if latency.itl_s is None:
                log.record_each(tags["itl"], latency.icl_s)
        for gap_s, tokens in latency.itl_s or ():
            log.record(tags["itl"], gap_s, tokens)


def interval_s(scale: float) -> float:
    """Return the length of an interval of the log, in seconds of a run at this time scale."""
    return max(1.0, LEAST_FLUSH_WALL_S * scale)


async def flush_every_interval(recorder: Recorder, clock: Clock) -> None:
    """Flush once an interval until cancelled."""
    every_s = interval_s(clock.scale)
    due_s = every_s
    while True:
        await clock.sleep(due_s - clock.now())
        await recorder.flush(clock.now())
        due_s += every_s
