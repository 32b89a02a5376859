"""Run the progress line and sample /metrics during a replay, from its start."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.recorder import Live
from forebay.replay.results.server_metrics import MetricsSampler
from forebay.traces.command_line.messages import is_quiet

Progress = Callable[[Live, int, Clock], Coroutine[Any, Any, None]]


def watching(
    options: ReplayOptions, report: Progress | None, sampler: MetricsSampler, folder: RunFolder
) -> Progress | None:
    """Return the coroutine function to run during the replay, or None.

    `report` replaces the progress line in a part of a replay.
    """
    progress = _progress(options, report)
    if not options.metrics:
        return progress

    async def show_and_sample(live: Live, count: int, clock: Clock) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sampler.every_second(clock, folder.metrics))
            if progress is not None:
                tasks.create_task(progress(live, count, clock))

    return show_and_sample


def _progress(options: ReplayOptions, report: Progress | None) -> Progress | None:
    """Load the progress line and Rich, which it needs, before the clock starts."""
    if report is not None:
        return report
    if options.quiet or is_quiet():
        return None
    from forebay.replay.results.progress import print_progress, show_progress

    return show_progress if sys.stderr.isatty() else print_progress
