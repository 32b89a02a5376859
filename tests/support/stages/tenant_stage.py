"""Tenants that compete for small engines in virtual time, sequences and KV cache included.

The engine is a simple one: prompts are computed one after the other, then each sequence has a slot
until its last token, and KV cache that grows to that token. A sequence that lacks a slot, or KV
cache for its prompt, waits, first come, first served. Answers that outgrow the KV cache are not
preempted.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from forebay.proxy.core.model import (
    Action,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
    ServiceClass,
    Tenant,
)
from forebay.proxy.core.shaper import Shaper

TOKENS_PER_S = 20_000.0  # of prefill
TOKEN_S = 0.02  # of decoding
BUCKETS = (
    Bucket("chat", 5_000, max_queue=256, max_wait_s=2.0),
    Bucket("document", 131_072, max_queue=256, max_wait_s=30.0, prefills_per_backend=1),
)


@dataclass
class Ask:
    """One request of a client.

    Attributes:
        answer_tokens: tokens that each of its sequences generates.
        most_tokens: `max_tokens`.
        says: the source of its answer's length: usage, its events, or nothing.
    """

    at: float
    tenant: str
    prompt_tokens: int = 1_000
    answer_tokens: int = 50
    most_tokens: int = 256
    sequences: int = 1
    service_class: ServiceClass = "standard"
    timeout_s: float = float("inf")
    streams: bool = True
    says: str = "usage"
    sent_at: float | None = None
    first_at: float | None = None
    done_at: float | None = None
    rejected: str = ""

    def sequence_kv_tokens(self, began_at: float, now: float) -> float:
        """Its part of the prompt, and the generated part of its answer."""
        generated = min(self.answer_tokens, max(0.0, now - began_at) / TOKEN_S)
        return self.prompt_tokens / self.sequences + generated


@dataclass
class Engine:
    slots: int
    kv_tokens: float
    prefill_free_at: float = 0.0
    queue: deque[str] = field(default_factory=deque)  # a sequence each
    running: list[tuple[Ask, float]] = field(default_factory=list)  # a sequence; it decodes from

    def kv_tokens_held(self, now: float) -> float:
        return sum(ask.sequence_kv_tokens(began_at, now) for ask, began_at in self.running)


class Stage:
    """Engines behind a shaper. `play` runs all requests."""

    def __init__(
        self,
        engines: int = 2,
        slots: int = 64,
        kv_tokens: float = 200_000.0,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        self.engines = {f"gpu{i}": Engine(slots, kv_tokens) for i in range(engines)}
        specs = [BackendSpec(name, slots, kv_tokens) for name in self.engines]
        self.shaper = Shaper(specs, BUCKETS, tenants=tenants)
        self.now = 0.0
        self.asked: dict[str, Ask] = {}
        self._left: dict[str, int] = {}
        self._places: dict[str, str] = {}
        self._events: list[tuple[float, int, str, str]] = []
        self._order = count()
        for name in self.engines:
            self._do(self.shaper.backend_up(name, 0.0, kv_tokens))

    def play(self, asks: Iterable[Ask], until: float = float("inf")) -> list[Ask]:
        """Run all requests to their end, or all events before `until`."""
        ordered = sorted(asks, key=lambda ask: ask.at)
        for number, ask in enumerate(ordered):
            name = f"{ask.tenant}-{number}"
            self.asked[name] = ask
            self._at(ask.at, "arrive", name)
        while self._events:
            if (wake_at := self.shaper.wake_at()) <= self._events[0][0]:
                self.now = max(self.now, wake_at)
                self._do(self.shaper.wake(self.now))
                continue
            if self._events[0][0] > until:
                break
            self.now, _, kind, name = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(name)
            self.observe()
        return ordered

    def observe(self) -> None:
        """Called after each event, for tests."""

    def request(self, name: str, ask: Ask) -> Request:
        return Request(
            name, ask.prompt_tokens, ask.sequences * ask.most_tokens, timeout_s=ask.timeout_s,
            streams=ask.streams, tenant=ask.tenant, service_class=ask.service_class,
            sequences=ask.sequences,
        )  # fmt: skip

    def _at(self, at: float, kind: str, name: str) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, name))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            name = action.request.id
            if isinstance(action, Reject):
                self.asked[name].rejected = action.reason
            else:
                assert isinstance(action, Send)
                self._send(name, action.backend)

    def _send(self, name: str, backend: str) -> None:
        ask, engine = self.asked[name], self.engines[backend]
        ask.sent_at = self.now
        self._places[name] = backend
        self._left[name] = ask.sequences
        engine.queue.extend([name] * ask.sequences)
        self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        """Give slots and KV cache to the sequences that came first."""
        while engine.queue:
            name = engine.queue[0]
            ask = self.asked[name]
            most = engine.kv_tokens - ask.sequence_kv_tokens(self.now, self.now)
            if engine.running and (
                len(engine.running) >= engine.slots or engine.kv_tokens_held(self.now) > most
            ):
                return
            engine.queue.popleft()
            if ask.first_at is None:
                ask.first_at = -1.0  # begun
                start = max(self.now, engine.prefill_free_at)
                engine.prefill_free_at = start + ask.prompt_tokens / TOKENS_PER_S
                self._at(engine.prefill_free_at, "first", name)
            start = max(self.now, engine.prefill_free_at)
            engine.running.append((ask, start))
            self._at(start + ask.answer_tokens * TOKEN_S, "sequence", name)

    def _arrive(self, name: str) -> None:
        self._do(self.shaper.arrive(self.request(name, self.asked[name]), self.now))

    def _first(self, name: str) -> None:
        self.asked[name].first_at = self.now
        if self.asked[name].streams:
            self._do(self.shaper.first_token(name, self.now))

    def _sequence(self, name: str) -> None:
        ask, engine = self.asked[name], self.engines[self._places[name]]
        engine.running.remove(next(sequence for sequence in engine.running if sequence[0] is ask))
        self._left[name] -= 1
        if not self._left[name]:
            ask.done_at = self.now
            tokens = ask.sequences * ask.answer_tokens
            if ask.says == "usage":
                self.shaper.used(name, tokens, self.now, 0, ask.prompt_tokens)
            elif ask.says == "events":
                self.shaper.generated(name, tokens)
            self._do(self.shaper.finish(name, self.now))
        self._admit(engine)
