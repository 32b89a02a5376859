"""`forebay explain`: why a proxy routed, delayed or rejected a request."""

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

EXAMPLE = """Explain why a request was routed to its backend, waited or was rejected.

REQUEST_ID is the x-request-id of the response. The proxy remembers the last 2,000 requests
(metrics.receipts).

Example:

  forebay explain 0b54c2d1 --admin http://127.0.0.1:9090
"""
ANSWER_S = 5.0
MOST_BYTES = 1 << 20
ADMIN_ERRORS = ("unknown_request", "no_worker")  # errors of admin ports only
EVENTS = {
    "queued": "queued for {backend}: {why}",
    "sent": "sent to {backend}",
    "computed": "{backend} has computed a part of the prompt",
    "failed": "{backend} failed",
    "first_token": "first token from {backend}",
    "ended": "ended",
    "left": "the client left",
    "refused": "rejected: {why}",
}

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def explain(
    request_id: Annotated[str, typer.Argument(help="the x-request-id of the response")],
    admin: Annotated[str, typer.Option(help="the proxy's admin port")] = "http://127.0.0.1:9090",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    show(ask(admin, request_id), as_json=as_json)


def ask(admin: str, request_id: str) -> dict[str, Any]:
    """Ask the proxy at `admin` about a request; raises InputError."""
    if not _is_url(admin):
        raise InputError(f"--admin {admin}: give a URL such as http://127.0.0.1:9090")
    url = f"{admin.rstrip('/')}/status?request={quote(request_id, safe='')}"
    try:
        # Without the HTTP proxies of the environment: the admin port is near.
        with build_opener(ProxyHandler({})).open(url, timeout=ANSWER_S) as answer:
            fields = json.loads(answer.read(MOST_BYTES))
    except HTTPError as error:
        with error:
            raise InputError(_error_text(admin, error.code, error.read(MOST_BYTES))) from None
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        raise InputError(
            f"--admin {admin}: no answer ({reason}); is it the admin port of a running proxy?"
        ) from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "verdict" not in fields:
        raise InputError(
            f"--admin {admin}: not the admin port of a Forebay that can explain requests"
        )
    return fields


def show(fields: dict[str, Any], *, as_json: bool) -> None:
    """Print the JSON of `/status?request=` as text."""
    if as_json:
        sys.stdout.write(json.dumps(fields, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(fields["verdict"], style="bold", markup=False)
    console.print(_headline(fields), markup=False)
    if fields["candidates"]:
        console.print(_candidates(fields))
    if fields["candidates"] or len(fields["timeline"]) > 1:
        console.print(_timeline(fields))
    if fields["actual"]["tries"]:
        console.print(_results(fields))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad address in brackets, or a bad port
        return False


def _error_text(admin: str, status: int, body: bytes) -> str:
    other = f"--admin {admin}: answered {status}; is it the admin port of a running proxy?"
    try:
        error = json.loads(body)["error"]
        return str(error["message"]) if error["code"] in ADMIN_ERRORS else other
    except (ValueError, KeyError, TypeError):
        return other


def _headline(fields: dict[str, Any]) -> str:
    parts = [fields["request"], f"{fields['prompt_tokens']:,} prompt tokens"]
    if fields["bucket"]:
        parts.append(f"bucket {fields['bucket']}")
    parts.append(fields["service_class"])
    if fields["tenant"]:
        parts.append(f"tenant {fields['tenant']}")
    if "worker" in fields:
        parts.append(f"worker {fields['worker']}")
    text = " · ".join(parts)
    if fields["same_id"]:
        text += f"\nOther requests with the same id: {', '.join(fields['same_id'])}"
    return text


def _candidates(fields: dict[str, Any]) -> "Table":
    table = _table("On arrival", "backend", "wait", "margin", "prefill", "first token", "cached")
    table.add_column("recent load", justify="right")
    for option in fields["candidates"]:
        mean = option["mean_load_tokens"]
        load = f"{option['load_tokens'] / mean:.2f} x average" if mean else "none"
        table.add_row(
            f"{option['backend']}{' <' if option['chosen'] else ''}",
            _spoken(option["wait_s"]),
            f"+ {_spoken(option['margin_s'])}",
            _spoken(option["prefill_s"]),
            _spoken(option["ttft_s"]),
            _share(option["matched_tokens"], fields["prompt_tokens"]),
            load,
            style="bold" if option["chosen"] else None,
        )
    return table


def _timeline(fields: dict[str, Any]) -> "Table":
    from forebay.proxy.telemetry.receipt_text import WAITS

    table = _table("What happened", "", "", show_header=False)
    table.columns[0].justify, table.columns[1].justify = "right", "left"
    table.add_row("0 ms", "arrived")
    for step in fields["timeline"]:
        why = WAITS.get(step["why"], step["why"])
        table.add_row(
            _spoken(step["at_s"]),
            EVENTS[step["event"]].format(backend=step["backend"], why=why),
        )
    for why, seconds in fields["waited"].items():
        table.add_row("", f"waited {_spoken(seconds)}: {WAITS[why]}", style="dim")
    return table


def _results(fields: dict[str, Any]) -> "Table":
    table = _table("Predicted and actual", "", "predicted", "actual")
    predicted, actual = fields["predicted"], fields["actual"]
    rows = {
        "wait in the queue": "queue_s",
        "first token": "ttft_s",
        "first token after dispatch": "ttft_after_dispatch_s",
    }
    for name, key in rows.items():
        table.add_row(name, _spoken(predicted[key]), _spoken(actual[key]))
    tokens = fields["prompt_tokens"]
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
        return "not reported"
    return f"{tokens:,} ({100 * tokens / max(1, of):.0f} %)"


def _spoken(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{seconds:.2f} s"
