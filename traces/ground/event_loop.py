"""An event loop with short delays: uvloop where it is installed, and short garbage collections."""

import asyncio
import atexit
import gc
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGQUIT")  # nginx takes the last one for a graceful end
COLLECTIONS = (1_000, 50, 10)  # new objects for a collection, young collections for an older one
STRAY_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGALRM")  # sent by tools that mean another program


def fast_runner() -> asyncio.Runner:
    """Return a runner for the event loop of a program. Use it in `with`."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@contextmanager
def last_runner() -> Iterator[asyncio.Runner]:
    """Enter a runner with which the program ends: a signal that comes then does not kill it.

    Signals that mean nothing here, and whose default ends a process, are ignored.
    """
    _ignore(STRAY_SIGNALS)
    with fast_runner() as runner:
        try:
            yield runner
        finally:
            _ignore(STOP_SIGNALS)


def _ignore(names: Iterable[str]) -> None:
    for name in names:
        if name in signal.Signals.__members__:  # Windows has few
            signal.signal(signal.Signals[name], signal.SIG_IGN)


def on_signal(name: str, act: Callable[[], object]) -> None:
    """Call `act` in the running loop on each signal of this name. Only for the main thread.

    Unlike `loop.add_signal_handler` this outlasts the loop, whose end would bring back the default:
    the process would die of a second signal, and `timeout` sends two.
    """
    loop = asyncio.get_running_loop()

    def handle(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    if name in signal.Signals.__members__:  # Windows has no SIGHUP
        signal.signal(signal.Signals[name], handle)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine while the block runs. The end of the block cancels it, and waits for it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep the pauses of garbage collection at about 1 ms. Enter this when everything is set up.

    Objects that exist by then, mostly modules, are not searched again: that takes 20 to 40 ms each
    time (measured). Nor is anything searched when the process ends, which takes 0.3 s: the objects
    of that moment need no clean end.

    Requests leave next to no rings of references (0.04 objects each), so a collection mostly
    searches requests that still run. Python's default searches them again after every 7,000 new
    objects. Of 200 requests of 4 KB at a time this takes 12.5 % of the processor time, and every
    seventh such search is one of everything, 20 to 30 ms long. With COLLECTIONS it is 6.5 %.
    """
    atexit.register(gc.freeze)
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
