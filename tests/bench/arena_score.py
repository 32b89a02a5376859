"""Score a policy on a workload. A rejected request has an infinite TTFT and misses its target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.replay.sim.fleet import SimOutcome
from forebay.traces.ground.schema import TraceRequest

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
CHAT_MOST = 5_000  # prompt tokens of a chat
SLO_S = (2.0, 30.0)  # of a chat, of a document: TTFT beyond that on an idle, empty engine


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


def of_possible(counted: Floats, rows: Sequence[TraceRequest], seed: int) -> Played:
    """A result with as many requests in time as the bound counts in all, the surest ones."""
    served = np.argsort(-counted, kind="stable")[: int(counted.sum() + 1e-6)]
    ttft_s = np.full(len(rows), np.inf)
    ttft_s[served] = 0.0
    nothing = np.zeros(len(rows))
    prompt = np.array([float(row.input_tokens) for row in rows])
    return Played(
        ttft_s, nothing, prompt, nothing, nothing.astype(int), np.full(len(rows), seed)
    )  # fmt: skip


def joined(played: Sequence[Played]) -> Played:
    names = Played.__slots__
    return Played(*(np.concatenate([getattr(p, name) for p in played]) for name in names))


def quantile(values: Floats, share: float) -> float:
    """Quantile by nearest rank; inf where too many were rejected, nan without requests."""
    if not len(values):
        return float("nan")
    rank = max(1, int(np.ceil(share * len(values) - 1e-9)))
    return float(np.partition(values, rank - 1)[rank - 1])
