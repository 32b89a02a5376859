"""Fit the step-time constants to measured points: least squares on relative errors.

Damped Gauss-Newton in the logarithm of the constants, so none changes sign and all weigh alike.
Only constants that the points can tell apart are fitted: a constant that moves no point, or moves
them as those already chosen do, keeps the prior's value. Pure; reads and prints nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forebay.replay.engine.calibration.constants import CONSTANTS, Calibration
from forebay.replay.engine.calibration.workloads import Workload, predicted_s
from forebay.replay.engine.hardware.models import GpuSpec, ModelSpec

CANDIDATES = {
    "gemm_compute": 0.2,
    "prefill_compute": 0.2,
    "step_s": 1.0,
    "request_s": 1.0,
    "decode_bandwidth": 0.3,
    "gemm_bandwidth": 0.05,
    "sequence_s": 0.7,
}
"""What served requests can show, with how uncertain the kernel tables leave it (in ln): software
overheads differ several-fold between versions, the bandwidth of a weight read by a few percent. The
other constants act through these and need kernel measurements."""
LEAST_EFFECT = 0.01
"""Least relative change of some point by that uncertainty, beside the constants already chosen."""
SMALLEST_S = 1e-8
_STEP = 1e-4  # of ln(constant) in a slope
_LEAST_GAIN = 0.0  # to the last digit: such a fit takes milliseconds
_ROUNDS = 60
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants.

    Attributes:
        fitted: their names; the other constants are the prior's.
        relative_errors: one standard error of each as a share of its value; None without points
            to spare.
        at_bound: those that stopped at a physical bound, a sign that something else is wrong.
        unresolved: candidates left at the prior, with the largest relative change of any point by
            their uncertainty: what was not resolved, or mimicked by a fitted one.
    """

    constants: Calibration
    fitted: tuple[str, ...]
    relative_errors: dict[str, float | None]
    at_bound: tuple[str, ...]
    unresolved: dict[str, float]


def fit(
    works: Sequence[Workload],
    measured_s: Sequence[float],
    model: ModelSpec,
    gpu: GpuSpec,
    prior: Calibration,
) -> Fit:
    """Constants under which `works` take `measured_s`, as nearly as they can."""

    def seconds(constants: Calibration) -> list[float]:
        return [predicted_s(work, model, gpu, constants) for work in works]

    return fit_times(seconds, measured_s, prior, CANDIDATES)


def fit_times(
    predicted: Callable[[Calibration], Sequence[float]],
    measured_s: Sequence[float],
    prior: Calibration,
    candidates: Mapping[str, float],
    *,
    step: float = _STEP,
    least_gain: float = _LEAST_GAIN,
) -> Fit:
    """Constants under which `predicted` gives `measured_s`, as nearly as it can.

    Args:
        candidates: constants that may be fitted, with their uncertainty (in ln).
        step: of ln(constant) for slopes; coarse where predictions are not smooth.
        least_gain: a round that lowers the sum of squares by less than this share is the last.
    """
    target = np.log(np.asarray(measured_s, dtype=np.float64))

    def logs(constants: Calibration) -> Vector:
        return np.log(np.asarray(predicted(constants), dtype=np.float64))

    names, doubt = list(candidates), np.array(list(candidates.values()))
    effects = _jacobian(logs, prior, names, step) * doubt
    chosen, left = _identifiable(effects, names)
    constants = (
        _minimise(lambda c: logs(c) - target, prior, chosen, step, least_gain) if chosen else prior
    )
    residuals = logs(constants) - target
    spare = len(target) - len(chosen)
    return Fit(
        constants,
        chosen,
        _errors(_jacobian(logs, constants, chosen, step), residuals, chosen, spare),
        tuple(name for name in chosen if _bounded(name, getattr(constants, name))),
        left,
    )


def _jacobian(
    logs: Callable[[Calibration], Vector], at: Calibration, names: Sequence[str], step: float
) -> Vector:
    """d ln(seconds) / d ln(constant), a row a point."""
    if not names:
        return np.zeros((len(logs(at)), 0))
    columns = []
    for name in names:
        value = max(getattr(at, name), SMALLEST_S)
        high = logs(replace(at, **{name: value * math.exp(step)}))
        low = logs(replace(at, **{name: value * math.exp(-step)}))
        columns.append((high - low) / (2 * step))
    return np.stack(columns, axis=1)


def _identifiable(
    effects: Vector, names: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Choose, one by one, the constant with the largest effect that those before cannot mimic.

    `effects`: relative change of each point by the prior's uncertainty of each candidate.
    """
    rest, chosen = effects.copy(), list[int]()
    while len(chosen) < min(effects.shape):
        size = np.abs(rest).max(axis=0)
        size[chosen] = 0.0
        best = int(np.argmax(np.linalg.norm(rest, axis=0) * (size >= LEAST_EFFECT)))
        if size[best] < LEAST_EFFECT:
            break
        chosen.append(best)
        unit = rest[:, best] / np.linalg.norm(rest[:, best])
        rest = rest - np.outer(unit, unit @ rest)
    alone = np.abs(effects).max(axis=0)
    left = {n: float(alone[i]) for i, n in enumerate(names) if i not in chosen}
    return tuple(names[i] for i in sorted(chosen)), left


def _minimise(
    residuals: Callable[[Calibration], Vector],
    start: Calibration,
    names: tuple[str, ...],
    slope_step: float,
    least_gain: float,
) -> Calibration:
    at, now = start, residuals(start)
    damping = 1e-3
    for _ in range(_ROUNDS):
        slope = _jacobian(residuals, at, names, slope_step)
        normal = slope.T @ slope
        step = np.linalg.solve(
            normal + damping * np.diag(np.diag(normal) + 1e-12), -(slope.T @ now)
        )
        tried = _moved(at, names, step.tolist())
        after = residuals(tried)
        if after @ after < now @ now:
            gained, before = float(now @ now - after @ after), float(now @ now)
            at, now, damping = tried, after, damping / 5
            if gained < max(1e-14, least_gain * before):
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return at


def _moved(at: Calibration, names: tuple[str, ...], step: list[float]) -> Calibration:
    """A step in log space, held to the bounds and to a factor of e at a time."""
    values = {}
    for name, by in zip(names, step, strict=True):
        allowed = CONSTANTS[name]
        value = max(getattr(at, name), SMALLEST_S) * math.exp(max(-1.0, min(1.0, by)))
        values[name] = min(allowed.high, max(allowed.low, SMALLEST_S, value))
    return replace(at, **values)


def _bounded(name: str, value: float) -> bool:
    allowed = CONSTANTS[name]
    return value >= allowed.high * 0.999 or value <= max(allowed.low, SMALLEST_S) * 1.001


def _errors(
    slope: Vector, residuals: Vector, names: tuple[str, ...], spare: int
) -> dict[str, float | None]:
    if spare <= 0 or not names:
        return dict.fromkeys(names)
    covariance = np.linalg.pinv(slope.T @ slope) * float(residuals @ residuals) / spare
    return {n: float(math.sqrt(max(0.0, covariance[i, i]))) for i, n in enumerate(names)}
