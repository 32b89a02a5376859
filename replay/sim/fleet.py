"""A whole fleet in virtual time: the live policy and simulated engines on one event heap.

No sockets and no sleeping: arrivals, what engines do next and the policy's timer are the only
events. The shaper is the one that the proxy runs; the parity test holds both to it. The network
takes no time; what HTTP and tokenising cost is the engine's `request_s`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from forebay.proxy.core.model import Action, Reject, Send
from forebay.proxy.core.model import Request as Asked
from forebay.replay.sim.request import SimRequest
from forebay.traces.schema import TraceRequest

Journal = list[tuple[float, Action]]


class Policy(Protocol):
    """What decides: a `Shaper`, or `InTurn` where there is no proxy."""

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]: ...
    def arrive(self, request: Asked, now: float) -> list[Action]: ...
    def first_token(self, request_id: str, now: float) -> list[Action]: ...
    def prompt_cached(
        self, request_id: str, cached_tokens: int | None, now: float, prompt_tokens: int = 0
    ) -> None: ...
    def finish(self, request_id: str, now: float) -> list[Action]: ...
    def wake_at(self) -> float: ...
    def wake(self, now: float) -> list[Action]: ...


class Engine(Protocol):
    """What serves: `SkippingEngine`, or `SteppingEngine` for reference."""

    @property
    def request_s(self) -> float: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def preemptions(self) -> int: ...
    def add(self, request: SimRequest, now: float) -> None: ...
    def next_at(self) -> float: ...
    def advance(self, now: float) -> tuple[Sequence[SimRequest], Sequence[SimRequest]]: ...


class Outcome:
    """What became of one request; times in seconds of the trace, None where it never happened."""

    __slots__ = ("backend", "reject", "request", "sent_s", "served")

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.backend: str | None = None
        self.sent_s: float | None = None
        self.served: SimRequest | None = None  # in the engine's books
        self.reject: Reject | None = None

    @property
    def first_token_s(self) -> float | None:
        return self.served.first_token_s if self.served and self.served.first_token_s >= 0 else None

    @property
    def finished_s(self) -> float | None:
        return self.served.finished_s if self.served and self.served.finished_s >= 0 else None

    @property
    def cached_tokens(self) -> int:
        return self.served.cached_tokens if self.served else 0

    @property
    def stall_s(self) -> float:
        return self.served.stall_s if self.served else 0.0

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token."""
        first_token_s = self.first_token_s
        return None if first_token_s is None else first_token_s - self.request.arrival_s


def asked(row: TraceRequest) -> Asked:
    """The request as the proxy would see it: the trace's full blocks are its prefix blocks."""
    full = row.input_tokens // row.block_tokens
    return Asked(
        row.id, row.input_tokens, row.output_tokens, (row.blocks or ())[:full], row.block_tokens
    )


def served(row: TraceRequest) -> SimRequest:
    """The request as an engine sees it."""
    return SimRequest(
        row.id, row.input_tokens, row.output_tokens, row.blocks or (), row.block_tokens
    )


class Fleet:
    """One policy in front of engines; `run` once.

    `tells_cached`: answers say how much of their prompt was cached, as a vLLM does that runs with
    --enable-prompt-tokens-details.
    """

    def __init__(
        self,
        policy: Policy,
        engines: Mapping[str, Engine],
        record: Callable[[float, Action], None] | None = None,
        *,
        tells_cached: bool = False,
    ) -> None:
        self.policy = policy
        self.engines = dict(engines)
        self._record = record
        self._tells_cached = tells_cached
        self._numbers = {name: number for number, name in enumerate(self.engines)}
        self._outcomes: dict[str, Outcome] = {}
        # (time, order of entry, engine, request to hand in; None: the engine's own next event)
        self._events: list[tuple[float, int, int, SimRequest | None]] = []
        self._entered = 0

    def run(self, trace: Iterable[TraceRequest]) -> list[Outcome]:
        """Play the whole trace, which must be in order of arrival; outcomes in the same order."""
        policy, events = self.policy, self._events
        engines = list(self.engines.values())
        due = [inf] * len(engines)  # when each engine is due; other entries in `events` are stale
        outcomes = self._outcomes
        for name, engine in self.engines.items():
            self._do(policy.backend_up(name, 0.0, float(engine.kv_tokens)), 0.0)
        rows = iter(trace)
        row = next(rows, None)
        arrival = row.arrival_s if row else inf
        wake = inf
        while True:
            now = events[0][0] if events else inf
            if arrival <= now and arrival <= wake:
                if row is None:
                    break
                now = arrival
                outcomes[row.id] = Outcome(row)
                self._do(policy.arrive(asked(row), now), now)
                row = next(rows, None)
                arrival = row.arrival_s if row else inf
                assert arrival >= now, "the trace is not in order of arrival"
            elif now <= wake:
                _, _, number, handed = heappop(events)
                engine = engines[number]
                if handed:
                    engine.add(handed, now)
                elif now != due[number]:
                    continue
                else:
                    due[number] = inf
                    for served in (advanced := engine.advance(now))[0]:
                        self._do(policy.first_token(served.id, now), now)
                    for served in advanced[1]:
                        if self._tells_cached:
                            policy.prompt_cached(served.id, served.cached_tokens, now)
                        self._do(policy.finish(served.id, now), now)
                at = engine.next_at()
                if at != due[number]:
                    due[number] = at
                    if at < inf:
                        self._entered += 1
                        heappush(events, (at, self._entered, number, None))
            else:
                now = wake
                self._do(policy.wake(now), now)
            wake = policy.wake_at()
            if wake < now:
                wake = now
        return list(outcomes.values())

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if self._record:
                self._record(now, action)
            outcome = self._outcomes[action.request.id]
            if isinstance(action, Send):
                number = self._numbers[action.backend]
                outcome.backend, outcome.sent_s = action.backend, now
                outcome.served = served(outcome.request)
                self._entered += 1
                at = now + self.engines[action.backend].request_s
                heappush(self._events, (at, self._entered, number, outcome.served))
            else:
                outcome.reject = action
