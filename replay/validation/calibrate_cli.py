"""`forebay engine calibrate`: parse the options, fit, print and write the calibration."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.replay.engine.calibration.fit import refusal
from forebay.replay.engine.calibration.output import (
    outcome_data,
    print_outcome,
    write_calibration,
)
from forebay.replay.engine.calibration.points import DEFAULT_BATCHED_TOKENS, read_points
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.timing.step_constants import read_calibration
from forebay.replay.validation.measured import is_results
from forebay.traces.command_line.messages import print_json
from forebay.traces.command_line.options import AsJson, Force, takes_options
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.replay.engine.calibration.calibrate import CalibrationResult

HELP = """Fit the step-time constants of a model on a GPU to measured points.

POINTS is a CSV or JSON lines file with the columns kind (ttft, itl, tpot, stall, offline),
prompt_tokens and seconds. Optional columns are cached_tokens, batch_size, output_tokens,
max_num_batched_tokens and held_out.

RUN is the folder of a `forebay replay`. Requests that were alone on their server are used.
With --trace all requests are used: the simulated engine plays the trace in virtual time.

RESULTS is the JSON of `vllm bench serve --save-detailed`, or CSV or JSON lines with sent_s,
input_tokens, output_tokens, ttft_s and e2e_s.

vLLM's flags describe the server. A fit that no GPU can reach is printed and rejected.

Example:  forebay engine calibrate points.csv --model phi-3-mini --gpu h200-nvl -o cal.json

Example:  forebay engine calibrate runs/a runs/b --trace a.jsonl --model config.json --gpu gpu.json
"""


@takes_options
def calibrate_command(
    points: Annotated[
        list[Path],
        typer.Argument(
            metavar="POINTS|RESULTS|RUN...", help="Points, results, or run folders of one trace."
        ),
    ],
    model: Annotated[str, typer.Option(help="Measured model: a name or a config.json.")],
    gpu: Annotated[
        str,
        typer.Option(
            help="Measured GPU: a name, or a JSON file of name, peak_flops, bandwidth (bytes/s), "
            "memory_gib, multiprocessors."
        ),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(help="The trace that RUN or RESULTS is of: fit all its requests."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None,
    hold_out: Annotated[
        str,
        typer.Option(
            help="Left out of the fit, and compared: lines of POINTS, e.g. 3,5, or the share of "
            "the last requests, e.g. 0.3."
        ),
    ] = "",
    cross_validate: Annotated[
        bool, typer.Option(help="Fit once more without each point and predict it.")
    ] = True,
    prior: Annotated[
        Path | None,
        typer.Option(
            help="Calibration whose constants are kept where none is fitted.  [default: an H200]"
        ),
    ] = None,
    peak_share: Annotated[
        float, typer.Option(help="Reject points that need more than this share of the GPU's peak.")
    ] = 1.0,
    force: Force = False,
    as_json: AsJson = False,
    *,
    flags: EngineFlags,
) -> None:
    # Runs and results of other tools are fitted by simulating them.
    _check_output(out, peak_share, force)
    batched_tokens = flags.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    if trace is not None or is_results(points[0]):
        from forebay.replay.validation.fit_run_cli import calibrate_runs

        _check_options_of_runs(peak_share, cross_validate)
        values = flags.values()
        values["max_num_batched_tokens"] = batched_tokens
        config = EngineConfig(model, gpu, **values)
        share = _share(hold_out)
        calibrate_runs(points, trace, config, prior, out, hold_out=share, as_json=as_json)
        return
    # Points are fitted directly.
    _check_flags_of_points(flags)
    if len(points) > 1:
        raise InputError(f"{points[1]}: several only with --trace; give one file or run")
    from forebay.replay.engine.calibration.calibrate import calibrate

    done = calibrate(
        read_points(points[0], batched_tokens),
        find_model(model),
        find_gpu(gpu),
        prior=read_calibration(prior).constants if prior else None,
        hold_out=_lines(hold_out),
        cross_validate=cross_validate,
        peak_share=peak_share,
        today=datetime.now(UTC).date(),
    )
    # A poor fit is shown, but not written.
    _show(done, as_json=as_json)
    if (why := refusal(done.fit)) is not None:
        raise InputError(f"{points[0]}: this fit is no calibration: {why}")
    if out is not None:
        write_calibration(done.file, out)


def _check_output(out: Path | None, peak_share: float, force: bool) -> None:
    if out is not None and out.exists() and not force:
        raise InputError(f"--out {out}: exists; give another name, or --force to overwrite it")
    if not 0 < peak_share <= 1:
        raise InputError(f"--peak-share {peak_share}: give a share in (0, 1]")


def _check_options_of_runs(peak_share: float, cross_validate: bool) -> None:
    if peak_share != 1 or not cross_validate:
        raise InputError("--peak-share, --no-cross-validate: for POINTS; leave out --trace")


def _check_flags_of_points(flags: EngineFlags) -> None:
    """Raise InputError for a flag of the server that points cannot use."""
    defaults = EngineFlags().values()
    for name, value in flags.values().items():
        if name != "max_num_batched_tokens" and value != defaults.get(name):
            raise InputError(
                f"--{name.replace('_', '-')} describes the server of RUN: give --trace as well"
            )


def _lines(text: str) -> set[int]:
    try:
        return {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise InputError(f"--hold-out {text}: give line numbers, e.g. 3,5") from None


def _share(text: str) -> float:
    """Return the part of a run to hold out (InputError: not a share)."""
    try:
        share = float(text or 0)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 0.9:
        raise InputError(
            f"--hold-out {text}: of RUN or RESULTS give a share, e.g. 0.3; at most 0.9"
        )
    return share


def _show(done: "CalibrationResult", *, as_json: bool) -> None:
    if as_json:
        print_json(outcome_data(done))
    else:
        print_outcome(done)
    for rejection in done.rejected:
        print(f"rejected {rejection.reason}", file=sys.stderr)
    for doubt in done.doubts:
        print(f"doubtful {doubt}", file=sys.stderr)
