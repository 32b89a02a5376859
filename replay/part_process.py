"""Run one process of a replay that has several. `parts/run_parts.py` starts it.

Its standard input has the job in one line, then one line with the common start, then one line for
each time the run is to stop. Its end stops the run at once. Standard output has one JSON line for
each message: ready, live figures, and at last how the run ended.
"""

import asyncio
import base64
import os
import pickle
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from forebay.replay.clock.clock import Clock
from forebay.replay.parts.divide import Part, PartJob
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.results.recorder import LIVE_COUNTS, LIVE_REASONS, Live
from forebay.replay.runner import replay
from forebay.replay.send.drain import Stop, run_on_fast_loop
from forebay.traces.ground.errors import InputError

REPORT_EVERY_S = 0.5


def main() -> int:
    job: PartJob = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    try:
        ended = run_on_fast_loop(partial(_replay_part, job))
    except InputError as error:
        _say(error=str(error))
        return 2
    _say(ended=ended)
    return 0


async def _replay_part(job: PartJob, stop: Stop) -> str:
    # Orders arrive as lines on stdin.
    orders = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(orders)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    listening: list[asyncio.Task[None]] = []

    async def start(clock: Clock) -> None:
        _say(ready=True)
        line = await orders.readline()
        if not line:
            raise InputError("the process that began this run has ended")
        clock.restart(float(line))
        listening.append(asyncio.create_task(_listen(orders, stop)))
        await clock.sleep(-clock.now())

    async def report(live: Live, _plan: ReplayPlan, _clock: Clock) -> None:
        while job.reports:
            counts = {name: getattr(live, name) for name in (*LIVE_COUNTS, *LIVE_REASONS)}
            _say(live={**counts, "ttft": live.ttft.encode().decode("ascii")})
            await asyncio.sleep(REPORT_EVERY_S)

    # Replay, then stop listening.
    try:
        return (await replay(job.options, stop, Part(job, start, report))).ended
    finally:
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)


async def _listen(orders: asyncio.StreamReader, stop: Stop) -> None:
    """Stop the run at each line, and at the end of input without waiting for answers."""
    while await orders.readline():
        stop.request()
    stop.request()
    stop.request()


def _say(**message: Any) -> None:
    # If the process that reads this has ended, `_listen` stops the run.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    sys.exit(main())
