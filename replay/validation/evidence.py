"""Judge the evidence of a run: groups of its requests, and the constants that they cannot tell.

Requests that share an engine are chaotic: a little more time moves one to another step. The mean of
a group is not, so a fit compares groups of requests with prompts or loads that are alike.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forebay.replay.engine.calibration.fit import CANDIDATES, LEAST_EFFECT, Fit
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import ModelSpec
from forebay.replay.validation.measured import Timed

GROUPS = 40
"""Fewest groups of one kind of time, if there are as many requests."""
MOST_APART = 512
"""Tokens from the cache by which a simulated request may differ from the measured one."""
LEAST_ATTENTION = 0.1
"""Share of a prompt's FLOPs from which its time shows the speed of attention."""
BUSY = 8
"""Answers at once that show what one more answer costs in a step."""
Places = list[NDArray[np.int64]]


class Groups:
    """Requests in groups: of equally long prompts for TTFT, of equal load for the time per token.

    Attributes:
        size: requests in a group, 1 if they are few.
    """

    def __init__(self, measured: Sequence[Timed], count: int) -> None:
        """Group the first `count` of `measured`, the others load the engine only."""
        done = [place for place in range(count) if measured[place].finished]
        self.size = max(1, len(done) // GROUPS)
        load = _answers_at_once(measured)
        self._first = self._cut(done, [computed_tokens(timed) for timed in measured])
        self._later = self._cut([place for place in done if measured[place].tpot_s], load)

    def times(self, of: Sequence[Timed]) -> list[float]:
        """Return the mean TTFT of each group, then the mean time per token, in seconds."""
        first, later = (
            np.array([getattr(timed, name) or 0.0 for timed in of]) for name in ("ttft_s", "tpot_s")
        )
        return [float(first[places].mean()) for places in self._first] + [
            float(later[places].mean()) for places in self._later
        ]

    def _cut(self, places: list[int], key: Sequence[float]) -> Places:
        places = sorted(places, key=lambda place: key[place])
        return np.array_split(places, len(places) // self.size) if places else []


def comparable(measured: Sequence[Timed], predicted: Sequence[Timed]) -> tuple[Timed, ...]:
    """Leave requests out of the comparison whose made-up prompts hit other blocks than measured."""
    return tuple(
        replace(timed, finished=False)
        if timed.guessed
        and abs((timed.cached_tokens or 0) - (other.cached_tokens or 0)) > MOST_APART
        else timed
        for timed, other in zip(measured, predicted, strict=True)
    )


def computed_tokens(timed: Timed) -> int:
    """Return the prompt tokens that the engine had to compute."""
    return timed.row.input_tokens - (timed.cached_tokens or 0)


def _answers_at_once(measured: Sequence[Timed]) -> list[float]:
    """Return for each answer the mean number of answers that its backend generated meanwhile."""
    load = [0.0] * len(measured)
    by_backend = defaultdict[str, list[int]](list)
    for place, timed in enumerate(measured):
        by_backend[timed.backend].append(place)
    for places in by_backend.values():
        own = [measured[place] for place in places]
        spans = np.array([(t.sent_s + t.ttft_s, t.sent_s + t.e2e_s) for t in own])
        # Seconds of answers before each moment at which one begins or ends.
        times = np.concatenate([spans[:, 0], spans[:, 1]])
        order = np.argsort(times, kind="stable")
        running = np.cumsum(np.repeat([1, -1], len(places))[order])
        times = times[order]
        answered = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
        begun, ended = (np.interp(spans[:, side], times, answered) for side in (0, 1))
        for place, seconds, span in zip(places, ended - begun, spans, strict=True):
            load[place] = float(seconds) / max(1e-9, float(span[1] - span[0]))
    return load


def unknowable(measured: Sequence[Timed], config: EngineConfig) -> dict[str, str]:
    """Return the constants whose traffic does not occur, each with the traffic that it needs."""
    if not measured:
        return {}
    longest = max(computed_tokens(timed) for timed in measured)
    most = round(max(_answers_at_once(measured)))
    needed = attention_tokens(config.rank_spec)
    missing: dict[str, str] = {}
    if longest < needed:
        missing["prefill_compute"] = (
            f"needs documents, computed prompts of {needed:,} tokens: the longest has {longest:,}"
        )
    if most < BUSY:
        missing["sequence_s"] = f"needs {BUSY} answers at once: there were {most} at most"
    if config.asynchronous:
        why = "asynchronous scheduling hides the CPU's part of a step"
        missing |= {"step_s": why, "chunk_s": why}
    return missing


def attention_tokens(model: ModelSpec) -> int:
    """Return the length of a prompt whose attention is LEAST_ATTENTION of its FLOPs, in 100s."""
    weights = sum(
        group.layers * product.weights * product.chosen
        for group in model.layer_groups
        for product in group.products
    )
    pair = model.full_layers * model.pair_flops + model.near_layers * model.near_pair_flops
    tokens = LEAST_ATTENTION / (1 - LEAST_ATTENTION) * 2 * weights / (0.5 * max(1, pair))
    return max(100, round(tokens / 100) * 100)


def kept_reasons(fit: Fit, missing: dict[str, str]) -> dict[str, str]:
    """Return why each constant that could be fitted keeps its value."""
    reasons = dict(missing)
    for name, effect in fit.unresolved.items():
        reasons[name] = (
            f"no request shows it: its whole uncertainty moves none by {LEAST_EFFECT:.0%}"
            if effect < LEAST_EFFECT
            else "these requests cannot tell it from the fitted constants"
        )
    return {name: reasons[name] for name in CANDIDATES if name in reasons}
