"""Fit the step-time constants to measured points: least squares on relative errors.

scipy solves it for the logarithm of the constants, so that no constant changes its sign and all
have equal weight. Only constants that the points can tell apart are fitted. A constant keeps the
prior's value if it moves no point, or moves the points as the chosen ones do.
This module does no I/O.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
SLOPE_STEP = 1e-4
"""Step of ln(constant) for a slope."""
LEAST_GAIN = 1e-15
"""Iterate to the last digit: a fit of points takes milliseconds."""
MOST_ROUNDS = 60
NO_TIME_S = 2 * SMALLEST_S
"""A fit comes near a bound and does not reach it, so this time counts as the lower bound 0."""
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


def fitted_count(count: int, hold_out: float) -> int:
    """Return the number of measurements to fit, of which a share is held out."""
    return 0 if hold_out == 1 else max(1, round(count * (1 - hold_out)))


def fit_times(
    predicted: Callable[[Calibration], Sequence[float]],
    measured_s: Sequence[float],
    prior: Calibration,
    *,
    candidates: Mapping[str, float] = CANDIDATES,
    slope_step: float = SLOPE_STEP,
    least_gain: float = LEAST_GAIN,
) -> Fit:
    """Fit constants so that `predicted` gives `measured_s`, as nearly as possible.

    A constant keeps the prior after all if its standard error is larger than itself, or if it
    would stop at its bound and the others do as well without. Without times, all keep it.

    Args:
        candidates: constants that may be fitted, with their uncertainty in ln.
        slope_step: step of ln(constant) for slopes, coarse where predictions are not smooth.
        least_gain: a round that lowers the sum of squares by less than this share is the last.
    """
    if not len(measured_s):
        return Fit(prior, (), {}, (), {}, 0.0)
    target = np.log(np.asarray(measured_s, dtype=np.float64))
    problem = _Problem(predicted, target, prior, slope_step, least_gain)
    # Fit only the constants that the points can tell apart, in units of their uncertainty.
    names, uncertainty = list(candidates), np.array(list(candidates.values()))
    effects = problem.slopes(problem.start(names), names) * uncertainty
    chosen, left = _identifiable(effects, names)
    # Drop the least certain constant and fit again, until each fitted constant is a value.
    while True:
        attempt = problem.fit(chosen, left)
        doubtful = attempt.at_bound or [
            name for name, error in attempt.relative_errors.items() if error and error > MOST_ERROR
        ]
        if not doubtful:
            return attempt
        worst = max(doubtful, key=lambda name: attempt.relative_errors[name] or 0.0)
        chosen = tuple(name for name in chosen if name != worst)
        left = left | {worst: float(np.abs(effects[:, names.index(worst)]).max())}
        if attempt.at_bound:
            without = problem.fit(chosen, left)
            if without.rms > max(SMALL_RMS, MOST_RMS_RATIO * attempt.rms):
                return attempt


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


@dataclass(frozen=True, slots=True)
class _Problem:
    """The least-squares problem of one set of measured times. `target` has their logarithms."""

    predicted: Callable[[Calibration], Sequence[float]]
    target: Vector
    prior: Calibration
    slope_step: float
    least_gain: float

    def start(self, names: Sequence[str]) -> Calibration:
        """Return the prior with the start of each constant of `names` that is 0."""
        zeros: dict[str, Any] = {
            name: STARTS[name] for name in names if name in STARTS and not getattr(self.prior, name)
        }
        return replace(self.prior, **zeros)

    def residuals(self, constants: Calibration) -> Vector:
        """Return ln(predicted / measured) of each time."""
        return np.log(np.asarray(self.predicted(constants), dtype=np.float64)) - self.target

    def slopes(self, constants: Calibration, names: Sequence[str]) -> Vector:
        """Return d ln(seconds) / d ln(constant), one row for each time."""
        step, columns = self.slope_step, []
        for name in names:
            value = max(getattr(constants, name), SMALLEST_S)
            high = self.residuals(replace(constants, **{name: value * math.exp(step)}))
            low = self.residuals(replace(constants, **{name: value * math.exp(-step)}))
            columns.append((high - low) / (2 * step))
        return np.stack(columns, axis=1)

    def fit(self, chosen: tuple[str, ...], left: dict[str, float]) -> Fit:
        """Fit the constants `chosen`. `left` are the candidates that keep the prior."""
        constants, errors = self.start(chosen), dict[str, float | None]()
        for names in dict.fromkeys((tuple(name for name in chosen if name != LAST), chosen)):
            if names:
                constants, errors = self._minimise(constants, names)
        at_bound = tuple(name for name in chosen if _bounded(name, getattr(constants, name)))
        rms = float(np.sqrt(np.mean(self.residuals(constants) ** 2)))
        return Fit(constants, chosen, errors, at_bound, left, rms)

    def _minimise(
        self, start: Calibration, names: tuple[str, ...]
    ) -> tuple[Calibration, dict[str, float | None]]:
        """Return the best constants, and the standard errors of `names`."""
        low, high = np.transpose([_bounds(name) for name in names])

        def constants(logs: Vector) -> Calibration:
            values = np.clip(np.exp(logs), low, high).tolist()
            return replace(start, **dict(zip(names, values, strict=True)))

        from scipy.optimize import least_squares  # of the extra `lab`

        solution = least_squares(
            lambda logs: self.residuals(constants(logs)),
            np.log(np.clip([getattr(start, name) for name in names], low, high)),
            jac=lambda logs: self.slopes(constants(logs), names),
            bounds=(np.log(low), np.log(high)),
            x_scale="jac",
            ftol=self.least_gain,
            xtol=1e-12,
            gtol=1e-12,
            max_nfev=MOST_ROUNDS,
        )
        return constants(solution.x), _errors(solution.jac, solution.fun, names)


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


def _bounds(name: str) -> tuple[float, float]:
    allowed = CONSTANTS[name]
    return max(allowed.low, SMALLEST_S), allowed.high


def _bounded(name: str, value: float) -> bool:
    low, high = _bounds(name)
    return value >= high * 0.999 or value <= max(low * 1.001, NO_TIME_S)


def _errors(slopes: Vector, residuals: Vector, names: tuple[str, ...]) -> dict[str, float | None]:
    """Return the standard errors as shares. None without a time to spare."""
    spare = len(residuals) - len(names)
    if spare <= 0:
        return dict.fromkeys(names)
    covariance = np.linalg.pinv(slopes.T @ slopes) * float(residuals @ residuals) / spare
    return {n: float(math.sqrt(max(0.0, covariance[i, i]))) for i, n in enumerate(names)}
