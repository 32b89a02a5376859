"""Print a fit as tables or JSON, and write its calibration to a file."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.replay.engine.calibration.calibrate import PointFit, error_text
from forebay.replay.engine.calibration.output import new_table
from forebay.replay.engine.timing.step_constants import CONSTANTS, CalibrationFile
from forebay.replay.validation.fit_run import FitLine, RunFit, hit_ratio
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.whole_file import json_bytes, whole_file


def print_fit(done: PointFit | RunFit, *, as_json: bool) -> None:
    """Print the constants, and the measured times with the model's."""
    if as_json:
        print_json(_data(done))
        return
    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.file.source}"))
    console.print(_constants(done))
    if isinstance(done, RunFit):
        for name, why in done.reasons.items():
            console.print(Text(f"{name} is kept: {why}."))
    tables, summary = _of_points(done) if isinstance(done, PointFit) else _of_requests(done)
    for table in tables:
        console.print(table)
    name, error = done.furthest()
    console.print(Text(f"{summary} {done.file.checked}.\nFurthest off: {name} by {error:+.1%}."))


def write_calibration(file: CalibrationFile, out: Path) -> None:
    """Write `file` whole or not at all and report it (InputError: it cannot be written)."""
    with whole_file(out) as written:
        written.write(json_bytes(file.as_json()))
    talk(f"wrote {out}: forebay engine --calibration {out}")


def _data(done: PointFit | RunFit) -> dict[str, Any]:
    data = {
        **done.file.as_json(),
        "relative_errors": done.fit.relative_errors,
        "at_bound": list(done.fit.at_bound),
        "kept_from_prior": done.fit.unresolved,
    }
    if isinstance(done, RunFit):
        ratios = {"measured": hit_ratio(done.measured), "simulated": hit_ratio(done.predicted)}
        return {**data, "hit_ratio": ratios, "reasons": done.reasons}
    rejected = [{"line": line, "reason": reason} for line, reason in done.rejected.items()]
    return {**data, "rejected": rejected, "doubtful": list(done.doubts)}


def _constants(done: PointFit | RunFit) -> Table:
    """Return a table of every constant, its prior, its bounds and the source of the value."""
    table = new_table("constant", "value", "prior", "unit", "bounds", "from")
    for name, allowed in CONSTANTS.items():
        error = done.fit.relative_errors.get(name)
        origin = "fit" if name in done.fit.fitted else "prior"
        if error is not None:
            origin += f", ± {error:.1%}"
        if name in done.fit.at_bound:
            origin += ", at its bound"
        table.add_row(
            name,
            f"{getattr(done.file.constants, name):.4g}",
            f"{getattr(done.prior, name):.4g}",
            allowed.unit,
            f"{allowed.low:g} to {allowed.high:g}",
            origin,
        )
    return table


def _of_points(done: PointFit) -> tuple[list[Table], str]:
    """Return a row for each point, and how far its own points are evidence for the fit."""
    table = new_table("line", "point", "measured", "model", "error", "left out", "role")
    for point, row in zip(done.points, done.file.points, strict=True):
        left_out = row["left_out_error"]
        table.add_row(
            str(point.line),
            Text(str(point)),
            f"{point.seconds:#.4g} s",
            f"{row['model_s']:#.4g} s",
            f"{row['error']:+.1%}",
            "" if left_out is None else f"{left_out:+.1%}",
            "held out" if point.held_out else "fit",
        )
    fitted = [row["error"] for row in done.file.points if not row["held_out"]]
    if not fitted:
        return [table], "No point was fitted."
    own = f"Fitted points: {error_text(fitted)}"
    if len(fitted) <= len(done.fit.fitted):
        own += " (as many constants as points: no evidence)"
    return [table], f"{own}."


def _of_requests(done: RunFit) -> tuple[list[Table], str]:
    """Return tables of means and quantiles, and the shares of prompt tokens that were cached."""
    tables = [
        _lines(f"{role} requests", lines)
        for role, lines in (("fitted", done.fitted), ("held-out", done.held_out))
        if lines
    ]
    ratio, model = hit_ratio(done.measured), hit_ratio(done.predicted) or 0.0
    measured = "not in the file" if ratio is None else f"{ratio:.1%}"
    summary = f"Prompt tokens cached: measured {measured}, simulated {model:.1%}."
    if failed := sum(not request.finished for request in done.measured):
        summary += (
            f" {failed:,} requests that failed, or hit other blocks, were played and are not "
            "compared."
        )
    return tables, summary


def _lines(title: str, lines: tuple[FitLine, ...]) -> Table:
    numbers = ("requests", "measured", "model", "error", "95 % interval")
    table = new_table(title, *numbers, right=numbers)
    for line in lines:
        table.add_row(
            line.name,
            str(line.requests),
            f"{line.measured_s:#.4g} s",
            f"{line.model_s:#.4g} s",
            f"{line.error:+.1%}",
            f"{line.low:+.1%} to {line.high:+.1%}",
        )
    return table
