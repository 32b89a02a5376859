"""`forebay drain`: give a backend no new work and wait until it is empty, or take it back."""

import json
import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from forebay.proxy.diagnose.admin_client import DEFAULT_ADMIN, AdminUrl, ask_json
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.command_line.options import AsJson
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

EXAMPLE = """Give a backend of a running proxy no new work, and wait until it is empty.

Running requests finish, and waiting requests go to other backends. With --now other
backends go on with running streams, as far as they can. Then the server can be stopped or
restarted. It gets work again after --undo, or when the proxy restarts.
Exit status 0: empty; 1: requests still run there after --timeout.

Example:

  forebay drain gpu0
  forebay drain gpu0 --undo
"""
LOOK_S = 0.2

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def drain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the backend")],
    undo: Annotated[bool, typer.Option("--undo", help="give it work again")] = False,
    now: Annotated[bool, typer.Option("--now", help="move running streams to others")] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="longest wait until it is empty; 0s: none")
    ] = "10m",
    admin: AdminUrl = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    try:
        patience_s = float(seconds(timeout))
    except ValueError as error:
        raise InputError(f"--timeout {timeout}: {error}") from None
    state = "ready" if undo else "drain?now" if now else "drain"
    target = f"/backends/{quote(name, safe='')}/{state}"
    answer = ask_json(admin, target, "backend", b"{}")
    if not undo:
        answer = _wait_empty(admin, target, answer, patience_s)
    left = 0 if undo else answer["in_flight"]
    if as_json:
        sys.stdout.write(json.dumps(answer) + "\n")
    elif undo:
        talk(f"{name} takes work again")
    elif left:
        talk(f"{name} gets no new work; {left} of its requests still run")
    else:
        talk(f"{name} is drained: nothing runs there")
    if left:
        raise typer.Exit(1)


def _wait_empty(
    admin: str, target: str, answer: dict[str, Any], patience_s: float
) -> dict[str, Any]:
    """Return the state of the backend once nothing runs there, or when the patience is over."""
    until = time.monotonic() + patience_s
    while answer["in_flight"] and time.monotonic() < until:
        time.sleep(LOOK_S)
        # A repeated drain reports the requests that still run, and moves streams begun since.
        answer = ask_json(admin, target, "backend", b"{}")
    return answer
