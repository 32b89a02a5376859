"""From measured points to a calibration: turn away the impossible, fit, say how far to trust it.

Held-out points and leave-one-out cross-validation carry the evidence: a fit of as many constants
as points meets its own points whatever they are.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.constants import (
    ANY,
    FALLBACK_GPU,
    Calibration,
    CalibrationFile,
    calibration_file_of,
)
from forebay.replay.engine.calibration.fit import Fit, fit
from forebay.replay.engine.calibration.points import Point, Points
from forebay.replay.engine.calibration.workloads import Workload, predicted_s, workload
from forebay.replay.engine.hardware.models import GpuSpec, ModelSpec
from forebay.replay.engine.hardware.roofline import least
from forebay.traces.errors import InputError

KERNEL_SHARE = 0.82
"""The most that kernel tables reach of peak; a served request above it is doubtful."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A point that no such GPU can have measured."""

    point: Point
    reason: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A point beside the model.

    Attributes:
        model_s: by the final constants.
        left_out_s: by constants fitted without this point; None for held-out points and where
            cross-validation was not asked for.
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
class Outcome:
    """A finished calibration."""

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    compared: tuple[Compared, ...]
    rejected: tuple[Rejected, ...]
    doubts: tuple[str, ...]
    used: str


def kernel_table() -> Calibration:
    """The prior: constants of kernels alone, never of the requests that are to be fitted."""
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
) -> Outcome:
    """Fit `read.points` for `model` on `gpu`.

    Args:
        hold_out: lines to hold out besides those marked so.
        peak_share: points that need more than this share of the data sheet's peak are rejected.

    Raises InputError when a line to hold out is not there, or nothing is left to fit.
    """
    if unknown := set(hold_out) - {point.line for point in read.points}:
        raise InputError(f"--hold-out {min(unknown)}: no point on that line")
    prior = prior or kernel_table()
    kept, works, rejected, doubts = _gate(read.points, model, gpu, peak_share)
    fitting = [i for i, p in enumerate(kept) if not (p.held_out or p.line in hold_out)]
    if not fitting:
        why = f"; {len(rejected)} were rejected: {rejected[0].reason}" if rejected else ""
        raise InputError(f"no point left to fit{why}")

    def fit_of(indices: list[int]) -> Fit:
        chosen = [works[i] for i in indices]
        return fit(chosen, [kept[i].seconds for i in indices], model, gpu, prior)

    whole = fit_of(fitting)
    left_out: dict[int, float] = {}
    if cross_validate and len(fitting) > 1:
        for i in fitting:
            without = fit_of([j for j in fitting if j != i])
            left_out[i] = predicted_s(works[i], model, gpu, without.constants)
    compared = tuple(
        Compared(point, predicted_s(works[i], model, gpu, whole.constants), left_out.get(i))
        for i, point in enumerate(kept)
    )
    held = [one for i, one in enumerate(compared) if i not in fitting]
    file = CalibrationFile(
        model.name,
        gpu.name,
        today.isoformat(),
        read.used,
        _checked(held, [one for one in compared if one.left_out_s is not None], whole),
        whole.constants,
        whole.fitted,
        tuple(_row(one, i in fitting) for i, one in enumerate(compared)),
    )
    return Outcome(file, whole, prior, compared, tuple(rejected), tuple(doubts), read.used)


def _gate(
    points: tuple[Point, ...], model: ModelSpec, gpu: GpuSpec, peak_share: float
) -> tuple[list[Point], list[Workload], list[Rejected], list[str]]:
    """Keep what the data sheet allows."""
    kept, works, rejected, doubts = list[Point](), list[Workload](), list[Rejected](), list[str]()
    for point in points:
        work = workload(point, model, gpu)
        steps = [least(model, gpu, [step]) for step in work.steps]
        floor_s = (max if work.longest else sum)(step.seconds for step in steps)
        share = floor_s / point.seconds
        compute = sum(s.compute_s for s in steps) >= sum(s.memory_s for s in steps)
        peak = gpu.peak_flops / 1e12 if compute else gpu.bandwidth / 1e12
        unit = "TFLOP/s" if compute else "TB/s"
        needs = (
            f"line {point.line}: {point} in {point.seconds:.4g} s needs {share * peak:,.3g} "
            f"{unit}, {share:.0%} of the {peak:,.4g} of {gpu.name}"
        )
        if share > peak_share:
            rejected.append(
                Rejected(point, needs + "; a prefix-cache hit (cached_tokens), or another GPU, "
                         "batch or precision?")
            )  # fmt: skip
            continue
        if share > KERNEL_SHARE:
            doubts.append(needs + f"; kernels alone reach {KERNEL_SHARE:.0%}")
        kept.append(point)
        works.append(work)
    return kept, works, rejected, doubts


def error_text(errors: list[float]) -> str:
    """Median and worst of relative errors, in words."""
    sizes = sorted(abs(error) for error in errors)
    return f"median {median(sizes):.1%}, worst {sizes[-1]:.1%}"


def _checked(held: list[Compared], validated: list[Compared], whole: Fit) -> str:
    """How far the calibration was checked, in one line."""
    parts = []
    if held:
        parts.append(f"{len(held)} held-out points: {error_text([one.error for one in held])}")
    if validated:
        errors = [one.left_out_error for one in validated if one.left_out_error is not None]
        told = f"leave-one-out over {len(errors)}: {error_text(errors)}"
        if len(errors) <= len(whole.fitted):
            told += ", each time with a constant back at its prior, for want of points"
        parts.append(told)
    return "; ".join(parts) or "not checked: no point was held out"


def _row(one: Compared, fitted: bool) -> dict[str, Any]:
    point = one.point
    row: dict[str, Any] = {"line": point.line, "kind": point.kind}
    row |= {"prompt_tokens": point.prompt_tokens, "cached_tokens": point.cached_tokens}
    row |= {"batch_size": point.batch_size, "output_tokens": point.output_tokens}
    row |= {"max_num_batched_tokens": point.max_num_batched_tokens, "seconds": point.seconds}
    row |= {"held_out": not fitted, "model_s": one.model_s, "error": one.error}
    row |= {"left_out_error": one.left_out_error, "note": point.note}
    return row
