"""Print calibrations as tables or JSON, and write them to a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.replay.engine.timing.step_constants import (
    CONSTANTS,
    Calibration,
    CalibrationFile,
    shipped,
)
from forebay.traces.command_line.messages import print_json, talk
from forebay.traces.whole_file import json_bytes, whole_file

if TYPE_CHECKING:
    from rich.table import Table

    from forebay.replay.engine.calibration.calibrate import CalibrationResult
    from forebay.replay.engine.calibration.fit import Fit

_NUMERIC = ("line", "measured", "model", "error", "left out", "value", "prior")


def print_shipped(as_json: bool) -> None:
    """Print the shipped calibrations and the measurements that each was checked against."""
    if as_json:
        print_json({"calibrations": [calibration.as_json() for calibration in shipped()]})
        return
    from rich.console import Console
    from rich.text import Text

    table = new_table("model", "GPU", "how far checked", right=())
    for calibration in shipped():
        words = (
            calibration.model if calibration.model != "*" else "any other",
            calibration.gpu,
            calibration.checked,
        )
        table.add_row(*(Text(word) for word in words))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text("--json shows the source of each number.", style="dim"))


def print_outcome(done: "CalibrationResult") -> None:
    """Print every point next to the model, the constants, and the errors of the fit."""
    from rich.console import Console
    from rich.text import Text

    from forebay.replay.engine.calibration.calibrate import error_text

    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.used}"))
    # One row for each point, with its prediction.
    table = new_table("line", "point", "measured", "model", "error", "left out", "role")
    fitted_errors = []
    for comparison, row in zip(done.compared, done.file.points, strict=True):
        left_out = comparison.left_out_error
        if not row["held_out"]:
            fitted_errors.append(comparison.error)
        table.add_row(
            str(comparison.point.line),
            Text(str(comparison.point)),
            f"{comparison.point.seconds:#.4g} s",
            f"{comparison.model_s:#.4g} s",
            f"{comparison.error:+.1%}",
            "" if left_out is None else f"{left_out:+.1%}",
            "held out" if row["held_out"] else "fit",
        )
    console.print(table)
    # The constants, and the evidence for them.
    console.print(constants_table(done.file.constants, done.prior, done.fit))
    unfitted = [name for name in CONSTANTS if name not in done.fit.fitted]
    console.print(
        Text(f"The points do not identify {', '.join(unfitted)}: the prior's values are kept.")
    )
    own = f"Fitted points: {error_text(fitted_errors)}"
    if len(fitted_errors) <= len(done.fit.fitted):
        own += " (as many constants as points: no evidence)"
    console.print(Text(f"{own}. {done.file.checked}."))


def outcome_data(done: "CalibrationResult") -> dict[str, Any]:
    return {
        **fit_data(done.file, done.fit),
        "rejected": [
            {"line": rejection.point.line, "reason": rejection.reason}
            for rejection in done.rejected
        ],
        "doubtful": list(done.doubts),
    }


def fit_data(file: CalibrationFile, fit: "Fit") -> dict[str, Any]:
    """Return the calibration file and how well its constants are determined."""
    return {
        **file.as_json(),
        "relative_errors": fit.relative_errors,
        "at_bound": list(fit.at_bound),
        "kept_from_prior": fit.unresolved,
    }


def constants_table(constants: Calibration, prior: Calibration, fit: "Fit") -> "Table":
    """Return a table of every constant, its prior, its bounds and the source of the value."""
    table = new_table("constant", "value", "prior", "unit", "bounds", "from")
    for name, allowed in CONSTANTS.items():
        error = fit.relative_errors.get(name)
        origin = "prior" if name not in fit.fitted else "fit"
        if error is not None:
            origin += f", ± {error:.1%}"
        if name in fit.at_bound:
            origin += ", at its bound"
        table.add_row(
            name,
            f"{getattr(constants, name):.4g}",
            f"{getattr(prior, name):.4g}",
            allowed.unit,
            f"{allowed.low:g} to {allowed.high:g}",
            origin,
        )
    return table


def new_table(*headings: str, right: tuple[str, ...] = _NUMERIC) -> "Table":
    """Return an empty table. The columns named in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def write_calibration(file: CalibrationFile, out: Path) -> None:
    """Write `file` whole or not at all and report it (InputError: it cannot be written)."""
    with whole_file(out) as written:
        written.write(json_bytes(file.as_json()))
    talk(f"wrote {out}: forebay engine --calibration {out}")
