"""`forebay explain`: why a proxy routed, delayed or rejected requests, or would do so now."""

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from forebay.proxy.diagnose.admin_client import DEFAULT_ADMIN, AdminUrl, Refused, ask_json
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.command_line.options import AsJson, a_time
from forebay.traces.ground.command_line.quantities import long_time, short_time
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = """Explain why requests were routed to their backend, waited or were rejected.

REQUEST_ID is the x-request-id of a response. Without it, --slowest or --rejected lists
requests. The proxy remembers the last 2,000 (metrics.receipts). --dry-run asks what the
proxy would decide now about a request body, and sends nothing.

Example:

  forebay explain 0b54c2d1 --admin http://127.0.0.1:9090
  forebay explain --slowest 10 --bucket chat --since 10m
"""
MOST_SLOWEST = 100
MOST_TENANTS = 3
STILL_S = 30.0  # between two looks of the proxy: a finding of the last look stands
EVENTS = {
    "queued": "queued for {backend}: {why}",
    "sent": "sent to {backend}",
    "failed": "{backend} failed",
    "first_token": "first token from {backend}",
    "continued": "continued on {backend} after {why} tokens",
    "ended": "ended",
    "left": "the client left",
    "refused": "rejected: {why}",
}

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="the x-request-id of the response")
    ] = None,
    slowest: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SLOWEST, help="list this many requests, the slowest first token first"
        ),
    ] = None,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="list rejected requests, the latest first")
    ] = False,
    dry_run: Annotated[
        Path | None,
        typer.Option(metavar="BODY.json", help="decide about this request body, and send nothing"),
    ] = None,
    bucket: Annotated[str, typer.Option(help="list only this length bucket")] = "",
    since: Annotated[
        float | None, a_time("list only requests that ended within this time, e.g. 10m")
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="the tenant that would send the request of --dry-run")
    ] = "",
    admin: AdminUrl = DEFAULT_ADMIN,
    as_json: AsJson = False,
) -> None:
    listing = slowest is not None or rejected
    choices = (request_id is not None, slowest is not None, rejected, dry_run is not None)
    if sum(choices) != 1:
        raise InputError("give one of REQUEST_ID, --slowest N, --rejected, --dry-run BODY.json")
    if not listing and (bucket or since is not None):
        raise InputError("--bucket and --since need --slowest N or --rejected")
    if tenant and dry_run is None:
        raise InputError("--tenant needs --dry-run BODY.json")
    if listing:
        answer = ask_list(admin, slowest, bucket, since)
        if as_json:
            _print_json(answer)
        else:
            show_list(answer)
    elif dry_run is not None:
        show(preview(admin, dry_run, tenant), as_json=as_json)
    else:
        show(ask(admin, request_id or ""), as_json=as_json)


def ask(admin: str, request_id: str) -> dict[str, Any]:
    """Ask the proxy at `admin` about a request. Raises InputError."""
    return ask_json(admin, f"/status?request={quote(request_id, safe='')}", "verdict")


def ask_list(
    admin: str, slowest: int | None, bucket: str = "", since_s: float | None = None
) -> dict[str, Any]:
    """Ask for the slowest requests, or with None for rejected requests. Raises InputError."""
    query: dict[str, Any] = {"by": "slowest", "count": slowest}
    if slowest is None:
        query = {"by": "rejected", "count": MOST_SLOWEST}
    if bucket:
        query["bucket"] = bucket
    if since_s is not None:
        query["since_s"] = since_s
    return ask_json(admin, f"/requests?{urlencode(query)}", "requests")


def preview(admin: str, file: Path, tenant: str = "") -> dict[str, Any]:
    """Ask for the decision about the body in a file, if it came now. Raises InputError."""
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InputError(f"--dry-run {file}: {error.strerror}") from None
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    try:
        return ask_json(admin, f"/preview{query}", "accepted", body)
    except Refused as error:
        raise InputError(f"--dry-run {file}: {error}") from None


def show_list(answer: dict[str, Any]) -> None:
    """Print the JSON of `/requests` as a table, of 80 columns unless names are too long.

    The findings of `forebay doctor` in the same time follow, as one cause explains many requests.
    """
    # A row for each request, and a line with its reason.
    rejected = answer["by"] == "rejected"
    rows = answer["requests"]
    tenants = any(row["tenant"] for row in rows)
    heads = ["request", "ago", "bucket"] + ["tenant"] * tenants + ["predicted"]
    if not rejected:
        heads[-1:] = ["backend", "first token", "predicted"]
    cells = [_cells(row, rejected=rejected, tenants=tenants) for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if rows:
        print(_line(heads, widths))
    for row, line in zip(rows, cells, strict=True):
        print(_line(line, widths))
        print(textwrap.fill(_reason(row), 78, initial_indent="    ", subsequent_indent="    "))
    _show_findings(answer.get("findings", ()))
    # A note: which requests these are, and how many are not shown.
    plural = "" if len(rows) == 1 else "s"
    kind = f"rejected request{plural}"
    if not rejected:
        kind = f"request{plural} with a first token, a failure or a client that left"
    note = (
        f"{len(rows)} {kind}, of {answer['considered']:,} that ended and are remembered "
        f"(metrics.receipts: {answer['kept']:,})."
    )
    if not rejected and answer["unseen"]:
        note += f" {answer['unseen']:,} were no streams: their first token is not visible."
    if rejected and answer["by_tenant"]:
        note += f" Rejected by tenant: {_counts(answer['by_tenant'])}."
    talk(textwrap.fill(note, 80))


def _show_findings(findings: Iterable[dict[str, Any]]) -> None:
    for finding in findings:
        was = "" if finding["age_s"] <= STILL_S else f"until {long_time(finding['age_s'])} ago: "
        text = f"{was}{finding['text']}. Remedy: {finding['remedy']}."
        head = f"{finding['severity'].upper():<8} "
        print(textwrap.fill(text, 80, initial_indent=head, subsequent_indent=" " * 9))


def _counts(by_tenant: dict[str, int]) -> str:
    total = sum(by_tenant.values())
    shown = list(by_tenant.items())[:MOST_TENANTS]
    text = ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in shown)
    return text + (" and others" if len(by_tenant) > len(shown) else "")


def _cells(row: dict[str, Any], *, rejected: bool, tenants: bool) -> list[str]:
    cells = [row["request"].rpartition("/")[0] or row["request"], long_time(row["age_s"])]
    cells.append(row["bucket"] or "-")
    if tenants:
        cells.append(row["tenant"] or "-")
    if not rejected:
        cells += [row["backend"] or "-", short_time(row["latency_s"])]
    return [*cells, short_time(row["predicted_ttft_s"])]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = f"{cells[0]:<{widths[0]}}"
    return "  ".join(
        [first, *(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))]
    )


def _reason(row: dict[str, Any]) -> str:
    if row["hindsight"] == "false":
        return f"{row['reason']} (unnecessary, as checked afterwards)"
    return str(row["reason"])


def show(fields: dict[str, Any], *, as_json: bool) -> None:
    """Print the JSON of `/status?request=` as text."""
    if as_json:
        _print_json(fields)
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(fields["verdict"], style="bold", markup=False)
    console.print(_headline(fields), markup=False)
    if fields["candidates"]:
        console.print(_candidates(fields))
    if "accepted" in fields:  # nothing has happened
        return
    if fields["candidates"] or len(fields["timeline"]) > 1:
        console.print(_timeline(fields))
    if fields["actual"]["tries"]:
        console.print(_results(fields))


def _print_json(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields, indent=2) + "\n")


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
            short_time(option["wait_s"]),
            f"+ {short_time(option['margin_s'])}",
            short_time(option["prefill_s"]),
            short_time(option["ttft_s"]),
            _share(option["matched_tokens"], fields["prompt_tokens"]),
            load,
            style="bold" if option["chosen"] else None,
        )
    return table


def _timeline(fields: dict[str, Any]) -> "Table":
    from forebay.proxy.diagnose.receipt_text import WAITS

    table = _table("What happened", "", "", show_header=False)
    table.columns[0].justify, table.columns[1].justify = "right", "left"
    table.add_row("0 ms", "arrived")
    for step in fields["timeline"]:
        why = WAITS.get(step["why"], step["why"])
        table.add_row(
            short_time(step["at_s"]),
            EVENTS[step["event"]].format(backend=step["backend"], why=why),
        )
    for why, seconds in fields["waited"].items():
        table.add_row("", f"waited {short_time(seconds)}: {WAITS[why]}", style="dim")
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
        table.add_row(name, short_time(predicted[key]), short_time(actual[key]))
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
