"""Which backend? A route picks an option. Each backend that is worth a look has an option.

A route is a pure function. Plug-ins and files add others (`proxy/config/routes.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.proxy.core.learn.cost import UNPROVEN
from forebay.proxy.core.model import SLACK, Request

NO_WAIT_S: Final = 0.1
"""A backend with a shorter wait is free. Over eight kinds of traffic E2E is 9 % longer at 0, and
documents' p99 10 % longer without a limit."""
DISTURBS: Final = 0.1
"""A prefill delays each answer decoded in its steps, and this share of each delay counts. Over
twelve kinds of traffic, doubled: E2E 2 % shorter, documents' p99 3 % longer."""
TRIALS: Final = 0.01
"""Share of the busiest backend's recent tokens. A backend with less is tried as if it were fast.
Doubled: twice as many chats meet a slow one."""
TRIAL_S: Final = 1.0
"""A request whose prefill takes longer, as far as is known, tries nothing. Doubled: so does one of
two seconds."""


class Option:
    """The forecast for one request on one backend.

    Attributes:
        wait_s: predicted wait before its prefill begins.
        margin_s: how much longer that wait may be; nine in ten errors are smaller.
        prefill_s: predicted prefill with the cached prefix subtracted.
        cold_prefill_s: the same without a cached prefix; on the fastest backend if not `proven`.
        matched_tokens: prompt tokens that the backend probably holds.
        load: prompt tokens of recent requests, a decayed sum; a cached token counts once.
        requests: number of requests that run there or wait for it. Where the engine has an order of
            its own, only running requests.
        decode_s: seconds by which the contexts that are decoded there make its answer longer.
        wanted: another request waits there for the matched prefix, or computes it.
        step_s: the part of a prefill's seconds that any step takes.
        kv_tokens: KV cache that its prompt would take there, without prefixes that are in use; 0
            while at most half of the cache is used.
        kv_used: share of the KV cache there that running and waiting requests take.
        sent_s: the part of the wait, with its margin, for prefills that the engine was sent
            before; 0 where it chunks them, and behind a queue that stands.
        proven: it has computed two prompts of at least half this size, so its predictions are
            more than an extrapolation from chats.
    """

    def __init__(
        self,
        backend: str,
        wait_s: float,
        margin_s: float,
        prefill_s: float,
        cold_prefill_s: float,
        matched_tokens: int,
        load: float,
        proven: bool = True,
        requests: int = 0,
        wanted: bool = False,
        decode_s: float = 0.0,
        step_s: float = 0.0,
        sent_s: float = 0.0,
        kv_tokens: float = 0.0,
        kv_used: float = 0.0,
    ) -> None:
        self.backend = backend
        self.wait_s = wait_s
        self.margin_s = margin_s
        self.prefill_s = prefill_s
        self.cold_prefill_s = cold_prefill_s
        self.matched_tokens = matched_tokens
        self.load = load
        self.proven = proven
        self.requests = requests
        self.wanted = wanted
        self.decode_s = decode_s
        self.step_s = step_s
        self.sent_s = sent_s
        self.kv_tokens = kv_tokens
        self.kv_used = kv_used

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s

    def assume_fast(self, cold_prefill_s: float) -> None:
        """Take the backend to need this long without a cached prefix, and be as fast with one."""
        self.prefill_s *= cold_prefill_s / self.cold_prefill_s
        self.cold_prefill_s = cold_prefill_s


def try_rarely_used(options: list[Option]) -> None:
    """Take a backend that gets next to nothing to be as fast as the fastest, for a short prompt.

    It was slow, and nothing else can change that belief.
    """
    rarely = TRIALS * max([o.load for o in options], default=0.0)
    tried = [o for o in options if o.load < rarely and o.proven and o.cold_prefill_s < TRIAL_S]
    if tried:
        least_s = min([o.cold_prefill_s for o in options])
        for option in tried:
            option.assume_fast(least_s)


@dataclass(frozen=True, slots=True)
class Affinity:
    """How much a cached prefix is worth.

    Attributes:
        min_match: a match below this share of the prompt does not count. Every prompt shares a
            system prompt with every other, and naive affinity sends all of them to one backend.
    """

    min_match: float = 0.25


Route = Callable[[Request, Sequence[Option], Affinity, float], Option]
"""The last argument is the time, in seconds."""


def warm_or_least_work(
    request: Request, options: Sequence[Option], affinity: Affinity, now: float
) -> Option:
    """Pick the earliest first token. A cached prefix shortens the prefill.

    A prefill counts twice if its prompt is cached somewhere and no other request wants that prefix
    now: a copy elsewhere would serve this request only, and the next request there waits for it. It
    counts for more where many requests run, as it delays all of them. Its step counts once: there,
    answers are decoded anyway. While a backend is free, a shared prefix is copied so that answers
    are decoded in batches of less context. That only tells free backends apart: little context is
    no reason to wait for a busy backend.

    Of equally good backends, the prompt goes to a backend that decodes little context if it is
    cached somewhere.
    Other ties (all cold, all idle) go to the backend with the fewest tokens in use, then to the
    lower score, then to the first, so that a run can be repeated.
    """
    # Where its prompt is cached, and who else wants that.
    enough = affinity.min_match * request.prompt_tokens
    cheapest = min([o.cold_prefill_s for o in options])
    warmest = warmest_of(options)
    warm = warmest.matched_tokens >= enough > 0
    alone = warm and not warmest.wanted
    # Where everything waits, a copy to decode elsewhere would cost more than it saves.
    spreads = not alone and min([o.wait_s for o in options]) < NO_WAIT_S
    # The cost of its prefill at each backend, for itself and for the requests that run there.
    scores: list[float] = []
    twice = float(alone)
    for option, delay_s in zip(options, _delays_s(options, spreads), strict=True):
        prefill_s = option.cold_prefill_s
        if prefill_s <= (1.0 + UNPROVEN) * cheapest:
            prefill_s = cheapest  # else a backend that seems a little faster would get everything
        if option.matched_tokens >= enough:
            prefill_s = option.prefill_s
        weight = twice + DISTURBS * option.requests
        costs_s = prefill_s
        if weight and prefill_s > option.step_s:
            costs_s += weight * (prefill_s - option.step_s)
        scores.append(option.wait_s + costs_s + delay_s)
    # The first of the best backends and of nearly as good ones.
    least = min(scores) + SLACK * cheapest
    reads = 1.0 if warm and not spreads else 0.0  # else the scores have it
    near = [
        (reads * options[at].decode_s, options[at].load, score, at)
        for at, score in enumerate(scores)
        if score <= least
    ]
    return options[min(near)[-1]]


def _delays_s(options: Sequence[Option], spreads: bool) -> list[float]:
    """Return the seconds by which decoding delays its answer at each option, 0 unless it `spreads`.

    A busy backend has the longest of them.
    """
    if not spreads:
        return [0.0] * len(options)
    longest_s = max([option.decode_s for option in options])
    return [o.decode_s if o.wait_s < NO_WAIT_S else longest_s for o in options]


def warmest_of(options: Sequence[Option]) -> Option:
    """Return the first option with the longest cached prefix."""
    warmest = options[0]
    for option in options:
        if option.matched_tokens > warmest.matched_tokens:
            warmest = option
    return warmest


def least_work(
    request: Request, options: Sequence[Option], affinity: Affinity, now: float
) -> Option:
    """Pick the shortest predicted wait. Cached prefixes do not count."""
    return min(options, key=lambda o: (o.wait_s, o.load))


def fewest_tokens(
    request: Request, options: Sequence[Option], affinity: Affinity, now: float
) -> Option:
    """Pick the backend that was recently sent the fewest tokens."""
    return min(options, key=lambda o: o.load)


def least_connections(
    request: Request, options: Sequence[Option], affinity: Affinity, now: float
) -> Option:
    """Pick the backend with the fewest requests, as many load balancers do."""
    return min(options, key=lambda o: (o.requests, o.load))


ROUTES: dict[str, Route] = {
    "warm_or_least_work": warm_or_least_work,
    "least_work": least_work,
    "fewest_tokens": fewest_tokens,
    "least_connections": least_connections,
}
"""Routes by their name in the configuration (`routing: NAME`)."""
