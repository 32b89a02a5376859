"""A whole fleet in virtual time: the live policy and simulated engines on one event heap.

No sockets and no sleeping: arrivals, what engines do next and the policy's timer are the only
events. The shaper is the one that the proxy runs; the parity test holds both to it. The network
takes no time; what HTTP and tokenising cost is the engine's `request_s`, and for pieces of a prompt
`TOKENIZE_S` besides.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final

from forebay.proxy.core.model import Action, Reject, Send
from forebay.proxy.core.model import Request as Asked
from forebay.proxy.core.shaper import Shaper
from forebay.replay.sim.all_knowing import AllKnowing
from forebay.replay.sim.in_turn import InTurn
from forebay.replay.sim.peers import Peer
from forebay.replay.sim.request import SimRequest
from forebay.replay.sim.skipping import SkippingEngine
from forebay.replay.sim.stepping import SteppingEngine
from forebay.traces.schema import TraceRequest

Journal = list[tuple[float, Action]]


# Unions, not protocols: compiled code then calls the first of each directly.
Policy = Shaper | InTurn | Peer
"""What decides; `InTurn` where there is no proxy, `Peer` for models of other routers."""
Engine = SkippingEngine | SteppingEngine
"""What serves; `SteppingEngine` for reference."""


class Outcome:
    """What became of one request; times in seconds of the trace, None where it never happened."""

    __slots__ = ("backend", "matched_tokens", "piece", "reject", "request", "sent_s", "served")

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.backend: str | None = None
        self.sent_s: float | None = None
        self.matched_tokens = 0  # of its prompt, taken to be cached when it was sent
        self.served: SimRequest | None = None  # in the engine's books
        self.piece: SimRequest | None = None  # of its prompt, that was sent last
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


def asked(row: TraceRequest, timeout_s: float = inf) -> Asked:
    """The request as the proxy would see it: the trace's full blocks are its prefix blocks."""
    full = row.input_tokens // row.block_tokens
    return Asked(
        row.id,
        row.input_tokens,
        row.output_tokens,
        (row.blocks or ())[:full],
        row.block_tokens,
        timeout_s,
        True,
        row.tenant or "",
        row.service_class or "standard",  # type: ignore[arg-type]  # one of the three
    )


def served(row: TraceRequest) -> SimRequest:
    """The request as an engine sees it."""
    return SimRequest(
        row.id, row.input_tokens, row.output_tokens, row.blocks or (), row.block_tokens
    )


def beginning_of(row: TraceRequest, blocks: int) -> SimRequest:
    """The first blocks of its prompt, as an engine sees them."""
    assert row.blocks is not None
    tokens = blocks * row.block_tokens
    return SimRequest(row.id, tokens, 1, row.blocks[:blocks], row.block_tokens)


class Place:
    """When one engine of the fleet is due; `entered` orders those due at one instant."""

    __slots__ = ("due", "entered", "number", "request_s")

    def __init__(self, number: int, request_s: float) -> None:
        self.number = number
        self.request_s = request_s
        self.due = inf
        self.entered = 0


class Handed:
    """A request on its way to an engine, where it is `at`."""

    __slots__ = ("at", "entered", "place", "request")

    def __init__(self, at: float, entered: int, place: Place, request: SimRequest) -> None:
        self.at = at
        self.entered = entered
        self.place = place
        self.request = request


TOKENIZE_S: Final = 2.2e-6
"""A token of a beginning (`prefill_piece`), which the engine's server tokenizes anew with each
piece. Of whole prompts it is part of what step times were fitted to. 115,000 tokens with the
pattern of Llama-3 took HF tokenizers 0.52 s on a machine half as fast as a server."""
ARRIVED_MOST: Final = 1_024  # entries of `_handed` that are kept though nobody needs them


class Fleet:
    """One policy in front of engines; `run` once.

    `tells_cached`: answers say how much of their prompt was cached, as a vLLM does that runs with
    --enable-prompt-tokens-details. `patience`: how long its client waits for the first token of
    a request, seconds; for ever when not given.
    """

    def __init__(
        self,
        policy: Policy,
        engines: Mapping[str, Engine],
        record: Callable[[float, Action], None] | None = None,
        *,
        tells_cached: bool = True,
        patience: Callable[[TraceRequest], float] | None = None,
    ) -> None:
        self.policy = policy
        self._patience = patience
        self.engines = dict(engines)
        self._record = record
        self._tells_cached = tells_cached
        self._outcomes: dict[str, Outcome] = {}
        self._all = list(engines.values())
        self._places: dict[str, Place] = {}
        for number, (name, engine) in enumerate(engines.items()):
            self._places[name] = Place(number, engine.request_s)
        # A tournament: of each two places the earlier one goes on, and `_rounds[1]` is the next
        # that is due. An engine's time changes a few times a request, and with it only the rounds
        # that it plays in; a heap would fill up with times that hold no longer.
        self._leaves = 1
        while self._leaves < len(self._places):
            self._leaves *= 2
        nobody = Place(-1, 0.0)
        self._rounds = [nobody] * self._leaves + list(self._places.values())
        self._rounds += [nobody] * (2 * self._leaves - len(self._rounds))
        # In order of `at`; those before `_arrived` have.
        self._handed: list[Handed] = []
        self._arrived = 0
        self._entered = 0
        self._now = 0.0

    def run(self, trace: Iterable[TraceRequest]) -> list[Outcome]:
        """Play the whole trace, which must be in order of arrival; outcomes in the same order."""
        policy, outcomes = self.policy, self._outcomes
        if isinstance(policy, AllKnowing):
            policy.look_into(self.engines)
        for name, engine in self.engines.items():
            self._do(policy.backend_up(name, 0.0, float(engine.kv_tokens)), 0.0)
        before = -inf
        for row in trace:
            now = row.arrival_s
            assert now >= before, "the trace is not in order of arrival"
            before = now
            self._play(now)
            self._now = now
            outcomes[row.id] = Outcome(row)
            timeout_s = self._patience(row) if self._patience is not None else inf
            self._do(policy.arrive(asked(row, timeout_s), now), now)
        self._play(inf)
        return list(outcomes.values())

    def _play(self, until: float) -> None:
        """All that happens before `until`; arrivals come first."""
        policy, rounds, handed = self.policy, self._rounds, self._handed
        while True:
            place = rounds[1]
            now = place.due
            head: Handed | None = None
            if self._arrived < len(handed):
                head = handed[self._arrived]
                if head.at < now or (head.at == now and head.entered < place.entered):
                    now = head.at
                else:
                    head = None
            wake = policy.wake_at()
            if wake < self._now:
                wake = self._now
            if until <= now and until <= wake:
                return
            if wake < now:
                self._now = wake
                self._do(policy.wake(wake), wake)
                continue
            self._now = now
            if head is not None:
                self._arrived += 1
                if self._arrived == ARRIVED_MOST:
                    del handed[:ARRIVED_MOST]
                    self._arrived = 0
                place = head.place
                engine = self._all[place.number]
                engine.add(head.request, now)
                if engine.next_at() != place.due:
                    self._enter(place, engine.next_at())
                continue
            engine = self._all[place.number]
            first, finished = engine.advance(now)
            for served in first:
                if served is self._outcomes[served.id].piece:
                    continue
                self._do(policy.first_token(served.id, now), now)
            for served in finished:
                if served is self._outcomes[served.id].piece:
                    assert isinstance(policy, Shaper)
                    cached = served.cached_tokens if self._tells_cached else None
                    self._do(
                        policy.piece_computed(served.id, now, cached, served.prompt_tokens), now
                    )
                    continue
                # Told where it changes decisions. Lengths of answers are known here anyway, and a
                # match that was right corrects nothing.
                lengths, cached_tokens = policy.wants_usage, served.cached_tokens
                if lengths or cached_tokens != self._outcomes[served.id].matched_tokens:
                    output_tokens = served.output_target if lengths else 0
                    told = cached_tokens if self._tells_cached else None
                    policy.used(served.id, output_tokens, now, told)
                self._do(policy.finish(served.id, now), now)
            self._enter(place, engine.next_at())

    def _enter(self, place: Place, due: float) -> None:
        """The engine is due then."""
        self._entered += 1
        place.due, place.entered = due, self._entered
        rounds, index = self._rounds, (self._leaves + place.number) // 2
        while index:
            winner, other = rounds[2 * index], rounds[2 * index + 1]
            if other.due < winner.due or (
                other.due == winner.due and other.entered < winner.entered
            ):
                winner = other
            if winner is not place and winner is rounds[index]:
                return  # it had lost before, too
            rounds[index] = winner
            index //= 2

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if self._record is not None:
                self._record(now, action)
            outcome = self._outcomes[action.request.id]
            if isinstance(action, Send):
                request, place = served(outcome.request), self._places[action.backend]
                outcome.piece, at = None, now + place.request_s
                if action.piece_blocks:
                    request = beginning_of(outcome.request, action.piece_blocks)
                    outcome.piece = request
                    at += TOKENIZE_S * request.prompt_tokens
                outcome.backend, outcome.sent_s, outcome.served = action.backend, now, request
                outcome.matched_tokens = action.matched_tokens
                self._hand(request, place, at)
            else:
                outcome.reject = action

    def _hand(self, request: SimRequest, place: Place, at: float) -> None:
        self._entered += 1
        handed, one = self._handed, Handed(at, self._entered, place, request)
        index = len(handed)
        while index > self._arrived and handed[index - 1].at > at:
            index -= 1  # engines may differ in `request_s`
        if index == len(handed):
            handed.append(one)
        else:
            handed.insert(index, one)
