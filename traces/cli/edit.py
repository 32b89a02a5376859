"""The commands of `forebay traces` that change traces. `-` is a pipe, for input and output."""

import os
from collections.abc import Callable, Iterable
from math import inf
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from forebay.traces.cli.import_ import TraceFile
from forebay.traces.cli.output import Totals, check_output, print_result, to_file, write_whole
from forebay.traces.edit.edit import anonymise, cap, cut, merge, sample, scale, shift, thin
from forebay.traces.formats import open_trace
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.command_line.options import AsJson, Force, Output, Seed
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import meta_path
from forebay.traces.synth.ticks import TICK_ERROR_S, spread_ticks

SALT = "FOREBAY_CAPTURE_SALT"
STEPS = "forebay.steps"  # key in Typer's context: names of the given steps, in their order
LIMITS = ("input_tokens", "output_tokens", "context")
Rows = Iterable[TraceRequest]

EDIT = """Change a trace. Each option is a step, and steps are done in the order given.

No request waits for a request that a step has left out. --rate and --sample keep the trace
in memory.

Example:

  forebay traces edit day.jsonl --slice 1h..2h --thin 0.25 --rate 10 -o hour.jsonl
"""


def _note(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """Remember that a step was given. Options are called back in the order of the command line."""
    if value is not None and value is not False:
        assert isinstance(option, TyperOption)
        context.meta.setdefault(STEPS, []).append(option.name)
    return value


def _step(help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(callback=_note, metavar=metavar, help=help_text)


def edit_trace(
    context: typer.Context,
    trace: TraceFile = "-",
    slice: Annotated[
        str | None, _step("keep a span of time, which starts at 0 again", "<from..to>")
    ] = None,
    first: Annotated[int | None, _step("keep the first requests")] = None,
    speed: Annotated[float | None, _step("divide all times; 2 is twice the rate")] = None,
    rate: Annotated[float | None, _step("divide all times, to this mean rate a second")] = None,
    shift: Annotated[
        float | None, _step("move all arrivals by seconds; less than 0 is earlier")
    ] = None,
    thin: Annotated[float | None, _step("keep this share of the sessions, each whole")] = None,
    sample: Annotated[int | None, _step("draw this many whole sessions at random")] = None,
    cap: Annotated[
        str | None,
        _step(
            "shorten to limits, e.g. input_tokens=8192,output_tokens=512,context=32768; prompts "
            "keep their beginning",
            "<limits>",
        ),
    ] = None,
    drop: Annotated[str | None, _step("leave requests beyond such limits out", "<limits>")] = None,
    spread: Annotated[
        str | None, _step("spread arrivals on ticks over the time to the next tick", "<time>")
    ] = None,
    anonymise: Annotated[
        bool,
        typer.Option(
            "--anonymise",
            callback=_note,
            help=f"replace text and names by hashes with the key in {SALT}, else a random key",
        ),
    ] = False,
    seed: Seed = 0,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    values = locals()
    steps = [(name, values[name]) for name in context.meta.get(STEPS, ())]
    if not steps:
        raise InputError("traces edit: give a step, such as --slice, --rate or --anonymise")
    rows: Rows = open_trace(trace)
    for name, value in steps:
        rows = CHANGES[name](rows, value, seed)
    _write("edit", trace, output, force, as_json, rows, steps=steps, seed=seed)
    if anonymise and not os.environ.get(SALT):
        talk(f"a random key: no other file has the same names (set {SALT} for that)")


def _positive(name: str, value: Any) -> Any:
    if not 0 < value < inf:
        raise InputError(f"--{name} {value:g}: give more than 0")
    return value


def _slice(rows: Rows, text: str) -> Rows:
    """Keep a span such as `1h..2h`. Either end may be missing."""
    begin, dots, end = text.partition("..")
    try:
        from_s, to_s = seconds(begin or "0"), seconds(end) if end else None
    except ValueError:
        dots = ""
    if not dots or from_s < 0 or (to_s is not None and to_s <= from_s):
        raise InputError(f"--slice {text}: give FROM..TO, such as 1h..2h, 90.. or ..10m")
    return cut(rows, from_s=from_s, to_s=to_s)


def _cap(rows: Rows, name: str, text: str) -> Rows:
    """Shorten to limits such as `input_tokens=8192,context=32768`, or drop longer requests."""
    limits: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in LIMITS or not value.isdecimal() or int(value) < 2:
            raise InputError(
                f"--{name} {text}: give NAME=TOKENS, with 2 tokens or more; names: "
                f"{', '.join(LIMITS)}"
            )
        limits[key] = int(value)
    return cap(rows, **limits, drop=name == "drop")


def _at_rate(requests: list[TraceRequest], rate_per_s: float) -> Rows:
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0:
        raise InputError("--rate: all requests arrive at once, so there is no rate to change")
    return scale(requests, rate_per_s * span_s / len(requests))


def _thin(rows: Rows, share: float, seed: int) -> Rows:
    if not 0 < share <= 1:
        raise InputError(f"--thin {share:g}: not a share; give more than 0 and at most 1")
    return thin(rows, share, seed)


def _spread(rows: Rows, text: str, seed: int) -> Rows:
    try:
        tick_s = seconds(text)
    except ValueError:
        tick_s = 0.0
    if not tick_s > TICK_ERROR_S:
        raise InputError(f"--spread {text}: give a time of more than {TICK_ERROR_S:g} seconds")
    return spread_ticks(rows, seed=seed, tick_s=tick_s)


def _anonymise(rows: Rows) -> Rows:
    salt = os.environ.get(SALT) or None
    if salt is not None and len(salt) < 16:
        raise InputError(f"{SALT}: give 16 characters or more, e.g. of openssl rand -hex 16")
    return anonymise(rows, salt)


CHANGES: dict[str, Callable[[Rows, Any, int], Rows]] = {
    "slice": lambda rows, span, _: _slice(rows, span),
    "first": lambda rows, count, _: cut(rows, first=_positive("first", count)),
    "speed": lambda rows, speed, _: scale(rows, _positive("speed", speed)),
    "rate": lambda rows, rate, _: _at_rate(list(rows), _positive("rate", rate)),
    "shift": lambda rows, by_s, _: shift(rows, by_s),
    "thin": _thin,
    "sample": lambda rows, count, seed: sample(list(rows), _positive("sample", count), seed),
    "cap": lambda rows, limits, _: _cap(rows, "cap", limits),
    "drop": lambda rows, limits, _: _cap(rows, "drop", limits),
    "spread": _spread,
    "anonymise": lambda rows, _, seed: _anonymise(rows),
}
"""The change of each step, by its option. Values are checked before any request is read."""


def merge_traces(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="two traces or more")],
    shared: Annotated[
        bool, typer.Option("--shared", help="equal block ids of the traces are equal text")
    ] = False,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Merge traces by time. Each keeps names and blocks of its own.

    example:  forebay traces merge chat.jsonl documents.jsonl -o both.jsonl
    """
    if len(traces) < 2:
        raise InputError("traces merge: give two traces or more")
    rows = merge([open_trace(trace) for trace in traces], shared=shared)
    _write("merge", traces, output, force, as_json, rows, shared=shared)


def _write(
    verb: str, trace: object, output: str, force: bool, as_json: bool, rows: Rows, **facts: object
) -> None:
    check_output(output, meta_path(output), force=force, as_json=as_json)
    totals = Totals(rows, if_none=f"{verb}: no request is left; ask for more of the trace")
    whole = {"command": verb, "trace": trace, "parameters": facts}
    result = write_whole(output, totals, lambda: whole)
    line = f"{verb}: {totals.requests:,} requests over {totals.last_s:,.1f} s{to_file(output)}"
    print_result(result, line, as_json)
