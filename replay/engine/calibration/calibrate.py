"""Turn measured points into a calibration: reject impossible points, fit, check the fit.

The evidence is held-out points and, of few points, leave-one-out cross-validation. A fit with as
many constants as points meets its own points regardless of their values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.fit import CANDIDATES, Fit, fit_times, fitted_count, refusal
from forebay.replay.engine.calibration.points import Point
from forebay.replay.engine.calibration.workloads import PointSteps, point_steps, predicted_s
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.roofline import least
from forebay.replay.engine.timing.step_constants import (
    ANY,
    FALLBACK_GPU,
    Calibration,
    CalibrationFile,
    calibration_file_of,
)
from forebay.traces.ground.errors import InputError

KERNEL_SHARE = 0.82
"""Largest share of peak in kernel tables. A served request above it is doubtful."""


MOST_LEFT_OUT = 20
"""Most points of which each is left out of a fit of the others. More are evidence themselves."""


@dataclass(frozen=True, slots=True)
class PointFit:
    """A finished fit of points.

    Attributes:
        points: the points that the GPU can have measured, as in `file.points`.
        rejected: {line: why} of the others.
        doubts: lines with points that are faster than kernels alone.
    """

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    points: tuple[Point, ...]
    rejected: dict[int, str]
    doubts: tuple[str, ...]

    def refusal(self) -> str | None:
        """Return why the fit is no physics, or None."""
        return refusal(self.fit)

    def warnings(self) -> list[str]:
        return [f"rejected {reason}" for reason in self.rejected.values()] + [
            f"doubtful {doubt}" for doubt in self.doubts
        ]

    def furthest(self) -> tuple[str, float]:
        """Return the held-out point (else any) that is furthest off, and its relative error."""
        rows = [row for row in self.file.points if row["held_out"]] or self.file.points
        worst = max(rows, key=lambda row: abs(row["error"]))
        return f"line {worst['line']}", worst["error"]


def kernel_table() -> Calibration:
    """Return the prior: constants measured on an H200, never on the requests to be fitted."""
    return calibration_file_of(ANY, FALLBACK_GPU).constants


def calibrate(
    points: Sequence[Point],
    model: ModelSpec,
    gpu: GpuSpec,
    prior: Calibration,
    *,
    used: str,
    today: date,
    hold_out: float = 0.0,
    candidates: Mapping[str, float] = CANDIDATES,
) -> PointFit:
    """Fit `points` for `model` on `gpu`.

    Args:
        used: describes the points in the file.
        hold_out: share of the points, the last ones, that are held out as well as the marked ones.

    Raises InputError when nothing is left to fit.
    """
    # Impossible points must not move the constants, so they leave before the fit.
    possible, rejected, doubts = _possible(_marked(points, hold_out), model, gpu)
    fitting = {point.line: work for point, work in possible if not point.held_out}
    if not (possible if hold_out == 1 else fitting):
        reason = next((f"; {len(rejected)} were rejected: {why}" for why in rejected.values()), "")
        raise InputError(f"no point left to fit{reason}")
    measured_s = {point.line: point.seconds for point, _ in possible}

    def fit_of(works: dict[int, PointSteps]) -> Fit:
        return fit_times(
            lambda constants: [predicted_s(w, model, gpu, constants) for w in works.values()],
            [measured_s[line] for line in works],
            prior,
            candidates=candidates,
        )

    def left_out_error(line: int) -> float | None:
        """Return the error of a point in a fit without it: a few constants can meet few points."""
        if line not in fitting or not 1 < len(fitting) <= MOST_LEFT_OUT:
            return None
        without = fit_of({other: work for other, work in fitting.items() if other != line})
        seconds = predicted_s(fitting[line], model, gpu, without.constants)
        return seconds / measured_s[line] - 1

    # Fit all points, then judge each.
    whole = fit_of(fitting)
    rows = []
    for point, work in possible:
        model_s = predicted_s(work, model, gpu, whole.constants)
        row = asdict(point) | {"model_s": model_s, "error": model_s / point.seconds - 1}
        rows.append(row | {"left_out_error": left_out_error(point.line)})
    checked = _checked(rows, whole)
    file = CalibrationFile(
        model.name, gpu.name, today.isoformat(), used, checked, whole.constants, whole.fitted,
        tuple(rows),
    )  # fmt: skip
    return PointFit(
        file, whole, prior, tuple(point for point, _ in possible), rejected, tuple(doubts)
    )


def _marked(points: Sequence[Point], hold_out: float) -> list[Point]:
    """Return the points, of which the last ones are held out, too."""
    first = fitted_count(len(points), hold_out)
    return [
        replace(point, held_out=point.held_out or place >= first)
        for place, point in enumerate(points)
    ]


def _possible(
    points: Sequence[Point], model: ModelSpec, gpu: GpuSpec
) -> tuple[list[tuple[Point, PointSteps]], dict[int, str], list[str]]:
    """Return the points that the data sheet allows, why the others are rejected, and doubts."""
    possible: list[tuple[Point, PointSteps]] = []
    rejected: dict[int, str] = {}
    doubts: list[str] = []
    for point in points:
        work = point_steps(point, model, gpu)
        floors = [least(model, gpu, [step]) for step in work.steps]
        floor_s = (max if work.longest else sum)(floor.seconds for floor in floors)
        share = floor_s / point.seconds
        compute_s = sum(floor.compute_s for floor in floors)
        peak, unit = gpu.bandwidth / 1e12, "TB/s"
        if compute_s >= sum(floor.memory_s for floor in floors):
            peak, unit = gpu.peak_flops / 1e12, "TFLOP/s"
        needs = (
            f"line {point.line}: {point} in {point.seconds:.4g} s needs {share * peak:,.3g} "
            f"{unit}, {share:.0%} of the {peak:,.4g} of {gpu.name}"
        )
        if share > 1:
            cause = "a prefix-cache hit (cached_tokens), or another GPU, batch or precision?"
            rejected[point.line] = f"{needs}; {cause}"
            continue
        if share > KERNEL_SHARE:
            doubts.append(f"{needs}; kernels alone reach {KERNEL_SHARE:.0%}")
        possible.append((point, work))
    return possible, rejected, doubts


def error_text(errors: Sequence[float]) -> str:
    """Describe relative errors by their median and the worst."""
    sizes = sorted(abs(error) for error in errors)
    return f"median {median(sizes):.1%}, worst {sizes[-1]:.1%}"


def _checked(rows: Sequence[dict[str, Any]], whole: Fit) -> str:
    """Describe in one line how far the calibration was checked."""
    parts = []
    if held_out := [row["error"] for row in rows if row["held_out"]]:
        parts.append(f"{len(held_out)} held-out points: {error_text(held_out)}")
    left_out = [row["left_out_error"] for row in rows if row["left_out_error"] is not None]
    if left_out:
        text = f"leave-one-out over {len(left_out)}: {error_text(left_out)}"
        if len(left_out) <= len(whole.fitted):
            text += ", each time with a constant back at its prior, for want of points"
        parts.append(text)
    return "; ".join(parts) or "not checked: no point was held out"
