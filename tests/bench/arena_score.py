"""Score a policy on a workload, with a confidence interval for its difference to another.

All policies play the same requests, so a request has a number that means the same for all of them.
Intervals come from drawing blocks of consecutive requests (late ones come together), the same ones
for both policies of a ratio. A refused request has an infinite TTFT and misses its target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.replay.sim.fleet import SimOutcome
from forebay.traces.schema import TraceRequest

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
CHAT_MOST = 5_000  # prompt tokens of a chat
SLO_S = (2.0, 30.0)  # of a chat, of a document: TTFT beyond that on an idle, empty engine
RESAMPLES = 300


@dataclass(frozen=True, slots=True)
class Played:
    """One value a request, of one or more seeds one after the other.

    Attributes:
        ttft_s: inf where refused.
        stall_s: longest gap between two tokens; 0 where refused.
        backend: its number; -1 where refused.
        seed: which run it belongs to.
    """

    ttft_s: Floats
    stall_s: Floats
    prompt: Floats
    cached: Floats
    backend: Indices
    seed: Indices

    @property
    def chat(self) -> NDArray[np.bool_]:
        return self.prompt <= CHAT_MOST

    @property
    def good(self) -> NDArray[np.bool_]:
        """First token within the target."""
        return self.ttft_s <= limit_s(self.prompt)

    @property
    def refused(self) -> NDArray[np.bool_]:
        return self.backend < 0

    def hit_ratio(self) -> float:
        """Cached share of the prompt tokens of served requests."""
        served = ~self.refused
        return float(self.cached[served].sum() / max(1.0, self.prompt[served].sum()))

    def imbalance(self, engines: int = 2) -> float:
        """Prompt tokens of the busiest engine over the mean, averaged over seeds."""
        ratios = []
        for seed in np.unique(self.seed):
            here = (self.seed == seed) & ~self.refused
            sums = [self.prompt[here & (self.backend == b)].sum() for b in range(engines)]
            ratios.append(max(sums) / max(1.0, sum(sums) / engines))
        return float(np.mean(ratios))


def limit_s(prompt: Floats) -> Floats:
    """Target of the TTFT of prompts of so many tokens, seconds."""
    alone_s = 0.005 + 2.2e-5 * prompt + 0.5e-9 * prompt**2  # as `overload.work_s`
    return alone_s + np.where(prompt <= CHAT_MOST, *SLO_S)


def of_outcomes(outcomes: Sequence[SimOutcome], seed: int) -> Played:
    return Played(
        np.array([np.inf if o.ttft_s is None else o.ttft_s for o in outcomes]),
        np.array([o.stall_s for o in outcomes]),
        np.array([float(o.request.input_tokens) for o in outcomes]),
        np.array([float(o.cached_tokens) for o in outcomes]),
        np.array([int(o.backend[3:]) if o.served and o.backend else -1 for o in outcomes]),
        np.full(len(outcomes), seed),
    )


def of_floor(ttft_s: Floats, rows: Sequence[TraceRequest], seed: int) -> Played:
    """A result as if one engine served all; only `ttft_s` and the prompt sizes have a meaning."""
    nothing = np.zeros(len(rows))
    prompt = np.array([float(row.input_tokens) for row in rows])
    return Played(
        ttft_s, nothing, prompt, nothing, nothing.astype(int), np.full(len(rows), seed)
    )  # fmt: skip


def of_possible(counted: Floats, rows: Sequence[TraceRequest], seed: int) -> Played:
    """A result with as many requests in time as the bound counts in all, the surest ones."""
    served = np.argsort(-counted, kind="stable")[: int(counted.sum() + 1e-6)]
    ttft_s = np.full(len(rows), np.inf)
    ttft_s[served] = 0.0
    return of_floor(ttft_s, rows, seed)


def joined(played: Sequence[Played]) -> Played:
    names = Played.__slots__
    return Played(*(np.concatenate([getattr(p, name) for p in played]) for name in names))


def quantile(values: Floats, share: float) -> float:
    """Quantile by nearest rank; inf where too many were rejected, nan without requests."""
    if not len(values):
        return float("nan")
    rank = max(1, int(np.ceil(share * len(values) - 1e-9)))
    return float(np.partition(values, rank - 1)[rank - 1])


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one policy divided by another's, and the middle 95 % of its resamples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ttft_ratio(a: Played, b: Played, chat: bool | None, share: float) -> Ratio:
    """TTFT of `a` over that of `b` at a quantile; rejected requests count as infinite.

    Args:
        chat: of chats or of documents; None: of all.
    """
    chosen = np.arange(len(a.chat)) if chat is None else np.flatnonzero(a.chat == chat)
    first, second = a.ttft_s[chosen], b.ttft_s[chosen]

    def of(at: Indices) -> float:
        return divided(quantile(first[at], share), quantile(second[at], share))

    return _interval(of, len(chosen))


def goodput_ratio(a: Played, b: Played) -> Ratio:
    first, second = a.good, b.good

    def of(at: Indices) -> float:
        return divided(float(first[at].sum()), float(second[at].sum()))

    return _interval(of, len(first))


def divided(a: float, b: float) -> float:
    if a == b:
        return 1.0
    if b == 0.0 or np.isinf(a):
        return float("inf")
    return a / b


def _interval(of, count: int) -> Ratio:  # type: ignore[no-untyped-def]
    everyone = np.arange(count)
    if not count:
        return Ratio(float("nan"), float("nan"), float("nan"))
    dice = np.random.Generator(np.random.PCG64(20_240_229))
    block = max(1, round(count**0.5))
    within = np.arange(block)
    drawn = []
    for _ in range(RESAMPLES):
        starts = dice.integers(0, count, size=-(-count // block))
        drawn.append(of(((starts[:, None] + within) % count).ravel()[:count]))
    drawn.sort()
    low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
    return Ratio(of(everyone), low, high)
