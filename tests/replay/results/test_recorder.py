"""replay/results/recorder.py, folder.py: each measurement is in the folder of an ended run once."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from aiohttp import web
from stages.replay_server import Server, answer, rows, run_one, table

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.clock.virtual_loop import run
from forebay.replay.results import folder as run_folder
from forebay.replay.results.arrow_file import ArrowFile
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.recorder import Recorder
from forebay.replay.results.row import Row, row_of
from forebay.replay.results.summary import RunTotals
from forebay.replay.send.http.exchange import ClientExchange
from forebay.replay.send.http.measure import Latency
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import HlogWriter, IntervalLog, read_hlog
from forebay.traces.ground.schema import TraceRequest


def answered(number: int) -> tuple[TraceRequest, ClientExchange]:
    """Request `number` and its answer of two tokens; every third is about a document."""
    request = TraceRequest(f"r{number}", 0.0, 32 if number % 3 else 9000, 2)
    exchange = ClientExchange(f"x-{number}", number / 1000, sent_s=number / 1000, queue_ms=1.0)
    for gap_s in (0.1, 0.2):
        exchange.events.add(exchange.intended_s + gap_s)
    exchange.done_s, exchange.output_tokens = exchange.intended_s + 0.2, 2
    exchange.ok()
    return request, exchange


def counts(folder: Path) -> dict[str, int]:
    logs = read_hlog(folder / "latency.hlog")
    return {tag: sum(one.histogram.total_count for one in logs[tag]) for tag in logs}


# ---- the columns


def test_each_value_of_a_request_is_in_the_column_of_its_name() -> None:
    request, exchange = answered(1)
    for number, name in enumerate(set(ClientExchange.__slots__) - {"events", "outcome"}):
        setattr(exchange, name, number)
    exchange.outcome = "failed"
    latency = Latency(*range(100, 100 + len(Latency.__slots__)))
    row = row_of(request, "chat", exchange, latency, "a task")
    of_latency = set(Latency.__slots__)
    for part, names in (
        (latency, of_latency),
        (exchange, set(ClientExchange.__slots__) - of_latency),
    ):
        for name in names & set(Row.__slots__):
            assert getattr(row, name) == getattr(part, name), name
    asked = row.id, row.bucket, row.input_tokens, row.asked_tokens, row.task
    assert asked == ("r1", "chat", 32, 2, "a task")


# ---- the end of a run during a flush


def test_a_flush_cancelled_at_any_turn_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "GROUP_ROWS", 20)
    requests = 50  # two groups, and some rows that fill none

    async def cancelled_after(turns: int, folder: RunFolder) -> tuple[bool, dict[str, int]]:
        """Cancel a flush after `turns`; return whether it was over, and the totals by tag."""
        log = IntervalLog(HlogWriter(folder.hlog, 0.0))
        recorder = Recorder(log, folder.table, RunTotals(["chat", "document"], ()), DEFAULT_BUCKETS)
        for number in range(requests):
            recorder.finished(*answered(number))
        flushing = asyncio.create_task(recorder.flush(1.0, SpareTime(Clock())))
        for _ in range(turns):
            await asyncio.sleep(0)
        over = flushing.done()
        flushing.cancel()
        await asyncio.wait([flushing])
        recorder.close(1.5)
        folder.commit({}, {})
        return over, {tag: total.histogram.total_count for tag, total in log.totals.items()}

    expected = Counter(
        f"{metric}.{'chat' if number % 3 else 'document'}"
        for number in range(requests)
        for metric in ("sched_lag", "queue_wait", "ttft_response", "ttft_service", "e2e_response",
                       "e2e_service", "tpot", "stall", "icl", "itl")
    )  # fmt: skip
    turns, over = 0, False
    while not over:
        with RunFolder(tmp_path / str(turns)) as folder:
            over, totals = run(cancelled_after(turns, folder))
        kept = [row["id"] for row in table(folder.path)]
        assert kept == [f"r{number}" for number in range(requests)], f"{turns} turns"
        assert counts(folder.path) == totals == expected, f"{turns} turns"
        turns += 1
    assert turns > len(expected) + 2 * len(
        pyarrow.parquet.read_schema(folder.path / run_folder.TABLE)
    )


@pytest.mark.parametrize("turns", [0, 8, 16, 24, 32])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_run_that_ends_during_a_flush_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, given_up: bool
) -> None:
    """The last answer ends, or is given up, in the loop turns in which second 1 is written."""
    monkeypatch.setattr(run_folder, "GROUP_ROWS", 10)
    both = zip(rows(30), rows(30, input_tokens=9000), strict=True)
    trace = [document if at % 3 else chat for at, (chat, document) in enumerate(both)]
    trace[-1] = replace(trace[-1], output_tokens=1)

    async def last_at_second_1(
        server: Server, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if body["max_tokens"] == 1:
            await asyncio.sleep(1.0 - asyncio.get_running_loop().time())
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.sleep(1000.0 if given_up else 0.0)
        return await answer(server, request, body)

    summary, _ = run_one(
        tmp_path / "run",
        trace,
        Server(last_at_second_1, first_s=0.0),
        stop_at_s=(1.0,) if given_up else (),
    )
    told = summary.values
    assert summary.ended == ("interrupted" if given_up else "complete")
    assert told["duration_s"] == pytest.approx(1.0)
    assert (told["requests"], told["completed"]) == (30, 29 if given_up else 30)
    assert [row["id"] for row in table(summary.folder)] == [request.id for request in trace]
    assert told["ttft_ms"]["all"]["count"] == told["completed"]
    assert told["schedule_lag_ms"]["count"] == 30
    kept = counts(summary.folder)
    assert kept["ttft_response.chat"] + kept["ttft_response.document"] == told["completed"]
    assert kept["sched_lag.chat"] + kept["sched_lag.document"] == 30


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ArrowFile, columns: list[Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArrowFile, "_write", full)
    with pytest.raises(InputError, match=r"--out: .*run cannot be written \(No space left"):
        run_one(tmp_path / "run", rows(30))
    assert list((tmp_path / "run").iterdir()) == []
