"""The progress of a replay: a screen on a terminal, lines in a log."""

import asyncio
import os
import pty
import termios
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from stages.replay_server import Server, rows, run_one

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import ReplayPlan, make_plan
from forebay.replay.plan.schedule import parse_arrivals
from forebay.replay.plan.target import Served
from forebay.replay.results.progress import (
    EVERY_S,
    PRINTED_EVERY_S,
    describe,
    frame,
    moment_of,
    print_progress,
)
from forebay.replay.results.recorder import Live
from forebay.replay.results.server_metrics import MetricsTable


class Terminal:
    """A pseudo-terminal as standard error. `seen` is what was drawn, if somebody reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.file = os.fdopen(slave, "w")
        self.seen = b""
        monkeypatch.setattr("sys.stderr", self.file)
        monkeypatch.setenv("TERM", "xterm")

    def read(self) -> None:
        with suppress(OSError):
            while part := os.read(self._master, 65_536):
                self.seen += part

    @contextmanager
    def read_beside(self) -> Iterator[None]:
        reader = threading.Thread(target=self.read)
        reader.start()
        try:
            yield
        finally:
            self.file.close()
            reader.join()
            os.close(self._master)


async def plan_of(count: int = 40, gap_s: float = 0.5, **options: Any) -> ReplayPlan:
    asked = ReplayOptions(rows(count, gap_s), ["http://a"], Path("runs/a"), **options)
    return await make_plan(asked, Served("tiny", None))


def test_the_line_of_a_log() -> None:
    assert "rejected" not in describe(Live(sent=12, done=7), 40, 3.25)
    live = Live(sent=12, done=7, rejected=Counter(queue_full=2), failed=Counter(connect=1))
    line = describe(live, 40, 3.25)
    assert "rejected 2  failed 1  in flight 2" in line
    assert "TTFT" not in line  # nothing measured is not 0 ms
    live.ttft.record_value(250_000)
    line = describe(live, 40, 3.25)
    assert "sent 12/40" in line
    assert "TTFT p50 25" in line


async def test_progress_without_a_terminal_is_a_line_from_time_to_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live, plan = Live(sent=3), await plan_of(9)
    with suppress(TimeoutError):
        await asyncio.wait_for(print_progress(live, plan, Clock(2.0)), 2.5 * PRINTED_EVERY_S)
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip().split("  ")[0] for line in lines] == ["20.0 s", "40.0 s"]
    assert all("sent 3/9" in line for line in lines)


async def test_the_screen_has_the_rates_and_the_first_tokens_of_its_last_seconds(
    tmp_path: Path,
) -> None:
    """One line had counts and the TTFT of the whole run: a server that grew slow looked well."""
    live = Live(sent=4, done=4, output_tokens=100)
    for _ in range(1_000):
        live.ttft.record_value(20_000)
    before = moment_of(live, 2.0)
    live.sent, live.done, live.output_tokens = 24, 14, 600
    live.rejected.update(queue_full=3, kv_full=1)
    live.failed.update({"conn\x1b[2Ject": 2})
    for _ in range(10):
        live.ttft.record_value(1_500_000)
    table = MetricsTable(tmp_path / "m.parquet", tmp_path / "m.arrow")
    live.gauges = table.gauges
    page = 'DCGM_FI_DEV_POWER_USAGE{UUID="%s"} 700\nDCGM_FI_DEV_GPU_UTIL{UUID="%s"} %d\n'
    table.add(11.0, "http://dcgm", page % ("a", "a", 90) + page % ("b", "b", 70))
    table.add(11.0, "http://vllm", 'vllm:kv_cache_usage_perc{engine="0"} 0.25\n')
    table.abandon()
    assert frame(live, await plan_of(), before, moment_of(live, 12.0)) == [
        "12.0 s of 20 s   sent 24 of 40   in flight 4",
        "done 14   rejected 4 (queue_full 3, kv_full 1)   failed 2 (conn\N{REPLACEMENT CHARACTER}"
        "[2Ject 2)",
        "last 10 s: asked 2.00/s   offered 2.00/s   answered 1.00/s",
        "    of these answers: TTFT p50 1.50 s   p95 1.50 s   50 output tokens/s",
        "GPU use 80%   GPU power 1,400 W   KV cache use 25%",
    ]
    # Old samples are not shown, and a time without answers has no TTFT.
    later = frame(live, await plan_of(), moment_of(live, 12.0), moment_of(live, 22.0))
    assert later[-1] == "    of these answers: TTFT -   0 output tokens/s"


async def test_a_closed_loop_asks_for_no_rate() -> None:
    plan = await plan_of(arrivals=parse_arrivals("closed:4"))
    moment = moment_of(Live(), 0.0)
    lines = frame(Live(), plan, moment, moment)
    assert lines[0] == "0.0 s   sent 0 of 40   in flight 0"
    assert "asked" not in lines[2]


def test_a_run_renews_its_screen_in_place_at_most_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(monkeypatch)
    with terminal.read_beside():
        run_one(tmp_path / "run", rows(31, 1.0), quiet=False)
    drawn = terminal.seen.decode()
    frames = drawn.count("of these answers")
    assert 0 < frames <= 30.1 / EVERY_S + 1  # rich draws the last one again
    assert "29.5 s of 31 s   sent 30 of 31   in flight 0" in drawn
    assert "asked 1.00/s   offered 1.00/s   answered 1.00/s\r\n" in drawn
    assert drawn.count("\x1b[1A\x1b[2K") >= 3 * (frames - 1)  # the lines are written again
    # The last frame is cleared: the summary says more.
    assert drawn.rstrip("\r\n").endswith("\x1b[2K")


def test_a_stopped_terminal_does_not_stop_the_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-S, or behind a slow connection, the sender waited for its own progress line."""
    terminal, server = Terminal(monkeypatch), Server()
    original, goes_on = server.post, threading.Event()

    def flow(how: int) -> None:
        termios.tcflow(terminal.file.fileno(), how)

    def let_go() -> None:  # the old code would wait for ever
        goes_on.set()
        flow(termios.TCOON)

    async def post(request: Any) -> Any:
        if len(server.arrived_s) in (1, 300):
            flow(termios.TCOOFF if len(server.arrived_s) == 1 else termios.TCOON)
        return await original(request)

    monkeypatch.setattr(server, "post", post)
    timer = threading.Timer(30.0, let_go)
    timer.start()
    with terminal.read_beside():
        summary, _ = run_one(tmp_path / "run", rows(301, 1.0), server, quiet=False)
    timer.cancel()
    assert summary.values["completed"] == 301
    assert not goes_on.is_set()
