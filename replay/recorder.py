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
# Recording several requests in a row finds its code in the caches of the processor, which a turn of
# the loop replaces. More at a time would delay arrivals: each takes about 15 us.
RECORDED_TOGETHER = 8
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
        self._ended: list[tuple[TraceRequest, ClientExchange]] = []
        self._tags = {
            bucket: {metric: f"{metric}.{bucket}" for metric in LOGGED}
            for bucket in (BEYOND, *(one.name for one in buckets))
        }

    def finished(self, request: TraceRequest, exchange: ClientExchange) -> None:
        """Record one request that was sent, whatever its outcome, at the latest at `settle`."""
        if exchange.outcome == "ok":
            self.live.done += 1
        elif exchange.outcome == "rejected":
            self.live.rejected += 1
        else:
            self.live.failed += 1
        self._ended.append((request, exchange))
        if len(self._ended) >= RECORDED_TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Measure and store the requests that have ended and wait for it."""
        ended, self._ended = self._ended, []
        for request, exchange in ended:
            self._record(request, exchange)

    def _record(self, request: TraceRequest, exchange: ClientExchange) -> None:
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
        if row.outcome == "ok" and row.ttft_response_s is not None:
            self.live.ttft.record_value(min(to_us(row.ttft_response_s), HIGHEST_US))

    def never_sent(self, request: TraceRequest, intended_s: float | None) -> None:
        self.settle()
        row = never_sent_row(request, self._bucket(request), intended_s)
        self._table.add(row)
        self.totals.add(row)

    async def flush(self, now_s: float) -> None:
        """Write the interval that ends now, in small steps between which requests can be sent.

        A cancellation at any step loses nothing, and nothing is written twice.
        """
        self.settle()
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

    def close(self, now_s: float) -> None:
        """Store what still waits, and close the log."""
        self.settle()
        self.log.close(now_s)

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
