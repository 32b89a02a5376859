"""Run a replay on the fastest event loop available. Ctrl-C stops sending."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from forebay.replay.send.drain import Stop
from forebay.traces.ground.event_loop import fast_runner

T = TypeVar("T")


def run_on_fast_loop(work: Callable[[Stop], Coroutine[Any, Any, T]]) -> T:
    """Run `work`, on uvloop if installed.

    The first Ctrl-C stops sending, the second Ctrl-C also stops waiting for answers.
    """
    _raise_file_limit()

    async def main() -> T:
        stop = Stop()
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # Windows has no signal handlers on loops
            loop.add_signal_handler(signal.SIGINT, stop.request)
        return await work(stop)

    with fast_runner() as runner:
        return runner.run(main())


def _raise_file_limit() -> None:
    """Allow more connections: each is a file descriptor, and the usual limit is 1024."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
