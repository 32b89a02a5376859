"""Replay a trace twice: to the engines in round robin, and through the proxy.

Each side starts its own engines, so that neither finds the other's prefix cache.
"""

from contextlib import AsyncExitStack
from dataclasses import replace

from forebay.analysis.demo.processes import Engines, engines, proxy
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.folder import make_folder
from forebay.replay.runner import replay
from forebay.replay.send.drain import Stop
from forebay.replay.sim.scenario import DIRECT
from forebay.traces.ground.command_line.messages import talk

PROXIED = "forebay"


async def side_by_side(fleet: Engines, base: ReplayOptions, stop: Stop) -> bool:
    """Run both sides into `direct` and `forebay` of the folder `base.out`. False if interrupted.

    Args:
        base: options of both replays. Their targets, folders and time scale are set here.

    Raises InputError for bad input, and ServerFailed if a server does not start.
    """
    logs = base.out / "logs"
    make_folder(logs)
    for name in (DIRECT, PROXIED):
        async with AsyncExitStack() as stack:
            urls = await stack.enter_async_context(engines(fleet, logs))
            if name == PROXIED:
                urls = [await stack.enter_async_context(proxy(urls, logs, fleet))]
            talk(f"{name}: {fleet.count} x {fleet.model} on {fleet.gpu} ...")
            options = replace(base, targets=urls, out=base.out / name, time_scale=fleet.time_scale)
            if (await replay(options, stop)).interrupted:
                return False
    return True
