"""Replay a trace twice: to the engines in round robin, and through the proxy.

Each side starts its own engines, so that neither finds the other's prefix cache.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.analysis.demo.processes import Engines, engines, proxy
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.folder import check_folder, make_folder
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import Stop
from forebay.replay.sim.scenario import DIRECT
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.schema import TraceRequest

PROXIED = "forebay"


@dataclass(frozen=True, slots=True)
class Sides:
    """The two finished runs. `proxied` is None if the first was interrupted."""

    direct: Summary
    proxied: Summary | None


async def side_by_side(
    trace: Path | Sequence[TraceRequest],
    out: Path,
    fleet: Engines,
    base: ReplayOptions | None = None,
    *,
    stop: Stop | None = None,
) -> Sides:
    """Run both sides into `out/direct` and `out/forebay`.

    Args:
        base: options of both replays; trace, targets, out and time_scale are set here.

    Raises InputError for bad input, and ServerFailed if a server does not start.
    """
    base = base or ReplayOptions(trace=trace, targets=(), out=out)
    for name in (DIRECT, PROXIED):
        check_folder(out / name, force=base.force)
    logs = out / "logs"
    make_folder(logs)
    direct = await _side(DIRECT, trace, out, fleet, base, stop)
    if direct.interrupted:
        return Sides(direct, None)
    return Sides(direct, await _side(PROXIED, trace, out, fleet, base, stop))


async def _side(
    name: str,
    trace: Path | Sequence[TraceRequest],
    out: Path,
    fleet: Engines,
    base: ReplayOptions,
    stop: Stop | None,
) -> Summary:
    logs = out / "logs"
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(engines(fleet, logs))
        if name == PROXIED:
            urls = [await stack.enter_async_context(proxy(urls, logs, fleet))]
        talk(f"{name}: {fleet.count} x {fleet.model} on {fleet.gpu} ...")
        options = replace(
            base, trace=trace, targets=urls, out=out / name, time_scale=fleet.time_scale
        )
        return await replay(options, stop)
