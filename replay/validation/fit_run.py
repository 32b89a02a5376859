"""Fit the step-time constants to whole replays, also to requests that were served together.

The trace is played through the engine in virtual time with the arrivals of the run, so queueing,
batching and prefix hits are the simulator's. The fit chooses the constants whose first-token times
and times per token come nearest to the measured ones. Requests that were served together show the
cost of one more sequence in a step, which requests that were alone cannot show.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import inf

import numpy as np
from numpy.typing import NDArray

from forebay.replay.engine.calibration.fit import (
    CANDIDATES,
    Fit,
    fit_times,
    fitted_count,
    refusal,
)
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import Calibration, CalibrationFile
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import ServedEngine, served_engine
from forebay.replay.validation.evidence import Groups, comparable, kept_reasons, unknowable
from forebay.replay.validation.measured import Timed
from forebay.replay.validation.prompt_hashes import PromptHashes

SLOPE_STEP, GROUPS_STEP = 0.02, 0.08
"""Step of ln(constant) for slopes of single requests and of groups: coarse, because predictions
jump a little when a request moves to another step."""
LEAST_GAIN, GROUPS_GAIN = 1e-3, 0.02
"""Share of the squares by which a round must lower them, of single requests and of groups."""
QUANTILES = (0.5, 0.9, 0.99)
RESAMPLES = 300
MOST_MISSED = 1 / 3
"""A figure of the fitted requests themselves that is further off is reported."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunFit:
    """A finished fit. `measured` and `predicted` list the same requests in the same order.

    Attributes:
        fitted, held_out: the errors of the fitted and of the held-out requests. Either may be ().
        reasons: why constants that could be fitted keep the prior, by name.
    """

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    measured: tuple[Timed, ...]
    predicted: tuple[Timed, ...]
    fitted: tuple["FitLine", ...]
    held_out: tuple["FitLine", ...]
    reasons: dict[str, str]

    def refusal(self) -> str | None:
        """Return why the fit is no physics, or None: the server was faster than the GPU can be."""
        if (text := refusal(self.fit)) is not None or not self.fitted:
            return text
        longest = max(self.fitted, key=lambda line: line.error)
        return _missed(longest) if longest.error > MOST_MISSED else None

    def warnings(self) -> list[str]:
        """Return the times that the server exceeds by far, or []: it did other work as well."""
        shortest = min(self.fitted, key=lambda line: line.error, default=None)
        return [_missed(shortest)] if shortest and shortest.error < -MOST_MISSED else []

    def furthest(self) -> tuple[str, float]:
        """Return the held-out figure (else any) that is furthest off, and its relative error."""
        worst = _worst(self.held_out or self.fitted)
        return worst.name, worst.error


def _worst(lines: Sequence["FitLine"]) -> "FitLine":
    return max(lines, key=lambda line: abs(line.error))


def _missed(line: "FitLine") -> str:
    return (
        f"{line.name} of the fitted requests themselves is off by {line.error:+.0%}; "
        "give the flags of the measured server, its model and its GPU"
    )


def predict(
    measured: Sequence[Timed], config: EngineConfig, constants: Calibration | None = None
) -> tuple[Timed, ...]:
    """Predict the times of `measured` from their arrivals and sizes alone.

    Args:
        constants: used instead of the constants in `config`.
    """
    if constants is not None:
        config = replace(config, calibration=constants)
    # Requests of the same sizes and prefixes, at the measured times.
    hashed = PromptHashes([timed.row for timed in measured], config.kv_budget.layout.block_size)
    requests = [
        SimRequest(
            timed.row.id,
            timed.row.input_tokens,
            timed.row.output_tokens,
            tuple(hashed.of(timed.row) or ()),
            config.block_size,
        )
        for timed in measured
    ]
    sent = sorted(zip(measured, requests, strict=True), key=_sent_s)
    for backend in dict.fromkeys(timed.backend for timed in measured):
        _play(served_engine(config), [pair for pair in sent if pair[0].backend == backend])
    # The predicted times, in the form of measured ones.
    return tuple(
        replace(
            timed,
            ttft_s=done.first_token_s - timed.sent_s,
            e2e_s=done.finished_s - timed.sent_s,
            tpot_s=(done.finished_s - done.first_token_s) / (done.output_target - 1)
            if timed.tpot_s
            else None,
            cached_tokens=done.cached_tokens,
        )
        for timed, done in zip(measured, requests, strict=True)
    )


def _sent_s(pair: tuple[Timed, SimRequest]) -> float:
    return pair[0].sent_s


def _play(engine: ServedEngine, sent: Sequence[tuple[Timed, SimRequest]]) -> None:
    """Send the requests at their times, which rise, and wait for all answers."""
    for timed, request in sent:
        while (due := engine.next_at()) < timed.sent_s:
            engine.advance(due)
        engine.send(request, timed.sent_s)
    while (due := engine.next_at()) < inf:
        engine.advance(due)


def fit_run(
    measured: Sequence[Timed],
    config: EngineConfig,
    prior: Calibration,
    *,
    used: str,
    today: date,
    hold_out: float = 0.0,
) -> RunFit:
    """Fit constants so that an engine with `config` serves `measured` in the measured times.

    Args:
        hold_out: share of the requests, the last ones, that load the engine and are not fitted.
    """
    # The last requests load the engine, but their times do not move the constants.
    first = fitted_count(len(measured), hold_out)
    if any(timed.guessed for timed in measured):
        measured = comparable(measured, predict(measured, config, prior))
    groups = Groups(measured, first)
    missing = unknowable(measured[:first], config)
    result = fit_times(
        lambda constants: groups.times(predict(measured, config, constants)),
        groups.times(measured),
        prior,
        candidates={name: ln for name, ln in CANDIDATES.items() if name not in missing},
        slope_step=SLOPE_STEP if groups.size == 1 else GROUPS_STEP,
        least_gain=LEAST_GAIN if groups.size == 1 else GROUPS_GAIN,
    )
    # Judge the fit by the requests that it has not seen, if there are any.
    predicted = predict(measured, config, result.constants)
    fitted = compared(measured[:first], predicted[:first])
    held_out = compared(measured[first:], predicted[first:])
    file = CalibrationFile(
        config.model_spec.name,
        config.gpu_spec.name,
        today.isoformat(),
        used,
        _checked(held_out),
        result.constants,
        result.fitted,
        tuple(asdict(line) for line in held_out or fitted),
    )
    reasons = kept_reasons(result, missing) if first else {}
    return RunFit(file, result, prior, tuple(measured), predicted, fitted, held_out, reasons)


def _checked(held_out: Sequence["FitLine"]) -> str:
    if not held_out:
        return "not checked: every request was fitted; --hold-out 0.3 keeps some to judge it"
    worst = _worst(held_out)
    return f"{worst.requests} held-out requests: at most {worst.error:+.1%}, at {worst.name}"


@dataclass(frozen=True, slots=True)
class FitLine:
    """One measure's mean (`quantile` None) or quantile, in seconds.

    Attributes:
        error: relative error of the model.
        low, high: 95 % interval of `error`, by resampling stretches of consecutive requests.
    """

    measure: str
    quantile: float | None
    requests: int
    measured_s: float
    model_s: float
    error: float
    low: float
    high: float

    @property
    def name(self) -> str:
        share = "mean" if self.quantile is None else f"p{self.quantile * 100:g}"
        return f"{self.measure} {share}"


def compared(measured: Sequence[Timed], predicted: Sequence[Timed]) -> tuple[FitLine, ...]:
    """Compare mean and quantiles (nearest rank) of measured and predicted TTFT, TPOT and E2E."""
    return tuple(
        line
        for name in ("ttft", "tpot", "e2e")
        if len(times := _times(measured, predicted, name))
        for line in _lines(name, times)
    )


def _times(measured: Sequence[Timed], predicted: Sequence[Timed], name: str) -> Floats:
    """Return measured and predicted times, one row for each request with both."""
    pairs = [
        (mine, models)
        for timed, other in zip(measured, predicted, strict=True)
        if timed.finished
        and (mine := getattr(timed, f"{name}_s"))
        and (models := getattr(other, f"{name}_s"))
    ]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _lines(name: str, times: Floats) -> Iterator[FitLine]:
    drawn = np.array([_figures(times[rows]) for rows in _resamples(len(times))])
    lows, highs = np.quantile(drawn[..., 1] / drawn[..., 0], (0.025, 0.975), axis=0) - 1
    figures = zip((None, *QUANTILES), _figures(times), lows, highs, strict=True)
    for quantile, (mine, models), low, high in figures:
        yield FitLine(
            name, quantile, len(times), float(mine), float(models), float(models / mine) - 1,
            float(low), float(high),
        )  # fmt: skip


def _figures(times: Floats) -> Floats:
    """Return the mean and each quantile (nearest rank): measured and predicted."""
    ranks = np.quantile(times, QUANTILES, axis=0, method="inverted_cdf")
    return np.vstack([times.mean(axis=0), ranks])


def _resamples(count: int) -> Iterator[NDArray[np.int64]]:
    """Draw samples of requests, in stretches: requests that wait for each other err together."""
    length = max(1, round(count ** (1 / 3)))
    drawing = np.random.default_rng(0)  # equal input gives equal output
    within = np.arange(length)
    for _ in range(RESAMPLES):
        starts = drawing.integers(0, count, -(-count // length))
        yield ((starts[:, None] + within) % count).ravel()[:count]


def hit_ratio(of: Sequence[Timed]) -> float | None:
    """Return the share of prompt tokens that were cached, None if it was not measured."""
    done = [(timed.cached_tokens, timed.row.input_tokens) for timed in of if timed.finished]
    if any(cached is None for cached, _ in done):
        return None
    return sum(cached or 0 for cached, _ in done) / sum(tokens for _, tokens in done)
