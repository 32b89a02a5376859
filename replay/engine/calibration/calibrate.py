"""Turn measured points into a calibration: reject impossible points, fit, check the fit.

The evidence is held-out points and leave-one-out cross-validation. A fit with as many constants as
points meets its own points regardless of their values.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.fit import Fit, fit
from forebay.replay.engine.calibration.points import Point, Points
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
from forebay.traces.errors import InputError

KERNEL_SHARE = 0.82
"""Largest share of peak in kernel tables. A served request above it is doubtful."""


@dataclass(frozen=True, slots=True)
class RejectedPoint:
    """A point that the GPU cannot have measured."""

    point: Point
    reason: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A point and the model's prediction of it.

    Attributes:
        model_s: prediction by the final constants.
        left_out_s: prediction by constants fitted without this point. None for held-out points and
            without cross-validation.
    """

    point: Point
    model_s: float
    left_out_s: float | None

    @property
    def error(self) -> float:
        return self.model_s / self.point.seconds - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out_s is None else self.left_out_s / self.point.seconds - 1


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """A finished calibration. `used` describes the points that were read."""

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    compared: tuple[Compared, ...]
    rejected: tuple[RejectedPoint, ...]
    doubts: tuple[str, ...]
    used: str


def kernel_table() -> Calibration:
    """Return the prior: constants measured on an H200, never on the requests to be fitted."""
    return calibration_file_of(ANY, FALLBACK_GPU).constants


def calibrate(
    read: Points,
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    prior: Calibration | None = None,
    hold_out: Collection[int] = (),
    cross_validate: bool = True,
    peak_share: float = 1.0,
    today: date,
) -> CalibrationResult:
    """Fit `read.points` for `model` on `gpu`.

    Args:
        hold_out: lines to hold out, in addition to the lines marked as held out.
        peak_share: points that need more than this share of the data sheet's peak are rejected.

    Raises InputError when a line to hold out does not exist, or nothing is left to fit.
    """
    if unknown := set(hold_out) - {point.line for point in read.points}:
        raise InputError(f"--hold-out {min(unknown)}: no point on that line")
    # Impossible points must not move the constants, so they leave before the fit.
    gate = _Gate(model, gpu, peak_share)
    for point in read.points:
        gate.take(point)
    fitting = [i for i, p in enumerate(gate.kept) if not (p.held_out or p.line in hold_out)]
    if not fitting:
        raise InputError(f"no point left to fit{gate.rejected_text()}")
    # A few constants can meet few points: held-out points and cross-validation test the fit.
    prior = prior or kernel_table()
    whole, left_out = _fits(gate, fitting, prior, cross_validate)
    compared = tuple(
        Compared(point, predicted_s(steps, model, gpu, whole.constants), left_out.get(i))
        for i, (point, steps) in enumerate(zip(gate.kept, gate.steps, strict=True))
    )
    file = CalibrationFile(
        model.name,
        gpu.name,
        today.isoformat(),
        read.used,
        _checked(
            [comparison for i, comparison in enumerate(compared) if i not in fitting],
            compared,
            whole,
        ),
        whole.constants,
        whole.fitted,
        tuple(_row(comparison, i in fitting) for i, comparison in enumerate(compared)),
    )
    return CalibrationResult(
        file, whole, prior, compared, tuple(gate.rejected), tuple(gate.doubts), read.used
    )


class _Gate:
    """Keeps the points that the GPU's data sheet allows."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, peak_share: float) -> None:
        self.model = model
        self.gpu = gpu
        self.kept: list[Point] = []
        self.steps: list[PointSteps] = []
        self.rejected: list[RejectedPoint] = []
        self.doubts: list[str] = []
        self._peak_share = peak_share

    def take(self, point: Point) -> None:
        """Keep `point` with the steps behind it, or reject it."""
        work = point_steps(point, self.model, self.gpu)
        floors = [least(self.model, self.gpu, [step]) for step in work.steps]
        floor_s = (max if work.longest else sum)(floor.seconds for floor in floors)
        share = floor_s / point.seconds
        compute = sum(floor.compute_s for floor in floors) >= sum(
            floor.memory_s for floor in floors
        )
        peak = self.gpu.peak_flops / 1e12 if compute else self.gpu.bandwidth / 1e12
        unit = "TFLOP/s" if compute else "TB/s"
        needs = (
            f"line {point.line}: {point} in {point.seconds:.4g} s needs {share * peak:,.3g} "
            f"{unit}, {share:.0%} of the {peak:,.4g} of {self.gpu.name}"
        )
        if share > self._peak_share:
            cause = "a prefix-cache hit (cached_tokens), or another GPU, batch or precision?"
            self.rejected.append(RejectedPoint(point, f"{needs}; {cause}"))
            return
        if share > KERNEL_SHARE:
            self.doubts.append(f"{needs}; kernels alone reach {KERNEL_SHARE:.0%}")
        self.kept.append(point)
        self.steps.append(work)

    def rejected_text(self) -> str:
        if not self.rejected:
            return ""
        return f"; {len(self.rejected)} were rejected: {self.rejected[0].reason}"


def _fits(
    gate: _Gate, fitting: list[int], prior: Calibration, cross_validate: bool
) -> tuple[Fit, dict[int, float]]:
    """Fit all points of `fitting`. With `cross_validate` predict each from a fit without it."""

    def fit_of(indices: list[int]) -> Fit:
        chosen = [gate.steps[i] for i in indices]
        measured_s = [gate.kept[i].seconds for i in indices]
        return fit(chosen, measured_s, gate.model, gate.gpu, prior)

    left_out: dict[int, float] = {}
    if cross_validate and len(fitting) > 1:
        for i in fitting:
            without = fit_of([j for j in fitting if j != i])
            left_out[i] = predicted_s(gate.steps[i], gate.model, gate.gpu, without.constants)
    return fit_of(fitting), left_out


def error_text(errors: list[float]) -> str:
    """Describe relative errors by their median and the worst."""
    sizes = sorted(abs(error) for error in errors)
    return f"median {median(sizes):.1%}, worst {sizes[-1]:.1%}"


def _checked(held_out: list[Compared], compared: Sequence[Compared], whole: Fit) -> str:
    """Describe in one line how far the calibration was checked."""
    parts = []
    if held_out:
        errors = [comparison.error for comparison in held_out]
        parts.append(f"{len(held_out)} held-out points: {error_text(errors)}")
    errors = [
        comparison.left_out_error
        for comparison in compared
        if comparison.left_out_error is not None
    ]
    if errors:
        text = f"leave-one-out over {len(errors)}: {error_text(errors)}"
        if len(errors) <= len(whole.fitted):
            text += ", each time with a constant back at its prior, for want of points"
        parts.append(text)
    return "; ".join(parts) or "not checked: no point was held out"


def _row(comparison: Compared, fitted: bool) -> dict[str, Any]:
    point = comparison.point
    row: dict[str, Any] = {"line": point.line, "kind": point.kind}
    row |= {"prompt_tokens": point.prompt_tokens, "cached_tokens": point.cached_tokens}
    row |= {"batch_size": point.batch_size, "output_tokens": point.output_tokens}
    row |= {"max_num_batched_tokens": point.max_num_batched_tokens, "seconds": point.seconds}
    row |= {"held_out": not fitted, "model_s": comparison.model_s, "error": comparison.error}
    row |= {"left_out_error": comparison.left_out_error, "note": point.note}
    return row
