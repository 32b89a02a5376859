"""Show one live line on stderr while a replay runs: counts, requests in flight, TTFT so far.

The run's own event loop draws it twice a second. Rich's refresh thread would take the interpreter
lock away from the sender at unpredictable moments.
"""

import asyncio
import sys

from rich.console import Console
from rich.live import Live as Display
from rich.text import Text

from forebay.replay.clock import Clock
from forebay.replay.recorder import Live

EVERY_S = 0.5


def describe(live: Live, total: int, now_s: float) -> str:
    """Format the line as plain text."""
    parts = [
        f"{now_s:6.1f} s",
        f"sent {live.sent}/{total}",
        f"done {live.done}",
        f"rejected {live.rejected}",
        f"failed {live.failed}",
        f"in flight {live.in_flight}",
    ]
    if live.ttft.total_count:
        at = live.ttft.get_percentile_to_value_dict([50.0, 99.0])
        parts.append(f"TTFT p50 {at[50.0] / 1e3:.0f} ms p99 {at[99.0] / 1e3:.0f} ms")
    return "  ".join(parts)


async def show_progress(live: Live, total: int, clock: Clock) -> None:
    """Update the line until cancelled, then leave it on the screen."""
    console = Console(file=sys.stderr)
    with Display(console=console, auto_refresh=False, transient=False) as display:
        while True:
            line = Text(describe(live, total, clock.now()), no_wrap=True, overflow="ellipsis")
            display.update(line, refresh=True)
            await asyncio.sleep(EVERY_S)
