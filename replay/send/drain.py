"""Run a replay until it is over: Ctrl-C stops it, and answers that still run are waited for."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from forebay.replay.clock.clock import Clock
from forebay.replay.send.dispatch import Dispatch
from forebay.traces.ground.event_loop import fast_runner

T = TypeVar("T")


class Stop:
    """Stops a run: the first request stops sending, the second stops waiting for answers."""

    def __init__(self) -> None:
        self.sending = asyncio.Event()
        self.waiting = asyncio.Event()

    def request(self) -> None:
        (self.waiting if self.sending.is_set() else self.sending).set()


def run_on_fast_loop(work: Callable[[Stop], Coroutine[Any, Any, T]]) -> T:
    """Run `work`, on uvloop if installed.

    The first Ctrl-C stops sending, the second Ctrl-C also stops waiting for answers.
    """
    # Allow more connections: each is a file descriptor, and the usual limit is 1024.
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def main() -> T:
        stop = Stop()
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # Windows has no signal handlers on loops
            loop.add_signal_handler(signal.SIGINT, stop.request)
        return await work(stop)

    with fast_runner() as runner:
        return runner.run(main())


async def drain(
    dispatch: Dispatch,
    clock: Clock,
    stop: Stop,
    ended: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> str:
    """Wait for running answers up to `timeout_s` of the run, and return how the run ended."""
    if not dispatch.idle.is_set():
        if ended == "interrupted":
            say("stopped sending; waiting for running answers, Ctrl-C again cancels them")
        waits = {asyncio.ensure_future(event.wait()) for event in (dispatch.idle, stop.waiting)}
        if ended != "interrupted":
            waits.add(asyncio.ensure_future(stop.sending.wait()))
        limit_s = clock.wall(timeout_s)
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
    if dispatch.idle.is_set():
        return ended
    if stop.sending.is_set():
        ended = "interrupted"
    else:
        ended = "drain timeout"
        say(f"cancelled the answers still running {timeout_s:g} s after the last arrival")
    dispatch.give_up()
    await dispatch.idle.wait()
    return ended
