"""Fit the step-time constants to measured points: least squares on relative errors.

The method is damped Gauss-Newton in the logarithm of the constants, so that no constant changes its
sign and all have equal weight. Only constants that the points can tell apart are fitted. A constant
keeps the prior's value if it moves no point, or moves the points as the chosen ones do.
This module does no I/O.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.replay.engine.calibration.workloads import PointSteps, predicted_s
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_constants import CONSTANTS, Calibration

CANDIDATES = {
    "gemm_compute": 0.2,
    "prefill_compute": 0.2,
    "step_s": 1.0,
    "request_s": 1.0,
    "tokenize_token_s": 1.0,
    "decode_bandwidth": 0.3,
    "gemm_bandwidth": 0.05,
    "sequence_s": 0.7,
    "chunk_s": 3.0,
}
"""Constants that served requests can reveal, with the uncertainty (in ln) that kernel tables leave.
Software overheads differ several-fold between versions, the bandwidth of a weight read by a few
percent. The other constants act through these and need kernel measurements."""
LAST = "tokenize_token_s"
"""Fitted after the others have been: like `gemm_compute` it is time for each token, and from a far
start the fit of both at once ends in a local minimum."""
STARTS = {"chunk_s": 3e-4}
"""Where the fit of a constant begins whose prior is 0: a slope needs a value."""
LEAST_EFFECT = 0.01
"""A constant is fitted if its uncertainty changes some point by at least this share, after the
constants that were chosen before it."""
MOST_ERROR = 1.0
"""Largest standard error, as a share of the value, of a constant that counts as fitted."""
SMALL_RMS, MOST_RMS_RATIO = 0.03, 1.2
"""Errors that a fit without a constant at its bound may leave: small ones, or hardly larger."""
SMALLEST_S = 1e-8
_STEP = 1e-4  # step of ln(constant) for a slope
_LEAST_GAIN = 0.0  # iterate to the last digit: such a fit takes milliseconds
_ROUNDS = 60
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants.

    Attributes:
        fitted: names of the fitted constants. The others are the prior's.
        relative_errors: standard error of each fitted constant as a share of its value. None when
            there are no more points than constants.
        at_bound: fitted constants that stopped at a physical bound: something else is wrong.
        unresolved: candidates that keep the prior, with the largest relative change of any point
            by their uncertainty. Too small a change, or a fitted constant has the same effect.
        rms: root mean square of the errors that are left, in ln.
    """

    constants: Calibration
    fitted: tuple[str, ...]
    relative_errors: dict[str, float | None]
    at_bound: tuple[str, ...]
    unresolved: dict[str, float]
    rms: float


def fit(
    works: Sequence[PointSteps],
    measured_s: Sequence[float],
    model: ModelSpec,
    gpu: GpuSpec,
    prior: Calibration,
) -> Fit:
    """Fit constants so that `works` take `measured_s`, as nearly as possible."""

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
    """Fit constants so that `predicted` gives `measured_s`, as nearly as possible.

    A constant keeps the prior after all if its standard error is larger than itself, or if it
    would stop at its bound and the others do as well without.

    Args:
        candidates: constants that may be fitted, with their uncertainty (in ln).
        step: step of ln(constant) for slopes, coarse where predictions are not smooth.
        least_gain: a round that lowers the sum of squares by less than this share is the last.
    """
    target = np.log(np.asarray(measured_s, dtype=np.float64))

    def logs(constants: Calibration) -> Vector:
        return np.log(np.asarray(predicted(constants), dtype=np.float64))

    # Fit only the constants that the points can tell apart, in units of their uncertainty.
    names, uncertainty = list(candidates), np.array(list(candidates.values()))
    effects = _jacobian(logs, _started(prior, names), names, step) * uncertainty
    chosen, left = _identifiable(effects, names)

    def fit_of(chosen: tuple[str, ...], left: dict[str, float]) -> Fit:
        return _fit_of(chosen, left, prior, lambda c: logs(c) - target, step, least_gain)

    # Drop the least certain constant and fit again, until each fitted constant is a value.
    while True:
        attempt = fit_of(chosen, left)
        doubtful = attempt.at_bound or [
            name for name, error in attempt.relative_errors.items() if error and error > MOST_ERROR
        ]
        if not doubtful:
            return attempt
        worst = max(doubtful, key=lambda name: attempt.relative_errors[name] or 0.0)
        chosen = tuple(name for name in chosen if name != worst)
        without = left | {worst: float(np.abs(effects[:, names.index(worst)]).max())}
        if attempt.at_bound:
            tried = fit_of(chosen, without)
            if tried.rms > max(SMALL_RMS, MOST_RMS_RATIO * attempt.rms):
                return attempt
        left = without


def refusal(fit: Fit) -> str | None:
    """Return why the constants are no physics, or None: a constant stopped at its bound."""
    for name in fit.at_bound:
        allowed, value = CONSTANTS[name], getattr(fit.constants, name)
        error = fit.relative_errors[name]
        unsure = error is not None and error > MOST_ERROR  # it may as well be a little above zero
        high = value >= allowed.high * 0.999
        if allowed.unit == "share" and high:
            why = "would exceed the GPU's peak: cached prompts, or another GPU or precision?"
        elif allowed.unit != "share" and not high and not unsure:
            why = "would be negative: the measured server is faster than the model without it"
        else:
            continue  # a slow server is possible
        return f"{name} {why}; check --model, --gpu and the flags of the measured server"
    return None


def _fit_of(
    chosen: tuple[str, ...],
    left: dict[str, float],
    prior: Calibration,
    residuals_of: Callable[[Calibration], Vector],
    step: float,
    least_gain: float,
) -> Fit:
    constants = _started(prior, chosen)
    for names_now in dict.fromkeys((tuple(name for name in chosen if name != LAST), chosen)):
        if names_now:
            constants = _minimise(residuals_of, constants, names_now, step, least_gain)
    residuals = residuals_of(constants)
    spare = len(residuals) - len(chosen)
    return Fit(
        constants,
        chosen,
        _errors(_jacobian(residuals_of, constants, chosen, step), residuals, chosen, spare),
        tuple(name for name in chosen if _bounded(name, getattr(constants, name))),
        left,
        float(np.sqrt(np.mean(residuals**2))),
    )


def _started(prior: Calibration, names: Sequence[str]) -> Calibration:
    """Return `prior` with the start of each constant of `names` that is 0."""
    zeros: dict[str, Any] = {
        name: STARTS[name] for name in names if name in STARTS and not getattr(prior, name)
    }
    return replace(prior, **zeros)


def _jacobian(
    logs: Callable[[Calibration], Vector], at: Calibration, names: Sequence[str], step: float
) -> Vector:
    """Return d ln(seconds) / d ln(constant), one row for each point."""
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
    """Choose constants step by step: the largest effect that earlier choices cannot mimic.

    Args:
        effects: relative change of each point by the prior's uncertainty of each candidate.

    Returns:
        The chosen names, and the others with their largest effect on any point.
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
    slope = _jacobian(residuals, at, names, slope_step)
    for _ in range(_ROUNDS):
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
            slope = _jacobian(residuals, at, names, slope_step)
        else:
            damping *= 5
            if damping > 1e9:
                break
    return at


def _moved(at: Calibration, names: tuple[str, ...], step: list[float]) -> Calibration:
    """Move the constants in log space, within their bounds and by at most a factor of e."""
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
