"""Show the progress of a replay on stderr.

A terminal has a screen that is renewed in place: counts, reasons of rejections and failures, and of
the last ten seconds the rates and TTFT, and with `--metrics` the load of the servers. A log file
gets a line every ten seconds. The run's own event loop draws, between arrivals. Rich's refresh
thread would take the interpreter lock away from the sender at unpredictable moments.
"""

import asyncio
import select
import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.recorder import Live
from forebay.replay.results.server_metrics import MetricsSampler, gauge_text
from forebay.replay.results.summary import rank_of
from forebay.traces.ground.command_line.messages import is_quiet, shortlist, talk
from forebay.traces.ground.command_line.quantities import short_time

Progress = Callable[[Live, ReplayPlan, Clock], Coroutine[Any, Any, None]]
EVERY_S = 0.5  # wall time between two frames
FRAMES = 20  # frames between which rates are computed: 10 s
PRINTED_EVERY_S = 10.0


class ShownFigures(NamedTuple):
    """The live figures of a moment, from which rates are computed.

    Attributes:
        ttft: the counts of the histogram.
    """

    at_s: float
    sent: int
    done: int
    output_tokens: int
    ttft: Any


def watching(
    options: ReplayOptions,
    report: Progress | None,
    sampler: MetricsSampler,
    folder: RunFolder,
    spare: SpareTime,
) -> Progress | None:
    """Return the coroutine function to run during the replay, or None.

    It shows the progress and samples /metrics. `report` replaces the progress in a part of a
    replay.
    """
    progress = report or (None if options.quiet or is_quiet() else _shown(spare))
    table = folder.metrics
    if table is None:
        return progress

    async def show_and_sample(live: Live, plan: ReplayPlan, clock: Clock) -> None:
        live.gauges = table.gauges
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sampler.every_second(clock, table))
            if progress is not None:
                tasks.create_task(progress(live, plan, clock))

    return show_and_sample


def has_screen() -> bool:
    """True if stderr is a terminal on which lines can be drawn again."""
    from rich.console import Console

    return sys.stderr.isatty() and not Console(file=sys.stderr).is_dumb_terminal


def _shown(spare: SpareTime) -> Progress:
    if not has_screen():
        return print_progress
    import rich.live  # noqa: F401 - `show_screen` uses it: import it now, not during the run

    return partial(show_screen, spare=spare)


def describe(live: Live, total: int, now_s: float) -> str:
    """Format the progress as one line of a log."""
    rejected, failed = live.rejected.total(), live.failed.total()
    parts = [
        f"{now_s:6.1f} s",
        f"sent {live.sent}/{total}",
        f"done {live.done}",
        *([f"rejected {rejected}"] if rejected else []),
        *([f"failed {failed}"] if failed else []),
        f"in flight {live.in_flight}",
    ]
    if live.ttft.total_count:
        at = live.ttft.get_percentile_to_value_dict([50.0, 99.0])
        parts.append(f"TTFT p50 {at[50.0] / 1e3:.0f} ms p99 {at[99.0] / 1e3:.0f} ms")
    return "  ".join(parts)


async def print_progress(live: Live, plan: ReplayPlan, clock: Clock) -> None:
    """Print a line every `PRINTED_EVERY_S` seconds until cancelled."""
    while True:
        await asyncio.sleep(PRINTED_EVERY_S)
        talk(describe(live, plan.count, clock.now()))


async def show_screen(live: Live, plan: ReplayPlan, clock: Clock, spare: SpareTime) -> None:
    """Renew the screen until cancelled, then clear it."""
    from rich.console import Console
    from rich.live import Live as Display
    from rich.text import Text

    console = Console(file=sys.stderr)
    moments = deque([moment_of(live, 0.0)], FRAMES + 1)
    with Display(console=console, auto_refresh=False, transient=True) as display:
        while True:
            await asyncio.sleep(EVERY_S)
            await spare.turn()
            if _can_write(console.file):
                moments.append(moment_of(live, clock.now()))
                lines = "\n".join(frame(live, plan, moments[0], moments[-1]))
                display.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)


def _can_write(terminal: Any) -> bool:
    """True if text would not block the sender, as on a terminal that Ctrl-S has stopped."""
    try:
        return bool(select.select((), (terminal,), (), 0.0)[1])
    except (OSError, ValueError):  # Windows cannot ask
        return True


def moment_of(live: Live, now_s: float) -> ShownFigures:
    import numpy

    counts = numpy.frombuffer(live.ttft.counts, dtype=numpy.int64).copy()
    return ShownFigures(now_s, live.sent, live.done, live.output_tokens, counts)


def frame(live: Live, plan: ReplayPlan, before: ShownFigures, now: ShownFigures) -> list[str]:
    """Return the lines of the screen. Rates and TTFT are of the time between the two moments."""
    schedule, seconds = plan.schedule, max(now.at_s - before.at_s, 1e-9)
    planned = f" of {schedule.window_s:,.0f} s" if schedule.window_s else ""
    counts = [f"done {live.done:,}"]
    counts += [*_lost("rejected", live.rejected), *_lost("failed", live.failed)]
    rates = [f"offered {(now.sent - before.sent) / seconds:,.2f}/s"]
    if plan.agenda is None and schedule.times_s:
        due = [bisect_left(schedule.times_s, moment.at_s) for moment in (before, now)]
        rates.insert(0, f"asked {(due[1] - due[0]) / seconds:,.2f}/s")
    rates.append(f"answered {(now.done - before.done) / seconds:,.2f}/s")
    tokens_per_s = (now.output_tokens - before.output_tokens) / seconds
    first = _percentiles(live.ttft, now.ttft - before.ttft)
    lines = [
        f"{now.at_s:,.1f} s{planned}   sent {live.sent:,} of {plan.count:,}   "
        f"in flight {live.in_flight:,}",
        "   ".join(counts),
        f"last {seconds:.{int(seconds < 10.0)}f} s: {'   '.join(rates)}",
        f"    of these answers: TTFT {first}   {tokens_per_s:,.0f} output tokens/s",
    ]
    servers = "" if live.gauges is None else gauge_text(live.gauges.latest(before.at_s))
    return [*lines, servers] if servers else lines


def _lost(outcome: str, reasons: Counter[str]) -> list[str]:
    if not reasons:
        return []
    each = shortlist(f"{reason} {count:,}" for reason, count in reasons.most_common())
    return [f"{outcome} {reasons.total():,} ({each})"]


def _percentiles(histogram: Any, counts: Any) -> str:
    import numpy

    below = numpy.cumsum(counts)
    total = int(below[-1])
    if not total:
        return "-"
    p50_s, p95_s = (
        histogram.get_value_from_index(int(numpy.searchsorted(below, rank_of(share, total)))) / 1e6
        for share in (50.0, 95.0)
    )
    return f"p50 {short_time(p50_s)}   p95 {short_time(p95_s)}"
