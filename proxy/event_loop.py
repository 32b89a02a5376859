"""The fastest event loop there is: uvloop where it is installed, asyncio's own elsewhere."""

import asyncio


def fast_runner() -> asyncio.Runner:
    """A runner for a program's one event loop; use in `with`."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
