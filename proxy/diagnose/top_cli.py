"""`forebay top`: show the state of a running proxy in a terminal, renewed each second."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.proxy.diagnose.admin_client import DEFAULT_ADMIN, AdminUrl, Unreachable, ask, ask_json
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.command_line.options import AsJson, a_time
from forebay.traces.ground.command_line.quantities import long_time, short_time

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from forebay.proxy.diagnose.frame import BucketLine, Frame, NameLine, TimedScene

EXAMPLE = """Show a running proxy in the terminal, renewed each second; q ends it.

Rates are those of the last minute, or --since, in steps of half a minute at first. All else
is of the last minute: times to first token (TTFT) of the requests that were answered, clients
that left before it, models and tenants. Without a terminal, one frame is printed, as with
--once.

Example:

  forebay top --admin http://127.0.0.1:9090
"""
RENEW_S = 1.0
MOST_WAITS = 6
MOST_NAMES = 5  # models, and tenants. The JSON has more.

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def top(
    admin: AdminUrl = DEFAULT_ADMIN,
    since: Annotated[
        float, a_time("how far back rates look: at most 1h, or the start of the proxy", "--since")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="print one frame")] = False,
    as_json: AsJson = False,
) -> None:
    from forebay.proxy.diagnose.frame import frame_of

    first = read(admin)
    before = read_before(admin, first, since)
    if as_json:
        sys.stdout.write(json.dumps(asdict(frame_of(first, before)), indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    if once or not console.is_terminal:
        if not once:
            talk("no terminal: one frame")
        console.print(rendered(frame_of(first, before), admin))
        return
    watch(before, first, admin, console, since)


def read(admin: str) -> "TimedScene":
    """Read /status, /metrics and /history. Raises InputError."""
    from forebay.proxy.diagnose.frame import TimedScene
    from forebay.proxy.diagnose.scene import Scene, samples_of

    status = ask_json(admin, "/status", "ready")
    minute = ask_json(admin, "/history", "minute")["minute"]
    samples = samples_of(ask(admin, "/metrics").decode())
    return TimedScene(time.monotonic(), Scene(status, [], samples), minute)


def read_before(admin: str, now: "TimedScene", since_s: float) -> "TimedScene | None":
    """Read the metrics of `since_s` ago, or None if the proxy is younger. Raises InputError."""
    from forebay.proxy.diagnose.frame import earlier
    from forebay.proxy.diagnose.scene import samples_of

    return earlier(now, samples_of(ask(admin, f"/metrics?ago={since_s:.0f}").decode()))


def watch(
    before: "TimedScene | None",
    first: "TimedScene",
    admin: str,
    console: "Console",
    since_s: float,
) -> None:
    """Renew the frame each second until q or Ctrl-C."""
    from rich.live import Live

    from forebay.proxy.diagnose.frame import frame_of

    readings = deque([before or first, first])
    shown = rendered(frame_of(first, before), admin)
    with keys() as wait_key, Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while wait_key(RENEW_S) != "q":
            try:
                readings.append(read(admin))
            except Unreachable as error:
                live.update(f"{error}\nTrying again each second; q ends this.", refresh=True)
                readings.clear()
                continue
            # Drop readings beyond the window, but keep the last reading before it.
            while len(readings) > 2 and readings[-1].at_s - readings[1].at_s >= since_s:
                readings.popleft()
            before = readings[0] if len(readings) > 1 else None
            live.update(rendered(frame_of(readings[-1], before), admin), refresh=True)


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key for a number of seconds, and returns it or ""."""
    try:
        import select
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, termios.error):  # Windows, or no terminal to read

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return

    def wait_key(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield wait_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def rendered(frame: "Frame", admin: str) -> "Group":
    """Return the frame for a terminal of 80 columns."""
    from rich.console import Group
    from rich.text import Text

    # The first line: what concerns the whole proxy.
    state = "draining" if frame.draining else "ready" if frame.ready else "no backend is up"
    head = f"forebay {frame.version} at {admin}: {state}, {frame.active} active"
    head += f", up {long_time(frame.uptime_s)}"
    if frame.observing:
        head += ", observes only"
    if frame.workers:
        head += f", {frame.workers} workers"
    if frame.shedding:
        head += f"; rejects {frame.shedding} of 3 service classes"
    # The tables, and the waiting requests.
    good = frame.ready and not frame.draining and not frame.shedding
    parts: list[RenderableType] = [Text(head, style="bold" if good else "bold red"), ""]
    parts += [_backends(frame), "", _buckets(frame)]
    for kind, named in (("model", frame.models), ("tenant", frame.tenants)):
        if named:
            parts += ["", _named(kind, named)]
    if frame.waits:
        lines = [
            f"{count} {bucket} for {backend}: {reason.replace('_', ' ')}"
            for count, bucket, backend, reason in frame.waits[:MOST_WAITS]
        ]
        parts += ["", Text("Waiting: " + "; ".join(lines))]
    return Group(*parts)


def _backends(frame: "Frame") -> "RenderableType":
    table = _table(
        "backend", "state", "running", "prefills", "backlog", "waiting", "KV", "10k tokens", "req/s"
    )
    for line in frame.backends:
        table.add_row(
            line.name,
            line.state.replace("_", "-"),
            f"{line.running}/{line.slots}",
            str(line.prefills),
            f"{line.backlog_s:.2f} s",
            str(line.waiting),
            "-" if line.kv_share is None else f"{line.kv_share:.0%}",
            f"{line.prefill_10k_s:.2f} s",
            f"{line.requests_per_s:.2f}",
            style=None if line.state == "up" else "red",
        )
    return table


def _buckets(frame: "Frame") -> "RenderableType":
    table = _table("bucket", "waiting", "req/s", "rejected/s", "left", "TTFT p50", "TTFT p99")
    table.title = (
        f"Rates over {long_time(frame.over_s)}; TTFT of the last minute{_answered(frame.buckets)}"
    )
    for line in frame.buckets:
        table.add_row(
            line.name,
            str(line.waiting),
            f"{line.requests_per_s:.2f}",
            f"{line.rejected_per_s:.2f}",
            str(line.left),
            short_time(line.ttft_p50_s),
            short_time(line.ttft_p99_s),
            style="yellow" if line.rejected_per_s or line.left else None,
        )
    return table


def _named(kind: str, lines: "Sequence[NameLine]") -> "RenderableType":
    table = _table(
        kind, "req/s", "share", "tokens/s", "TTFT p50", "TTFT p95", "rejected/s", "left", "failed"
    )
    table.title = f"{kind.capitalize()}s, last minute{_answered(lines)}"
    for line in lines[:MOST_NAMES]:
        table.add_row(
            line.name,
            f"{line.requests_per_s:.2f}",
            f"{line.share:.0%}",
            f"{line.prompt_tokens_per_s:,.0f}",
            short_time(line.ttft_p50_s),
            short_time(line.ttft_p95_s),
            f"{line.rejected_per_s:.2f}",
            str(line.left),
            str(line.failed),
            style="yellow" if line.rejected_per_s or line.left or line.failed else None,
        )
    return table


def _answered(lines: "Sequence[BucketLine | NameLine]") -> str:
    """Say that clients left, so that only other requests have a time to first token."""
    return "; TTFT: answered requests only" if any(line.left for line in lines) else ""


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(
        box=None, padding=(0, 1, 0, 0), title_justify="left", title_style="dim", header_style="dim"
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    return table
