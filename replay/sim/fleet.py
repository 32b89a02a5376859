"""Simulate a whole fleet in virtual time: the live policy in front of simulated engines.

No sockets and no sleeping. Three kinds of events move time: arrivals, the next event of an engine,
and the policy's timer. The shaper is the proxy's own, and a parity test compares the two.
The network takes no time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from forebay.proxy.core.model import Action, Reject, Send
from forebay.proxy.core.model import Request as ProxyRequest
from forebay.proxy.core.shaper import Shaper
from forebay.replay.sim.engine.pools import DecodePool
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.routers.all_knowing import AllKnowing
from forebay.replay.sim.routers.base import RouterModel
from forebay.replay.sim.turns import WaitingTurns
from forebay.traces.ground.schema import TraceRequest

Journal = list[tuple[float, Action]]


# A union, not a protocol: compiled code then calls the first directly.
Policy = Shaper | RouterModel
"""The proxy's policy, or the model of another router or of clients without a router."""


class SimOutcome:
    """The result of one request.

    Attributes:
        request: its row of the trace.
        backend, sent_s: the engine that got it, and when, in seconds of the trace.
        matched_tokens: prompt tokens that the policy expected to be cached when it sent them.
        served: the request in the engine. None before it is sent.
        reject: the rejection, if there was one.
    """

    __slots__ = (
        "backend",
        "matched_tokens",
        "reject",
        "request",
        "sent_s",
        "served",
    )

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.backend: str | None = None
        self.sent_s: float | None = None
        self.matched_tokens = 0
        self.served: SimRequest | None = None
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
        """Seconds from arrival to first token."""
        first_token_s = self.first_token_s
        return None if first_token_s is None else first_token_s - self.request.arrival_s


def proxy_request(row: TraceRequest, timeout_s: float = inf) -> ProxyRequest:
    """Convert `row` to a request as the proxy would see it: full blocks are prefix blocks."""
    full = row.input_tokens // row.block_tokens
    blocks = row.blocks or ()
    return ProxyRequest(
        row.id,
        row.input_tokens,
        row.output_tokens,
        blocks[:full],
        row.block_tokens,
        timeout_s,
        True,
        row.tenant or "",
        row.service_class or "standard",  # type: ignore[arg-type]  # one of the three
        identity=hash((blocks[-1], row.input_tokens)) if blocks else 0,
    )


def sim_request(row: TraceRequest) -> SimRequest:
    """Convert `row` to the request that an engine sees."""
    return SimRequest(
        row.id, row.input_tokens, row.output_tokens, row.blocks or (), row.block_tokens
    )


class EngineTimer:
    """When one engine is due. `entered` orders engines that are due at one instant."""

    __slots__ = ("due", "engine", "entered", "number")

    def __init__(self, number: int, engine: ServedEngine | None) -> None:
        self.number = number
        self.engine = engine
        self.due = inf
        self.entered = 0


class Fleet:
    """One policy in front of engines, for one call of `run`.

    Args:
        tells_cached: answers report their cached prompt tokens, as a vLLM with
            --enable-prompt-tokens-details does.
        patience: seconds until the client of a request gives up on its first token. By default
            clients never give up.
        on_end: takes each outcome when its request has ended. `run` then returns an empty list.
    """

    def __init__(
        self,
        policy: Policy,
        engines: Mapping[str, ServedEngine],
        record: Callable[[float, Action], None] | None = None,
        *,
        tells_cached: bool = True,
        patience: Callable[[TraceRequest], float] | None = None,
        on_end: Callable[[SimOutcome], None] | None = None,
    ) -> None:
        self.policy = policy
        self._patience = patience
        self._on_end = on_end
        self.engines = dict(engines)
        self._record = record
        self._tells_cached = tells_cached
        self._outcomes: dict[str, SimOutcome] = {}
        self._timers: dict[str, EngineTimer] = {}
        for number, (name, engine) in enumerate(engines.items()):
            self._timers[name] = EngineTimer(number, engine)
        # A tournament tree: of each two timers the earlier one advances, so `_rounds[1]` is the
        # earliest of all. The time of an engine changes several times a request, which replays
        # only the rounds on its way up. A heap would fill up with outdated times.
        self._leaves = 1
        while self._leaves < len(self._timers):
            self._leaves *= 2
        never = EngineTimer(-1, None)
        self._rounds = [never] * self._leaves + list(self._timers.values())
        self._rounds += [never] * (2 * self._leaves - len(self._rounds))
        self._entered = 0
        self._now = 0.0
        self._turns: WaitingTurns | None = None

    def run(self, trace: Iterable[TraceRequest]) -> list[SimOutcome]:
        """Play the whole trace in its order of arrival, and return outcomes in the same order."""
        self._start()
        before = -inf
        for row in trace:
            now = row.arrival_s
            assert now >= before, "the trace is not in order of arrival"
            before = now
            self._play(now)
            self._enter(row)
        self._play(inf)
        return list(self._outcomes.values())

    def run_turns(self, turns: WaitingTurns) -> list[SimOutcome]:
        """Play requests that wait for answers, and return outcomes in order of arrival."""
        self._turns = turns
        self._start()
        while True:
            self._play(inf)
            if turns.next_at() == inf:
                return list(self._outcomes.values())
            self._enter(turns.take())

    def _start(self) -> None:
        policy = self.policy
        if isinstance(policy, AllKnowing):
            policy.look_into(self.engines)
        for name, engine in self.engines.items():
            self._carry_out(policy.backend_up(name, 0.0, float(engine.kv_tokens)), 0.0)

    def _enter(self, row: TraceRequest) -> None:
        now = row.arrival_s
        self._now = now
        self._outcomes[row.id] = SimOutcome(row)
        timeout_s = self._patience(row) if self._patience is not None else inf
        self._carry_out(self.policy.arrive(self._asked(row, timeout_s), now), now)

    def _report_end(self, request_id: str, now: float) -> None:
        """Report the outcome of a request, and let the turns that wait for it become due."""
        if self._turns is not None:
            self._turns.ended(request_id, now)
        if self._on_end is not None:
            self._on_end(self._outcomes.pop(request_id))

    def unfinished(self) -> list[SimOutcome]:
        """Return the outcomes of requests that have arrived and not ended, in order of arrival."""
        return list(self._outcomes.values())

    def _asked(self, row: TraceRequest, timeout_s: float) -> ProxyRequest:
        """Return a row as the policy sees it."""
        return proxy_request(row, timeout_s)

    def _sent(self, row: TraceRequest) -> SimRequest:
        """Return a row as the engine sees it that the policy has chosen."""
        return sim_request(row)

    def _play(self, until: float) -> None:
        """Play all events before `until`, or before the next turn. That arrival goes first."""
        policy, rounds, turns = self.policy, self._rounds, self._turns
        while True:
            if turns is not None:  # an answer may make one due before all others
                until = turns.next_at()
            timer = rounds[1]
            now = timer.due
            wake = policy.wake_at()
            if wake < self._now:
                wake = self._now
            if until <= now and until <= wake:
                return
            if wake < now:
                self._now = wake
                self._carry_out(policy.wake(wake), wake)
                continue
            self._now = now
            self._advance(timer, now)

    def _advance(self, timer: EngineTimer, now: float) -> None:
        """Let an engine pass its due time, and report its tokens to the policy."""
        policy, outcomes, engine = self.policy, self._outcomes, timer.engine
        assert engine is not None
        first, finished = engine.advance(now)
        for request in first:
            self._carry_out(policy.first_token(request.id, now), now)
        for request in finished:
            outcome, cached_tokens = outcomes[request.id], request.cached_tokens
            # Usage is reported only where it changes decisions: output lengths are known here
            # from the start, and an expected cache hit corrects nothing.
            lengths = policy.wants_usage
            if lengths or cached_tokens != outcome.matched_tokens:
                output_tokens = request.output_target if lengths else 0
                reported = cached_tokens if self._tells_cached else None
                policy.used(request.id, output_tokens, now, reported)
            self._carry_out(policy.finish(request.id, now), now)
            self._report_end(request.id, now)
        self._set_timer(timer, engine.next_at())

    def _set_timer(self, timer: EngineTimer, due: float) -> None:
        """Change when the engine is due, and replay its rounds of the tournament."""
        self._entered += 1
        timer.due, timer.entered = due, self._entered
        rounds, index = self._rounds, (self._leaves + timer.number) // 2
        while index:
            winner, other = rounds[2 * index], rounds[2 * index + 1]
            if other.due < winner.due or (
                other.due == winner.due and other.entered < winner.entered
            ):
                winner = other
            if winner is not timer and winner is rounds[index]:
                return  # this engine had lost before, too, so nothing changes further up
            rounds[index] = winner
            index //= 2

    def _carry_out(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if self._record is not None:
                self._record(now, action)
            outcome = self._outcomes[action.request.id]
            if isinstance(action, Send):
                request, timer = self._sent(outcome.request), self._timers[action.backend]
                if action.priority is not None:
                    request.priority = action.priority
                outcome.backend, outcome.sent_s, outcome.served = action.backend, now, request
                outcome.matched_tokens = action.matched_tokens
                engine = timer.engine
                assert engine is not None
                engine.send(request, now)
                due = engine.next_at()
                if due != timer.due:
                    self._set_timer(timer, due)
            else:
                outcome.reject = action
                self._report_end(outcome.request.id, now)


class PooledFleet(Fleet):
    """A policy in front of engines that compute prompts, and a pool of engines that generate.

    For the policy a request ends with its prompt.

    Args:
        engines: the prefill pool.
    """

    def __init__(
        self,
        policy: Policy,
        engines: Mapping[str, ServedEngine],
        pool: DecodePool,
        *,
        on_end: Callable[[SimOutcome], None] | None = None,
    ) -> None:
        super().__init__(policy, {**engines, **pool.engines}, on_end=on_end)
        self.engines = dict(engines)
        self._pool = pool
        self._names = [*engines, *pool.engines]  # by the number of their timers
        self._cached: dict[str, int] = {}  # prompt tokens that the prefill pool had cached

    def _asked(self, row: TraceRequest, timeout_s: float) -> ProxyRequest:
        return proxy_request(replace(row, output_tokens=1), timeout_s)

    def _sent(self, row: TraceRequest) -> SimRequest:
        return sim_request(replace(row, output_tokens=1))

    def _advance(self, timer: EngineTimer, now: float) -> None:
        if timer.number < len(self.engines):
            self._hand_over(timer, now)
        else:
            self._generate(timer, now)

    def _hand_over(self, timer: EngineTimer, now: float) -> None:
        """Let a prefill engine pass its due time, and send computed prompts to the decode pool."""
        policy, engine = self.policy, timer.engine
        assert engine is not None
        first, finished = engine.advance(now)
        for request in first:
            self._carry_out(policy.first_token(request.id, now), now)
        for prefilled in finished:
            outcome = self._outcomes[prefilled.id]
            if prefilled.cached_tokens != outcome.matched_tokens:
                policy.used(prefilled.id, 1, now, prefilled.cached_tokens)
            self._carry_out(policy.finish(prefilled.id, now), now)
            request = outcome.served = sim_request(outcome.request)
            name = self._pool.take(request, self._names[timer.number], now)
            self._cached[request.id] = prefilled.cached_tokens
            self._set_timer(self._timers[name], self._pool.engines[name].next_at())
        self._set_timer(timer, engine.next_at())

    def _generate(self, timer: EngineTimer, now: float) -> None:
        """Let an engine of the decode pool pass its due time."""
        engine = timer.engine
        assert engine is not None
        _, finished = engine.advance(now)
        for request in finished:
            self._pool.ended(self._names[timer.number])
            request.cached_tokens = self._cached.pop(request.id)
            self._report_end(request.id, now)
        self._set_timer(timer, engine.next_at())
