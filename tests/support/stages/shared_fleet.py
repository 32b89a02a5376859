"""Several shapers in front of the same simulated engines, in virtual time.

Each publishes its books every 0.1 s, as real proxies do through the wire's encoding. Arrivals are
spread over them by dice, as SO_REUSEPORT spreads connections.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, cast

from forebay.proxy.core.model import Action, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.share.exchange import PERIOD_S
from forebay.proxy.share.wire import Message, decode, encode
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.traces.ground.schema import TraceRequest


@dataclass
class Several:
    """A policy of the simulator made of several shapers. `exchange` False keeps them strangers."""

    shapers: Sequence[Shaper]
    limits: dict[str, int]
    seed: int = 0
    exchange: bool = True
    pinned: Mapping[str, int] = field(default_factory=dict)  # tenants that use one proxy only
    messages: int = 0
    message_bytes: int = 0
    overshoot: int = 0  # largest number in flight beyond a backend's limit
    unexplained: int = 0  # of it, beyond what was sent there in the last 0.1 s
    _home: dict[str, int] = field(default_factory=dict)
    _running: dict[str, str] = field(default_factory=dict)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _sent: deque[tuple[float, str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._dice = Random(self.seed)
        count = len(self.shapers)
        self._due = [PERIOD_S * (i + 1) / count for i in range(count)]
        self._busy_until = 0.0

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        return [a for shaper in self.shapers for a in shaper.backend_up(name, now, kv_tokens)]

    def arrive(self, request: Request, now: float) -> list[Action]:
        home = self.pinned.get(request.tenant)
        if home is None:
            home = self._dice.randrange(len(self.shapers))
        self._home[request.id] = home
        return self._note(self.shapers[home].arrive(request, now), now)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        return self._note(self.shapers[self._home[request_id]].first_token(request_id, now), now)

    @property
    def wants_usage(self) -> bool:
        return any(shaper.wants_usage for shaper in self.shapers)

    def used(
        self, request_id: str, output_tokens: int, now: float, cached_tokens: int | None = None
    ) -> None:
        shaper = self.shapers[self._home[request_id]]
        shaper.used(request_id, output_tokens, now, cached_tokens)

    def finish(self, request_id: str, now: float) -> list[Action]:
        self._in_flight[self._running.pop(request_id)] -= 1
        return self._note(self.shapers[self._home[request_id]].finish(request_id, now), now)

    def wake_at(self) -> float:
        at = min(shaper.wake_at() for shaper in self.shapers)
        news = min(self._due) if self.exchange and (self._running or at < inf) else inf
        return min(at, news)

    def wake(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for index, shaper in enumerate(self.shapers):
            if self.exchange and self._due[index] <= now:
                self._due[index] = max(self._due[index] + PERIOD_S, now + PERIOD_S / 2)
                actions += self._publish(index, now)
            if shaper.wake_at() <= now:
                actions += self._note(shaper.wake(now), now)
        return actions

    def _publish(self, index: int, now: float) -> list[Action]:
        books = self.shapers[index].peering.report(now)
        data = encode(Message(str(index), self.messages, books))
        self.messages += 1
        self.message_bytes += len(data)
        heard = decode(data)
        actions: list[Action] = []
        for other, shaper in enumerate(self.shapers):
            if other != index:
                actions += self._note(shaper.peering.reported(heard.sender, heard.report, now), now)
                actions += self._note(shaper.peering.forget_silent(now), now)
        return actions

    def _note(self, actions: list[Action], now: float) -> list[Action]:
        for action in actions:
            if not isinstance(action, Send):
                continue
            name = action.backend
            self._running[action.request.id] = name
            self._in_flight[name] += 1
            self._sent.append((now, name))
            while self._sent[0][0] < now - PERIOD_S - 1e-9:
                self._sent.popleft()
            over = self._in_flight[name] - self.limits[name]
            lately = sum(other == name for _, other in self._sent)
            self.overshoot = max(self.overshoot, over)
            self.unexplained = max(self.unexplained, over - lately)
        return actions


@dataclass(frozen=True)
class Result:
    """Outcomes and policy of one simulation."""

    outcomes: Sequence[SimOutcome]
    policy: Several

    @property
    def hit_ratio(self) -> float:
        served = [o for o in self.outcomes if o.served]
        return sum(o.cached_tokens for o in served) / sum(o.request.input_tokens for o in served)

    @property
    def imbalance(self) -> float:
        """Prompt tokens of the backend with most over the mean."""
        tokens: Counter[str] = Counter({name: 0 for name in self.policy.limits})
        for outcome in self.outcomes:
            if outcome.backend:
                tokens[outcome.backend] += outcome.request.input_tokens
        return max(tokens.values()) * len(tokens) / sum(tokens.values())

    @property
    def rejected(self) -> float:
        return sum(o.reject is not None for o in self.outcomes) / len(self.outcomes)

    def ttft_s(self, share: float, least_tokens: int = 0, most_tokens: float = inf) -> float:
        """A quantile of the TTFT of requests of a size."""
        times = sorted(
            o.ttft_s
            for o in self.outcomes
            if o.ttft_s is not None and least_tokens <= o.request.input_tokens <= most_tokens
        )
        return times[min(len(times) - 1, int(share * len(times)))]


def play(
    trace: Sequence[TraceRequest],
    new_shaper: Callable[[list[str]], Shaper],
    *,
    proxies: int,
    engines: int,
    seed: int = 0,
    exchange: bool = True,
    config: EngineConfig | None = None,
    pinned: Mapping[str, int] | None = None,
) -> Result:
    """Play `trace` through several proxies in front of several engines."""
    served = {f"gpu{i}": served_engine(config or EngineConfig()) for i in range(engines)}
    shapers = [new_shaper(list(served)) for _ in range(proxies)]
    limits = {name: b.spec.max_concurrency for name, b in shapers[0].backends.items()}
    policy = Several(shapers, limits, seed, exchange, pinned or {})
    # The fleet is compiled for one shaper; it asks for no more than this has.
    return Result(Fleet(cast(Any, policy), served).run(trace), policy)
