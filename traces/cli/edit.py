"""The verbs of `forebay traces` that change a trace. `-` is a pipe, for input and output."""

import os
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from forebay.traces.cli.import_ import TraceFile
from forebay.traces.cli.output import Totals, check_output, print_result, to_file, write_whole
from forebay.traces.command_line.messages import talk
from forebay.traces.command_line.options import AsJson, Force, MeanRate, Output, Seed, a_time
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.whole_file import meta_path

SALT = "FOREBAY_CAPTURE_SALT"


def _read(trace: str) -> Iterable[TraceRequest]:
    from forebay.traces.formats import open_trace

    return open_trace(trace)


def _write(
    verb: str, trace: object, output: str, force: bool, as_json: bool,
    requests: Iterable[TraceRequest], **parameters: object,
) -> None:  # fmt: skip
    check_output(output, meta_path(output), force=force, as_json=as_json)
    none = f"{verb}: no request is left; ask for more of the trace"
    totals = Totals(requests, if_none=none)
    facts = {"command": verb, "trace": trace, "parameters": parameters}
    result = write_whole(output, totals, lambda: facts)
    line = f"{verb}: {totals.requests:,} requests over {totals.last_s:,.1f} s{to_file(output)}"
    print_result(result, line, as_json)


def slice_trace(
    trace: TraceFile = "-",
    from_s: Annotated[float, a_time("time to begin at", "--from")] = 0.0,
    to_s: Annotated[float | None, a_time("time to end before", "--to")] = None,
    first: Annotated[int | None, typer.Option("--first", help="most requests")] = None,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Keep a span of time, which starts at 0 again.

    example:  forebay traces slice day.jsonl --from 3600 --to 7200 -o hour.jsonl
    """
    from forebay.traces.edit.edit import cut

    if from_s < 0 or (to_s is not None and to_s <= from_s):
        raise InputError(f"--from {from_s:g} --to {to_s}: give 0 or more, and an end after it")
    if first is not None and first < 1:
        raise InputError(f"--first {first}: give 1 or more")
    rows = cut(_read(trace), from_s=from_s, to_s=to_s, first=first)
    _write("slice", trace, output, force, as_json, rows, from_s=from_s, to_s=to_s, first=first)


def scale_trace(
    trace: TraceFile = "-",
    speed: Annotated[
        float | None, typer.Option("--speed", help="factor; 2 is twice the rate")
    ] = None,
    rate: MeanRate = None,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Divide all times, so that the rate changes and every request stays.

    example:  forebay traces scale day.jsonl --rate 20 -o faster.jsonl
    """
    from forebay.traces.edit.edit import scale

    if (speed is None) == (rate is None):
        raise InputError("--speed, --rate: give one of them")
    rows = _read(trace)
    if rate is not None:
        requests = list(rows)
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        if span_s <= 0:
            raise InputError("--rate: all requests arrive at once, so there is no rate to change")
        rows, speed = requests, rate * span_s / len(requests)
    if speed is None or not 0 < speed < float("inf"):
        raise InputError(f"--speed, --rate: {rate or speed} is not more than 0")
    _write("scale", trace, output, force, as_json, scale(rows, speed), speed=speed, rate=rate)


def shift_trace(
    trace: TraceFile = "-",
    by: Annotated[float, typer.Option("--by", help="seconds; less than 0 is earlier")] = 0.0,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Move all arrivals, as before a merge.

    example:  forebay traces shift night.jsonl --by 3600 -o later.jsonl
    """
    from forebay.traces.edit.edit import shift

    _write("shift", trace, output, force, as_json, shift(_read(trace), by), by_s=by)


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
    from forebay.traces.edit.edit import merge

    if len(traces) < 2:
        raise InputError("traces merge: give two traces or more")
    rows = merge([_read(trace) for trace in traces], shared=shared)
    _write("merge", traces, output, force, as_json, rows, shared=shared)


def thin_trace(
    trace: TraceFile = "-",
    keep: Annotated[float, typer.Option("--keep", help="share of the sessions, 0 to 1")] = 0.5,
    seed: Seed = 0,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Keep a share of the sessions, each whole. The rate falls. So does sharing between sessions.

    example:  forebay traces thin day.jsonl --keep 0.1 -o tenth.jsonl
    """
    from forebay.traces.edit.edit import thin

    if not 0 < keep <= 1:
        raise InputError(f"--keep {keep:g}: not a share; give more than 0 and at most 1")
    _write(
        "thin", trace, output, force, as_json, thin(_read(trace), keep, seed), keep=keep, seed=seed
    )


def sample_trace(
    trace: TraceFile = "-",
    sessions: Annotated[int, typer.Option("--sessions", help="sessions to draw")] = 100,
    seed: Seed = 0,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Draw whole sessions at random (keeps the trace in memory).

    example:  forebay traces sample day.jsonl --sessions 50 -o fifty.jsonl
    """
    from forebay.traces.edit.edit import sample

    if sessions < 1:
        raise InputError(f"--sessions {sessions}: give 1 or more")
    rows = sample(list(_read(trace)), sessions, seed)
    _write("sample", trace, output, force, as_json, rows, sessions=sessions, seed=seed)


def cap_trace(
    trace: TraceFile = "-",
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", help="longest prompt")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", help="longest answer")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="longest prompt and answer together")
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="drop longer requests instead")] = False,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Shorten prompts and answers to limits. A prompt keeps its beginning.

    example:  forebay traces cap day.jsonl --context 32768 -o capped.jsonl
    """
    from forebay.traces.edit.edit import cap

    limits = {"input_tokens": input_tokens, "output_tokens": output_tokens, "context": context}
    if all(limit is None for limit in limits.values()):
        raise InputError("traces cap: give --input-tokens, --output-tokens or --context")
    if any(limit is not None and limit < 2 for limit in limits.values()):
        raise InputError("traces cap: a limit is 2 tokens or more")
    rows = cap(_read(trace), **limits, drop=drop)
    _write("cap", trace, output, force, as_json, rows, **limits, drop=drop)


def spread_trace(
    trace: TraceFile = "-",
    tick: Annotated[float, a_time("time between ticks", "--tick")] = 3.0,
    seed: Seed = 0,
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Spread arrivals that stand on ticks at random over the time to the next tick.

    example:  forebay traces spread conversation.jsonl --tick 3 -o spread.jsonl
    """
    from forebay.traces.synth.ticks import TICK_ERROR_S, spread_ticks

    if not tick > TICK_ERROR_S:
        raise InputError(f"--tick {tick:g}: give more than {TICK_ERROR_S:g} seconds")
    rows = spread_ticks(_read(trace), seed=seed, tick_s=tick, name=trace, option="--tick")
    _write("spread", trace, output, force, as_json, rows, tick_s=tick, seed=seed)


def anonymise_trace(
    trace: TraceFile = "-",
    output: Output = "-",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Replace text and names by keyed hashes. Equal beginnings of prompts stay equal.

    The key is FOREBAY_CAPTURE_SALT from the environment, else a random key that is not kept.

    example:  forebay traces anonymise production.jsonl -o to_share.jsonl
    """
    from forebay.traces.edit.edit import anonymise

    salt = os.environ.get(SALT) or None
    if salt is not None and len(salt) < 16:
        raise InputError(f"{SALT}: give 16 characters or more, e.g. of openssl rand -hex 16")
    _write("anonymise", trace, output, force, as_json, anonymise(_read(trace), salt))
    if salt is None:
        talk(f"a random key: no other file has the same names (set {SALT} for that)")


VERBS: dict[str, Callable[..., None]] = {
    "slice": slice_trace,
    "scale": scale_trace,
    "shift": shift_trace,
    "merge": merge_traces,
    "thin": thin_trace,
    "sample": sample_trace,
    "cap": cap_trace,
    "spread": spread_trace,
    "anonymise": anonymise_trace,
}
