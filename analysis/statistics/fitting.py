"""Non-negative least squares on relative errors."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

CURVE_STEPS = 60  # straight pieces of a drawn curve


def fit_terms(
    xs: Sequence[float], times_s: Sequence[float], powers: Sequence[int]
) -> tuple[list[float], float]:
    """Fit `times_s` by `sum c*x^power` with c >= 0. Return the coefficients and the worst error.

    Tries every subset of the terms, which finds the best fit without a negative coefficient.
    Errors are relative to the measured times.
    """
    x, t = np.asarray(xs, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    scale = float(x.max())
    table: NDArray[np.float64] = np.stack([(x / scale) ** power / t for power in powers], axis=1)
    best, least = [0.0] * len(powers), float("inf")
    for size in range(1, min(len(powers), len(x)) + 1):
        for chosen in combinations(range(len(powers)), size):
            part = table[:, chosen]
            coefficients, *_ = np.linalg.lstsq(part, np.ones(len(x)), rcond=None)
            missed = float(np.sum((part @ coefficients - 1) ** 2))
            if (coefficients >= 0).all() and missed < least:
                least, best = missed, [0.0] * len(powers)
                for place, value in zip(chosen, coefficients.tolist(), strict=True):
                    best[place] = value / scale ** powers[place]
    fitted = sum(c * x**power for c, power in zip(best, powers, strict=True))
    return best, float(np.max(np.abs(fitted / t - 1)))


def curve_points(
    measured: Sequence[tuple[float, float]], curve: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Points of a fitted curve to draw, evenly spaced on a logarithmic axis of the measured x."""
    low, high = measured[0][0], measured[-1][0]
    places = [low * (high / low) ** (step / CURVE_STEPS) for step in range(CURVE_STEPS + 1)]
    return [(x, curve(x)) for x in places]
