"""`forebay engine calibrate` and `--list-calibrations`: parse, call, print."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.replay.engine.calibration.constants import (
    CONSTANTS,
    Calibration,
    CalibrationFile,
    read_calibration,
    shipped,
)
from forebay.replay.engine.calibration.points import DEFAULT_BATCHED_TOKENS, read_points
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.models import find_gpu, find_model
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.replay.engine.calibration.calibrate import Outcome
    from forebay.replay.engine.calibration.fit import Fit

HELP = """Fit the step-time constants of a model on a GPU to measured points.

POINTS is CSV or JSON lines with kind (ttft, itl, tpot, stall, offline), prompt_tokens, seconds and,
where they differ from the defaults, cached_tokens, batch_size, output_tokens,
max_num_batched_tokens, held_out; or the folder of a `forebay replay` run, of which the requests
that were alone on their server are used. With --trace, all requests of one or several replays of
that trace are used: it is played through the engine in virtual time.

Example:  forebay engine calibrate points.csv --model phi-3-mini --gpu h200-nvl -o cal.json

Example:  forebay engine calibrate runs/a runs/b --trace a.jsonl --model config.json --gpu gpu.json
"""


def calibrate_command(
    points: Annotated[
        list[Path], typer.Argument(metavar="POINTS|RUN...", help="CSV, JSON lines or run.")
    ],
    model: Annotated[str, typer.Option(help="What was measured: a name or a config.json.")],
    gpu: Annotated[
        str,
        typer.Option(
            help="On what: a name, or a JSON file of name, peak_flops, bandwidth (bytes/s), "
            "memory_gib, multiprocessors."
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="The trace that RUN replayed: fit all its requests.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None,
    hold_out: Annotated[
        str, typer.Option(help="Lines to compare only, e.g. 3,5; besides those marked held_out.")
    ] = "",
    cross_validate: Annotated[
        bool, typer.Option(help="Fit once more without each point and predict it.")
    ] = True,
    prior: Annotated[
        Path | None, typer.Option(help="Calibration for what is not fitted.  [default: kernels]")
    ] = None,
    peak_share: Annotated[
        float, typer.Option(help="Reject points that need more than this share of peak.")
    ] = 1.0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of points that name none, and of RUN.")
    ] = DEFAULT_BATCHED_TOKENS,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Of the server that served RUN; with --trace.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="The same; with --trace.")] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(min=1, help="The same; with --trace.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    from forebay.replay.engine.calibration.calibrate import calibrate

    if out is not None and out.exists() and not force:
        raise InputError(f"--out {out}: exists; give another name, or --force to overwrite it")
    if not 0 < peak_share <= 1:
        raise InputError(f"--peak-share {peak_share}: give a share in (0, 1]")
    if trace is not None:
        from forebay.replay.engine.calibration.fit_run_cli import calibrate_runs

        if hold_out:
            raise InputError(f"--hold-out {hold_out}: names lines of POINTS; leave out --trace")
        if peak_share != 1 or not cross_validate:
            raise InputError("--peak-share, --no-cross-validate: for POINTS; leave out --trace")
        config = EngineConfig(
            model,
            gpu,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
        )
        calibrate_runs(points, trace, config, prior, out, as_json=as_json)
        return
    if max_num_seqs or num_gpu_blocks_override or block_size != 16:
        raise InputError(
            "--max-num-seqs, --block-size, --num-gpu-blocks-override: of a server that served "
            "RUN; give --trace as well"
        )
    if len(points) > 1:
        raise InputError(f"{points[1]}: several only with --trace; give one file or run")
    done = calibrate(
        read_points(points[0], max_num_batched_tokens),
        find_model(model),
        find_gpu(gpu),
        prior=read_calibration(prior).constants if prior else None,
        hold_out=_lines(hold_out),
        cross_validate=cross_validate,
        peak_share=peak_share,
        today=datetime.now(UTC).date(),
    )
    if as_json:
        _print_json(_data(done))
    else:
        _print(done)
    for one in done.rejected:
        print(f"rejected {one.reason}", file=sys.stderr)
    for doubt in done.doubts:
        print(f"doubtful {doubt}", file=sys.stderr)
    if out is not None:
        write_calibration(done.file, out)


def _lines(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise InputError(f"--hold-out {text}: give line numbers, e.g. 3,5") from None


def write_calibration(file: CalibrationFile, out: Path) -> None:
    """Write `file` whole or not at all, and say so; raises InputError where it cannot."""
    import orjson

    partial = out.with_name(f".{out.name}.partial")
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    try:
        partial.write_bytes(orjson.dumps(file.as_json(), option=option))
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from error
    print(f"wrote {out}: forebay engine --calibration {out}", file=sys.stderr)


def _data(done: "Outcome") -> dict[str, Any]:
    return {
        **done.file.as_json(),
        "relative_errors": done.fit.relative_errors,
        "at_bound": list(done.fit.at_bound),
        "kept_from_prior": done.fit.unresolved,
        "rejected": [{"line": one.point.line, "reason": one.reason} for one in done.rejected],
        "doubtful": list(done.doubts),
    }


def _print(done: "Outcome") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from forebay.replay.engine.calibration.calibrate import error_text

    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.used}"))
    table = _table(Table, ["line", "point", "measured", "model", "error", "left out", "role"])
    for one, row in zip(done.compared, done.file.points, strict=True):
        missed = one.left_out_error
        table.add_row(
            str(one.point.line),
            Text(str(one.point)),
            f"{one.point.seconds:#.4g} s",
            f"{one.model_s:#.4g} s",
            f"{one.error:+.1%}",
            "" if missed is None else f"{missed:+.1%}",
            "held out" if row["held_out"] else "fit",
        )
    console.print(table)
    console.print(constants_table(done.file.constants, done.prior, done.fit))
    kept = [name for name in CONSTANTS if name not in done.fit.fitted]
    console.print(Text(f"The points do not identify {', '.join(kept)}: the prior's values stand."))
    fitted_errors = [
        one.error for one, row in zip(done.compared, done.file.points, strict=True)
        if not row["held_out"]
    ]  # fmt: skip
    own = f"Fitted points: {error_text(fitted_errors)}"
    if len(fitted_errors) <= len(done.fit.fitted):
        own += " (as many constants as points: no evidence)"
    console.print(Text(own + f". {done.file.checked}."))


def constants_table(constants: Calibration, prior: Calibration, fit: "Fit") -> Any:
    """Every constant beside its prior, its bounds and where it comes from."""
    from rich.table import Table

    table = _table(Table, ["constant", "value", "prior", "unit", "bounds", "from"])
    for name, allowed in CONSTANTS.items():
        error = fit.relative_errors.get(name)
        told = "prior" if name not in fit.fitted else "fit"
        if error is not None:
            told += f", ± {error:.1%}"
        if name in fit.at_bound:
            told += ", at its bound"
        table.add_row(
            name,
            f"{getattr(constants, name):.4g}",
            f"{getattr(prior, name):.4g}",
            allowed.unit,
            f"{allowed.low:g} to {allowed.high:g}",
            told,
        )
    return table


def print_shipped(as_json: bool) -> None:
    """The shipped calibrations with what each was checked against."""
    if as_json:
        _print_json({"calibrations": [one.as_json() for one in shipped()]})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = _table(Table, ["model", "GPU", "how far checked"])
    for one in shipped():
        words = (one.model if one.model != "*" else "any other", one.gpu, one.checked)
        table.add_row(*(Text(word) for word in words))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text("--json says where each number comes from.", style="dim"))


def _table(kind: Any, headings: list[str]) -> Any:
    from rich import box

    table = kind(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        numeric = heading in ("line", "measured", "model", "error", "left out", "value", "prior")
        table.add_column(heading, justify="right" if numeric and headings[0] != "model" else "left")
    return table


def _print_json(data: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
