"""`forebay replay`: parse the options, run the replay on a fast event loop, print the summary."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from forebay.proxy.command import new_app
from forebay.replay.plan.keys import read_keys
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import parse_arrivals
from forebay.replay.plan.slo import parse_slos
from forebay.replay.results.verdict import FAILED
from forebay.replay.runner import Summary, replay
from forebay.replay.send.fast_loop import run_on_fast_loop
from forebay.traces.buckets import parse_buckets
from forebay.traces.command_line.messages import print_json
from forebay.traces.command_line.options import (
    BUCKETS,
    ApiKey,
    AsJson,
    AskedModel,
    Buckets,
    Endpoint,
    Force,
    PacedTrafficOptions,
    TimeScale,
    Turns,
    a_time,
    same_named,
    takes_options,
)
from forebay.traces.errors import InputError

EXAMPLE = """Replay a trace at a set arrival rate and measure every answer.

Latency counts from the moment a request was due, so a server that stops answering cannot hide it.

Example:

  forebay replay trace.jsonl --target http://127.0.0.1:8080 --rate 8 --duration 3m --out runs/a
"""

app = new_app(help=EXAMPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArguments(PacedTrafficOptions):
    """The options of `forebay replay` as they are typed."""

    target: Annotated[
        list[str] | None,
        typer.Option(help="base URL; several get requests round robin"),
    ] = None
    out: Annotated[Path | None, typer.Option(help="folder for the run")] = None
    rate: Annotated[
        float | None,
        typer.Option(help="mean requests a second; changes the gaps, drops no request"),
    ] = None
    arrivals: Annotated[
        str,
        typer.Option(
            help="trace, constant, poisson, gamma:CV, closed:N, onoff:10s/50s, ramp:1-10/5m, "
            "steps:1,2,4/60s or diurnal:1.8/24h"
        ),
    ] = "trace"
    model: AskedModel = None
    endpoint: Endpoint = "completions"
    think_s: Annotated[float, a_time("pause between requests of a closed loop", "--think")] = 0.0
    turns: Turns = "wait"
    history: Annotated[
        str, typer.Option(help="history of later turns: trace, or answers (the server's)")
    ] = "trace"
    lengths: Annotated[
        str, typer.Option(help="length of answers: exact (the trace's), or free (the model's)")
    ] = "exact"
    keys: Annotated[
        Path | None, typer.Option(help="YAML file with an API key for each tenant of the trace")
    ] = None
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="keep the text of answers in answers.jsonl")
    ] = False
    time_scale: TimeScale = 1.0
    max_in_flight: Annotated[
        int, typer.Option(help="most requests in flight; waits for this limit are measured")
    ] = 10_000
    processes: Annotated[
        int, typer.Option(help="processes that send, each a part of the sessions")
    ] = 1
    buckets: Buckets = BUCKETS
    salt: Annotated[
        str,
        typer.Option(
            help="a new salt makes prompts that no cache has seen; an old salt meets the caches "
            "of its last run"
        ),
    ] = ""
    max_model_len: Annotated[
        int | None, typer.Option(help="context limit in tokens, if lower than the target's own")
    ] = None
    warmup: Annotated[int, typer.Option(help="small unmeasured requests beforehand")] = 0
    first_token_timeout_s: Annotated[
        float, a_time("longest time from sending to the first token", "--first-token-timeout")
    ] = 600.0
    stall_timeout_s: Annotated[float, a_time("longest time without output", "--stall-timeout")] = (
        120.0
    )
    drain_timeout_s: Annotated[
        float, a_time("longest wait after the last arrival", "--drain-timeout")
    ] = 900.0
    api_key: ApiKey = None
    force: Force = False
    as_json: AsJson = False
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress line")] = False

    def options(self) -> ReplayOptions:
        """Parse the options that have a syntax (InputError: a wrong value)."""
        if not self.target:
            raise InputError("Missing option '--target': give the URL of a server")
        if not self.out:
            raise InputError("Missing option '--out': name a folder for the run")
        # Targets may name the buckets, so buckets are parsed first.
        buckets = parse_buckets(self.buckets)
        names = [bucket.name for bucket in buckets]
        values = {
            "targets": tuple(self.target),
            "out": self.out,
            "rate_per_s": self.rate,
            "arrivals": parse_arrivals(self.arrivals),
            "duration_s": self.duration,
            "buckets": buckets,
            "slos": None if self.slo is None else parse_slos(self.slo, names),
            "keys": {} if self.keys is None else read_keys(self.keys),
        }
        return ReplayOptions(**same_named(self, ReplayOptions) | values)


HEADINGS = {
    "Target": "target model endpoint api-key keys",
    "Traffic": "rate arrivals speed duration think turns seed warmup time-scale max-in-flight "
    "processes",
    "Trace": "format skip-bad too-long max-model-len salt history lengths",
    "Measurement": "buckets slo first-token-timeout stall-timeout drain-timeout",
    "Output": "out keep-answers force json quiet",
}


@app.command(help=EXAMPLE, headings=HEADINGS)
@takes_options
def replay_command(arguments: ReplayArguments) -> None:
    options = arguments.options()
    summary = run_on_fast_loop(partial(replay, options))
    show(summary, as_json=arguments.as_json)
    for warning in summary.values["warnings"]:
        print(f"forebay replay: {warning}", file=sys.stderr)
    if summary.interrupted:
        print(
            f"forebay replay: interrupted; what was measured is in {summary.folder}",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if summary.values["verdict"] == FAILED:
        print(
            f"forebay replay: the run measured nothing: {summary.values['verdict_reason']}",
            file=sys.stderr,
        )
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
