"""`forebay explain`: why a proxy sent a request where it did, kept it waiting or refused it."""

import json
import sys
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, build_opener

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = """Why a request went where it went, waited or was refused; and what really happened.

REQUEST_ID is the x-request-id of its answer. The proxy remembers the last 2,000 requests
(metrics.receipts).

Example:

  forebay explain 0b54c2d1 --admin http://127.0.0.1:9090
"""
ANSWER_S = 5.0
MOST_BYTES = 1 << 20
OURS = ("unknown_request", "no_worker")  # errors that only an admin port has
EVENTS = {
    "queued": "queued for {backend}: {why}",
    "sent": "sent to {backend}",
    "computed": "{backend} has computed a piece of the prompt",
    "failed": "{backend} failed",
    "first_token": "first token from {backend}",
    "ended": "ended",
    "left": "its client left",
    "refused": "refused: {why}",
}

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def explain(
    request_id: Annotated[str, typer.Argument(help="the x-request-id of the answer")],
    admin: Annotated[str, typer.Option(help="the proxy's admin port")] = "http://127.0.0.1:9090",
    as_json: Annotated[bool, typer.Option("--json", help="print data")] = False,
) -> None:
    show(ask(admin, request_id), as_json=as_json)


def ask(admin: str, request_id: str) -> dict[str, Any]:
    """What the proxy at `admin` says; raises InputError."""
    if not _is_url(admin):
        raise InputError(f"--admin {admin}: give a URL such as http://127.0.0.1:9090")
    url = f"{admin.rstrip('/')}/status?request={quote(request_id, safe='')}"
    try:
        # The admin port is near: no proxy of the environment stands between.
        with build_opener(ProxyHandler({})).open(url, timeout=ANSWER_S) as answer:
            told = json.loads(answer.read(MOST_BYTES))
    except HTTPError as error:
        with error:
            raise InputError(_said(admin, error.code, error.read(MOST_BYTES))) from None
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(
            f"--admin {admin}: no answer ({reason}); is it the admin port of a running proxy?"
        ) from None
    except ValueError:
        told = None
    if not isinstance(told, dict) or "verdict" not in told:
        raise InputError(f"--admin {admin}: no admin port of a Forebay that can explain")
    return told


def show(told: dict[str, Any], *, as_json: bool) -> None:
    """One request as `/status?request=` tells it."""
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(told["verdict"], style="bold", markup=False)
    console.print(_who(told), markup=False)
    if told["candidates"]:
        console.print(_candidates(told))
    if told["candidates"] or len(told["timeline"]) > 1:
        console.print(_timeline(told))
    if told["actual"]["tries"]:
        console.print(_results(told))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no address in the brackets, or no number as a port
        return False


def _said(admin: str, status: int, body: bytes) -> str:
    other = f"--admin {admin}: answered {status}; is it the admin port of a running proxy?"
    try:
        error = json.loads(body)["error"]
        return str(error["message"]) if error["code"] in OURS else other
    except (ValueError, KeyError, TypeError):
        return other


def _who(told: dict[str, Any]) -> str:
    parts = [told["request"], f"{told['prompt_tokens']:,} prompt tokens"]
    if told["bucket"]:
        parts.append(f"bucket {told['bucket']}")
    parts.append(told["service_class"])
    if told["tenant"]:
        parts.append(f"tenant {told['tenant']}")
    if "worker" in told:
        parts.append(f"worker {told['worker']}")
    text = " · ".join(parts)
    if told["same_id"]:
        text += f"\nOther requests had the same id: {', '.join(told['same_id'])}"
    return text


def _candidates(told: dict[str, Any]) -> "Table":
    table = _table("On arrival", "backend", "wait", "margin", "prefill", "first token", "cached")
    table.add_column("sent lately", justify="right")
    for option in told["candidates"]:
        mean = option["mean_load_tokens"]
        lately = f"{option['load_tokens'] / mean:.2f} x mean" if mean else "nothing"
        table.add_row(
            f"{option['backend']}{' <' if option['chosen'] else ''}",
            _spoken(option["wait_s"]),
            f"+ {_spoken(option['margin_s'])}",
            _spoken(option["prefill_s"]),
            _spoken(option["ttft_s"]),
            _share(option["matched_tokens"], told["prompt_tokens"]),
            lately,
            style="bold" if option["chosen"] else None,
        )
    return table


def _timeline(told: dict[str, Any]) -> "Table":
    from forebay.proxy.telemetry.receipt_text import WAITS

    table = _table("What happened", "", "", show_header=False)
    table.columns[0].justify, table.columns[1].justify = "right", "left"
    table.add_row("0 ms", "arrived")
    for step in told["timeline"]:
        why = WAITS.get(step["why"], step["why"])
        table.add_row(
            _spoken(step["at_s"]),
            EVENTS[step["event"]].format(backend=step["backend"], why=why),
        )
    for why, seconds in told["waited"].items():
        table.add_row("", f"waited {_spoken(seconds)}: {WAITS[why]}", style="dim")
    return table


def _results(told: dict[str, Any]) -> "Table":
    table = _table("Predicted and real", "", "predicted", "real")
    predicted, actual = told["predicted"], told["actual"]
    rows = {
        "wait in the queue": "queue_s",
        "first token": "ttft_s",
        "first token after dispatch": "ttft_after_dispatch_s",
    }
    for name, key in rows.items():
        table.add_row(name, _spoken(predicted[key]), _spoken(actual[key]))
    tokens = told["prompt_tokens"]
    table.add_row(
        "prompt cached",
        _share(predicted["cached_tokens"], tokens),
        _share(actual["cached_tokens"], actual["prompt_tokens"] or tokens),
    )
    return table


def _table(title: str, *columns: str, show_header: bool = True) -> "Table":
    from rich.table import Table

    table = Table(
        title=f"\n{title}", title_justify="left", title_style="dim", header_style="dim",
        box=None, show_header=show_header, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _share(tokens: int | None, of: int) -> str:
    if tokens is None:
        return "not told"
    return f"{tokens:,} ({100 * tokens / max(1, of):.0f} %)"


def _spoken(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{seconds:.2f} s"
