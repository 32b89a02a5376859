"""Record every finished request in the log, the table, the totals and the live figures.

The recorder measures (with `measure`) and stores. It never decides on sending. Requests are
recorded together, several times a second: singly, they would take several times as long.
"""

import asyncio
import gc
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO

import orjson
from hdrh.histogram import HdrHistogram

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.results.folder import TableWriter
from forebay.replay.results.row import TIMES_OF_ROW, Row, never_sent_row, row_of
from forebay.replay.results.server_metrics import ServerGauges
from forebay.replay.results.summary import METRICS, RunTotals
from forebay.replay.send.http.exchange import ClientExchange
from forebay.replay.send.http.measure import Latency, measure
from forebay.traces.ground.buckets import LengthBucket, bucket_of
from forebay.traces.ground.hlog import HIGHEST_US, IntervalLog, all_to_us, record_all
from forebay.traces.ground.schema import TraceRequest

LEAST_FLUSH_WALL_S = 0.25
LOGGED = ("sched_lag", "reject", *METRICS.values())
LIVE_COUNTS = ("sent", "done", "unread", "output_tokens")
LIVE_REASONS = ("rejected", "failed")
LOGGED_TOGETHER = 64  # the garbage collector searches all unrecorded requests
RECORDED_TOGETHER = 4  # a step takes a fifth of a millisecond, the most that it delays an arrival
BEYOND = "other"  # bucket of a request that is longer than every bucket


@dataclass(slots=True)
class Live:
    """The figures that are shown while the run lasts.

    The TTFT histogram has 2 significant digits, which makes its percentiles six times as fast.

    Attributes:
        unread: requests that have ended and are not recorded yet.
        output_tokens: tokens of the requests that are done.
        rejected, failed: numbers of requests by reason.
        gauges: the samples of `--metrics`, if there are any.
    """

    sent: int = 0
    done: int = 0
    unread: int = 0
    output_tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    ttft: Any = field(default_factory=lambda: HdrHistogram(1, HIGHEST_US, 2))
    gauges: ServerGauges | None = None

    @property
    def in_flight(self) -> int:
        return self.sent - self.done - self.rejected.total() - self.failed.total() - self.unread


class Recorder:
    """Records the requests of one run.

    Args:
        tasks: names of tasks that are not their session's, by request id.

    Attributes:
        many: set when `LOGGED_TOGETHER` requests have ended, to record them.
    """

    def __init__(
        self,
        log: IntervalLog,
        table: TableWriter,
        totals: RunTotals,
        buckets: Sequence[LengthBucket],
        answers: BinaryIO | None = None,
        tasks: Mapping[str, str] | None = None,
    ) -> None:
        self.live = Live()
        self.many = asyncio.Event()
        self._answers = answers
        self._tasks = tasks or {}
        self.totals = totals
        self.log = log
        self._table = table
        self._ended: list[tuple[TraceRequest, ClientExchange]] = []  # since the last flush
        self._buckets = tuple(buckets)
        self._tags = {
            bucket: {metric: f"{metric}.{bucket}" for metric in LOGGED}
            for bucket in (BEYOND, *(bucket.name for bucket in buckets))
        }

    def count_sent(self) -> None:
        self.live.sent += 1

    def finished(self, request: TraceRequest, exchange: ClientExchange) -> None:
        """Take a request that was sent and has ended, with any outcome."""
        self._ended.append((request, exchange))
        self.live.unread += 1
        if len(self._ended) == LOGGED_TOGETHER:
            self.many.set()

    def never_sent(self, request: TraceRequest, intended_s: float | None) -> None:
        self._record_all()
        row = never_sent_row(request, self._bucket(request), intended_s, self._task(request))
        self._table.add(row)
        self.totals.add(row)

    async def flush(self, now_s: float, spare: SpareTime) -> None:
        """Write the interval that ends now, in small steps between which requests can be sent.

        A cancellation at any step loses no request and writes no request twice.
        """
        await _in_turns(chain(self._record_steps(), self.log.flush_steps(now_s)), spare)
        await self._table.write_rows(spare.turn)
        if self._answers is not None:
            self._answers.flush()

    async def catch_up(self, spare: SpareTime) -> None:
        """Record the requests that have ended so far, in small steps like `flush`."""
        await _in_turns(self._record_steps(), spare)

    def close(self, now_s: float) -> None:
        """Record the requests that have ended since the last flush, and close the log."""
        self._record_all()
        self.log.close(now_s)

    def _record_all(self) -> None:
        for _ in self._record_steps():
            pass

    def _bucket(self, request: TraceRequest) -> str:
        return bucket_of(request.input_tokens, self._buckets) or BEYOND

    def _task(self, request: TraceRequest) -> str | None:
        return self._tasks.get(request.id, request.session)

    def _record_steps(self) -> Iterator[None]:
        """Record the requests that have ended by the first step."""
        ended, self._ended = self._ended, []
        self.many.clear()
        firsts_s = array("d")
        for start in range(0, len(ended), LOGGED_TOGETHER):
            some: list[tuple[Row, Latency]] = []
            for pair in ended[start : start + LOGGED_TOGETHER]:
                some.append(self._record(*pair))
                if len(some) % RECORDED_TOGETHER == 0:
                    yield
            for bucket, tags in self._tags.items():
                if logged := [pair for pair in some if pair[0].bucket == bucket]:
                    self._log_ended(tags, logged)
            firsts_s += _known(row.ttft_response_s for row, _ in some if row.outcome == "ok")
            yield
        if firsts_s:
            record_all(self.live.ttft, all_to_us(firsts_s))
            yield

    def _record(self, request: TraceRequest, exchange: ClientExchange) -> tuple[Row, Latency]:
        """Measure one request, and add it to all but the log."""
        exchange.settle()
        latency = measure(
            exchange.intended_s,
            exchange.sent_s,
            exchange.cap_wait_s,
            exchange.events,
            exchange.output_tokens,
        )
        row = row_of(request, self._bucket(request), exchange, latency, self._task(request))
        self._table.add(row)
        self.totals.add(row)
        if self._answers is not None and exchange.answer is not None:
            line = {"id": request.id, "answer": exchange.answer}
            self._answers.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        live = self.live
        live.unread -= 1
        if row.outcome == "ok":
            live.done += 1
            live.output_tokens += row.output_tokens or 0
        else:
            lost = live.rejected if row.outcome == "rejected" else live.failed
            lost[row.reason or "unknown"] += 1
        return row, latency

    def _log_ended(self, tags: Mapping[str, str], ended: Sequence[tuple[Row, Latency]]) -> None:
        log = self.log
        log.record_each(
            tags["sched_lag"], [latency.pacing_lag_s + latency.cap_wait_s for _, latency in ended]
        )
        rejects = (row.reject_latency_s for row, _ in ended if row.outcome == "rejected")
        log.record_each(tags["reject"], _known(rejects))
        done = [row for row, _ in ended if row.outcome == "ok"]
        waits_ms = _known(row.queue_ms for row in done)
        log.record_each(tags["queue_wait"], [wait_ms / 1e3 for wait_ms in waits_ms])
        for metric, of_row in TIMES_OF_ROW.items():
            log.record_each(tags[metric], _known(map(of_row, done)))
        for row, latency in ended:
            if row.outcome == "ok":
                self._log_gaps(tags, latency)

    def _log_gaps(self, tags: Mapping[str, str], latency: Latency) -> None:
        log = self.log
        if latency.icl_s:
            log.record_each(tags["icl"], latency.icl_s)
            if latency.itl_s is None:
                log.record_each(tags["itl"], latency.icl_s)
        for gap_s, tokens in latency.itl_s or ():
            log.record(tags["itl"], gap_s, tokens)


async def _in_turns(steps: Iterator[None], spare: SpareTime) -> None:
    try:
        await spare.turn()
        for _ in steps:
            await spare.turn()
    finally:
        # The end of the run cancels this task, and only this task has the rows of the next steps:
        # write them now. All requests are sent, so this delays no request.
        for _ in steps:
            pass


def _known(values: Iterable[float | None]) -> "array[float]":
    return array("d", [value for value in values if value is not None])


def interval_s(scale: float) -> float:
    """Return the length of an interval of the log, in seconds of a run at this time scale."""
    return max(1.0, LEAST_FLUSH_WALL_S * scale)


async def flush_every_interval(recorder: Recorder, clock: Clock, spare: SpareTime) -> None:
    """Flush once an interval until cancelled.

    Garbage is collected then, in a turn in which no request is due. Python itself would collect it
    many times a second, and arrivals would be late: 3 ms at 3,000/s. Virtual time has no
    late arrivals.
    """
    due_s = every_s = interval_s(clock.scale)
    if not clock.virtual:
        gc.disable()
    try:
        while True:
            left_s = clock.wall(due_s - clock.now())
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await recorder.many.wait()
                await recorder.catch_up(spare)
            except TimeoutError:
                await recorder.flush(clock.now(), spare)
                if not clock.virtual:
                    await spare.turn()
                    gc.collect()
                due_s += every_s
    finally:
        gc.enable()
