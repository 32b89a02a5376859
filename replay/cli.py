"""`forebay replay`: parse the options, run the replay on a fast event loop, print the summary."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import strftime
from typing import Annotated

import typer

from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import say
from forebay.replay.plan.schedule import KINDS, parse_arrivals
from forebay.replay.plan.slo import parse_slos
from forebay.replay.plan.target import read_keys
from forebay.replay.results.server_metrics import metrics_urls
from forebay.replay.results.verdict import FAILED
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import run_on_fast_loop
from forebay.traces.ground.buckets import parse_buckets
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import (
    BUCKETS,
    AsJson,
    Buckets,
    SloText,
    TraceArgument,
    takes_options,
)
from forebay.traces.ground.errors import InputError

EXAMPLE = """Replay a trace at a set arrival rate and measure every answer.

Latency counts from the moment a request was due, so a server that stops answering cannot hide it.

Example:

  forebay replay trace.jsonl --target http://127.0.0.1:8080 --rate 8 --duration 3m --out runs/a
"""

app = new_app(help=EXAMPLE)

HEADINGS = {
    "Target": "target model endpoint api-key keys",
    "Traffic": "rate arrivals speed duration think turns seed warmup time-scale max-in-flight "
    "processes ray",
    "Trace": "format skip-bad too-long max-model-len salt history lengths",
    "Measurement": "buckets slo first-token-timeout stall-timeout drain-timeout",
    "Output": "out keep-answers metrics force json quiet",
}


@app.command(help=EXAMPLE, headings=HEADINGS)
@takes_options
def replay_command(
    trace: TraceArgument,
    new_options: Callable[..., ReplayOptions],
    target: Annotated[
        list[str] | None, typer.Option(help="base URL; several get requests round robin")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the run; default: runs/TIME")] = None,
    arrivals: Annotated[str, typer.Option(help=KINDS)] = "trace",
    buckets: Buckets = BUCKETS,
    slo: SloText = None,
    keys: Annotated[
        Path | None, typer.Option(help="YAML file with an API key for each tenant of the trace")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="URL of a /metrics page to sample each second; may be repeated"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    if not target:
        raise InputError("Missing option '--target': give the URL of a server")
    # Targets may name the buckets, so buckets are parsed first.
    lengths = parse_buckets(buckets)
    options = new_options(
        trace=trace,
        targets=tuple(target),
        out=out or Path("runs", strftime("%Y-%m-%d-%H%M%S")),
        arrivals=parse_arrivals(arrivals),
        buckets=lengths,
        slos=None if slo is None else parse_slos(slo, [bucket.name for bucket in lengths]),
        keys={} if keys is None else read_keys(keys),
        metrics=metrics_urls(metrics or ()),
    )
    # Send the requests, and print the results. The exit status tells how the run ended.
    summary = run_on_fast_loop(partial(replay, options))
    show(summary, as_json=as_json)
    for warning in summary.values["warnings"]:
        say(warning)
    if summary.interrupted:
        say(f"interrupted; what was measured is in {summary.folder}")
        raise typer.Exit(130)
    if summary.values["verdict"] == FAILED:
        say(f"the run measured nothing: {summary.values['verdict_reason']}")
        raise typer.Exit(1)


def show(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        print_json(summary.values)
        return
    from rich.console import Console

    from forebay.replay.results.printed_table import summary_table

    console = Console()
    console.print(summary_table(summary.values))
    console.print(f"run kept in {summary.folder}", highlight=False)
