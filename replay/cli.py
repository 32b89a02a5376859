"""`forebay replay`: parse the options, run the replay on a fast loop, show what came of it."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from forebay.proxy.command import new_app
from forebay.replay.fast_loop import run_on_fast_loop
from forebay.replay.options import ReplayOptions
from forebay.replay.runner import Summary, replay
from forebay.replay.schedule import parse_arrivals
from forebay.replay.slo import parse_slos
from forebay.traces.buckets import parse_buckets

EXAMPLE = """Replay a trace at a set arrival rate and measure every answer.

Latency counts from the moment a request was due, so a server that stops answering cannot hide it.

Example:

  forebay replay trace.jsonl --target http://127.0.0.1:8080 --rate 8 --duration 180 --out runs/a
"""

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def replay_command(
    trace: Annotated[Path, typer.Argument(help="trace file, - for standard input")],
    target: Annotated[
        list[str], typer.Option(help="base URL; several are used in turn, by order of arrival")
    ],
    out: Annotated[Path, typer.Option(help="folder for the run")],
    rate: Annotated[
        float | None, typer.Option(help="mean requests a second; divides time, drops nothing")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="trace, constant, poisson, gamma:CV or closed:N")
    ] = "trace",
    speed: Annotated[float | None, typer.Option(help="times as fast as the trace")] = None,
    duration: Annotated[float | None, typer.Option(help="send only the first seconds")] = None,
    model: Annotated[str | None, typer.Option(help="default: the one the target lists")] = None,
    seed: Annotated[int, typer.Option(help="of random arrival gaps")] = 0,
    endpoint: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    time_scale: Annotated[
        float, typer.Option(help="simulated seconds in a wall second, as the engine's")
    ] = 1.0,
    max_in_flight: Annotated[
        int, typer.Option(help="most requests at once; waiting for it is measured")
    ] = 10_000,
    buckets: Annotated[
        str, typer.Option(help="classes by prompt tokens")
    ] = "chat:5000,document:131072",
    slo: Annotated[
        str | None,
        typer.Option(help="targets, e.g. chat.ttft=2s,tpot=100ms [default: chat 2s, document 15s]"),
    ] = None,
    salt: Annotated[
        str,
        typer.Option(
            help="a new one makes prompts no cache has seen; with the same one a second replay "
            "finds the first one's cache"
        ),
    ] = "",
    max_model_len: Annotated[
        int | None, typer.Option(help="context limit, when lower than the target says")
    ] = None,
    too_long: Annotated[
        str, typer.Option(help="rows beyond the model's context: error, truncate or drop")
    ] = "error",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="count bad rows")] = False,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="forebay, mooncake or azure [default: detect]")
    ] = None,
    warmup: Annotated[int, typer.Option(help="small unmeasured requests beforehand")] = 0,
    first_token_timeout: Annotated[float, typer.Option(help="seconds")] = 600.0,
    stall_timeout: Annotated[float, typer.Option(help="seconds without output")] = 120.0,
    drain_timeout: Annotated[float, typer.Option(help="seconds after the last arrival")] = 900.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="FOREBAY_API_KEY", help="sent as a bearer token")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the run in --out")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print summary.json")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress line")] = False,
) -> None:
    classes = parse_buckets(buckets)
    options = ReplayOptions(
        trace=trace,
        targets=tuple(target),
        out=out,
        rate_per_s=rate,
        arrivals=parse_arrivals(arrivals),
        speed=speed,
        duration_s=duration,
        model=model,
        seed=seed,
        endpoint=endpoint,
        time_scale=time_scale,
        max_in_flight=max_in_flight,
        buckets=classes,
        slos=None if slo is None else parse_slos(slo, [bucket.name for bucket in classes]),
        salt=salt,
        max_model_len=max_model_len,
        too_long=too_long,
        skip_bad=skip_bad,
        format_name=trace_format,
        force=force,
        quiet=quiet,
        warmup=warmup,
        api_key=api_key,
        first_token_timeout_s=first_token_timeout,
        stall_timeout_s=stall_timeout,
        drain_timeout_s=drain_timeout,
    )
    summary = run_on_fast_loop(partial(replay, options))
    show(summary, as_json=as_json)
    for warning in summary.values["warnings"]:
        print(f"forebay replay: {warning}", file=sys.stderr)
    if summary.interrupted:
        print(f"forebay replay: interrupted; kept in {summary.folder}", file=sys.stderr)
        raise typer.Exit(130)


def show(summary: Summary, *, as_json: bool) -> None:
    if as_json:
        import orjson

        sys.stdout.write(orjson.dumps(summary.values, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    from rich.console import Console

    from forebay.replay.table import summary_table

    console = Console()
    console.print(summary_table(summary.values))
    console.print(f"run kept in {summary.folder}", highlight=False)
