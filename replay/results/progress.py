"""Show the progress of a replay on stderr: counts, requests in flight, TTFT so far.

A terminal has one live line. A log file gets a line every ten seconds. The run's own event loop
draws it. Rich's refresh thread would take the interpreter lock away from the sender at
unpredictable moments.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.recorder import Live
from forebay.replay.results.server_metrics import MetricsSampler
from forebay.traces.ground.command_line.messages import is_quiet, talk

Progress = Callable[[Live, int, Clock], Coroutine[Any, Any, None]]
EVERY_S = 0.5  # interval on a terminal
PRINTED_EVERY_S = 10.0


def watching(
    options: ReplayOptions, report: Progress | None, sampler: MetricsSampler, folder: RunFolder
) -> Progress | None:
    """Return the coroutine function to run during the replay, or None.

    It shows the progress and samples /metrics. `report` replaces the progress line in a part of a
    replay.
    """
    progress = report or (None if options.quiet or is_quiet() else _progress_line())
    if not options.metrics:
        return progress

    async def show_and_sample(live: Live, count: int, clock: Clock) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sampler.every_second(clock, folder.metrics))
            if progress is not None:
                tasks.create_task(progress(live, count, clock))

    return show_and_sample


def _progress_line() -> Progress:
    if not sys.stderr.isatty():
        return print_progress
    import rich.live  # noqa: F401 - `show_progress` uses it: import it now, not during the run

    return show_progress


def describe(live: Live, total: int, now_s: float) -> str:
    """Format the line as plain text."""
    parts = [
        f"{now_s:6.1f} s",
        f"sent {live.sent}/{total}",
        f"done {live.done}",
        *([f"rejected {live.rejected}"] if live.rejected else []),
        *([f"failed {live.failed}"] if live.failed else []),
        f"in flight {live.in_flight}",
    ]
    if live.ttft.total_count:
        at = live.ttft.get_percentile_to_value_dict([50.0, 99.0])
        parts.append(f"TTFT p50 {at[50.0] / 1e3:.0f} ms p99 {at[99.0] / 1e3:.0f} ms")
    return "  ".join(parts)


async def show_progress(live: Live, total: int, clock: Clock) -> None:
    """Update the line until cancelled, then leave it on the screen."""
    from rich.console import Console
    from rich.live import Live as Display
    from rich.text import Text

    console = Console(file=sys.stderr)
    with Display(console=console, auto_refresh=False, transient=False) as display:
        while True:
            line = Text(describe(live, total, clock.now()), no_wrap=True, overflow="ellipsis")
            display.update(line, refresh=True)
            await asyncio.sleep(EVERY_S)


async def print_progress(live: Live, total: int, clock: Clock) -> None:
    """Print a line every `PRINTED_EVERY_S` seconds until cancelled."""
    while True:
        await asyncio.sleep(PRINTED_EVERY_S)
        talk(describe(live, total, clock.now()))
