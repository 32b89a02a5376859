"""Which backend a request is meant for.

A route is a pure function from the options (one per backend that is up; of a large fleet those
worth a look, see `candidates.py`) to one of them. To try another policy write one such function,
name it in `policies.py`, and simulate it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.proxy.core.model import Request


class Option:
    """What sending a request to one backend would mean.

    Attributes:
        wait_s: predicted wait before its prefill begins.
        margin_s: how much longer that wait may be, nine times in ten.
        prefill_s: predicted prefill, with what is matched taken off.
        cold_prefill_s: the same if nothing were cached; as on the fastest if it is not proven.
        matched_tokens: prompt tokens the backend probably holds.
        load: prompt tokens it was sent lately (Backend.load).
        mean_load: the same of all backends that are up, on average.
        proven: whether it has computed two prompts of at least half this size, so that its
            prefill is more than an extrapolation from chats.
    """

    __slots__ = (
        "backend",
        "cold_prefill_s",
        "load",
        "margin_s",
        "matched_tokens",
        "mean_load",
        "prefill_s",
        "proven",
        "wait_s",
    )

    def __init__(
        self,
        backend: str,
        wait_s: float,
        margin_s: float,
        prefill_s: float,
        cold_prefill_s: float,
        matched_tokens: int,
        load: float,
        mean_load: float,
        proven: bool = True,
    ) -> None:
        self.backend = backend
        self.wait_s = wait_s
        self.margin_s = margin_s
        self.prefill_s = prefill_s
        self.cold_prefill_s = cold_prefill_s
        self.matched_tokens = matched_tokens
        self.load = load
        self.mean_load = mean_load
        self.proven = proven

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Affinity:
    """How much a cached prefix is worth.

    Attributes:
        min_match: a match below this share of the prompt is no reason to prefer a backend; every
            prompt shares an instruction or a system prompt with every other (naive affinity
            collapses on it: all to one backend).
        max_imbalance: a backend sent more than this times the mean load is preferred to no one.
    """

    min_match: float = 0.25
    max_imbalance: float = 1.25


Route = Callable[[Request, Sequence[Option], Affinity], Option]

WORK_WEIGHT: Final = 2.0
"""A second of prefill delays this request and about one more behind it; a second of wait only
this one. With 1, a busy warm backend is left too early and the work is done twice; with 4, a hot
document stays on one engine too long (57 % of it) for the little that others gain."""

UNFAIR_SHARE: Final = 0.1
"""Of a cold prefill: what it is worth to leave a warm backend that was sent more than its share for
another that is warm too, or will be. While that one still computes its copy it is not worth the
wait; without any copy the whole is, so that there will be one."""

EQUAL_SPEED: Final = 1.25
"""Engines whose predictions differ by less count as equally fast: else the one that is thought a
little faster would get all that comes to idle engines."""
TIE_SHARE: Final = 0.05  # of a cold prefill: scores no further apart are equal


def warm_or_least_work(request: Request, options: Sequence[Option], affinity: Affinity) -> Option:
    """The earliest first token, where prefill counts double and cached prefixes save it.

    What is nearly equal (all cold, all idle) goes to the backend that was sent the fewest tokens,
    then to the first, so that a run can be repeated.
    """
    enough = affinity.min_match * request.prompt_tokens
    # Slack for lumps: a few long prompts on one backend are no imbalance yet.
    fair = affinity.max_imbalance * options[0].mean_load + 2.0 * request.prompt_tokens
    copied = any(o.matched_tokens >= enough and o.load <= fair for o in options)
    cheapest = min(o.cold_prefill_s for o in options)
    scores: list[float] = []
    for option in options:
        prefill_s = option.cold_prefill_s
        if prefill_s <= EQUAL_SPEED * cheapest:
            prefill_s = cheapest
        if option.matched_tokens >= enough:
            if option.load <= fair:
                prefill_s = option.prefill_s
            elif copied:
                prefill_s = option.prefill_s + UNFAIR_SHARE * (prefill_s - option.prefill_s)
        scores.append(option.wait_s + WORK_WEIGHT * prefill_s)
    least = min(scores) + TIE_SHARE * cheapest
    near = [place for place in zip(options, scores, strict=True) if place[1] <= least]
    return min(near, key=lambda place: (place[0].load, place[1]))[0]


def least_work(request: Request, options: Sequence[Option], affinity: Affinity) -> Option:
    """The shortest predicted wait, cached prefixes ignored."""
    return min(options, key=lambda o: (o.wait_s, o.load))


def fewest_tokens(request: Request, options: Sequence[Option], affinity: Affinity) -> Option:
    """By turns, in tokens: the backend that was sent the fewest lately."""
    return min(options, key=lambda o: o.load)
