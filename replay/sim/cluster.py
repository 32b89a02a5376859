"""A whole fleet in virtual time: the live policy and the simulated engines on one event heap.

No sockets and no sleeping: an arrival, the end of an engine step and the shaper's timer are the
only events. The shaper is the one that the proxy runs; the parity test holds both to it. The
network takes no time; what HTTP and tokenising cost is the engine's `request_s`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from forebay.proxy.core.model import Action, Reject, Send
from forebay.proxy.core.model import Request as Asked
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import Request as Served
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.events import EventLoop
from forebay.traces.schema import TraceRequest

Journal = list[tuple[float, Action]]


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds of the trace, None where it never happened."""

    request: TraceRequest
    backend: str | None = None
    sent_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    stall_s: float = 0.0
    reject: Reject | None = None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token."""
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.request.arrival_s


def asked(row: TraceRequest) -> Asked:
    """The request as the proxy would see it: the trace's full blocks are its prefix blocks."""
    full = row.input_tokens // row.block_tokens
    return Asked(
        row.id, row.input_tokens, row.output_tokens, (row.blocks or ())[:full], row.block_tokens
    )


def served(row: TraceRequest, arrival_s: float, block_size: int) -> Served:
    """The request as the engine sees it."""
    hashes = (
        hashes_of_ids(row.blocks, row.block_tokens, row.input_tokens, block_size)
        if row.blocks
        else []
    )
    return Served(row.id, row.input_tokens, row.output_tokens, hashes, arrival_s=arrival_s)


class Fleet:
    """One shaper in front of engines of the same names; `run` once."""

    def __init__(self, shaper: Shaper, engines: Mapping[str, EngineCore]) -> None:
        self.shaper = shaper
        self.engines = dict(engines)
        self.journal: Journal = []
        self.outcomes: dict[str, Outcome] = {}
        self._loop = EventLoop()
        self._stepping: set[str] = set()
        self._timer = inf

    def run(self, trace: Iterable[TraceRequest]) -> list[Outcome]:
        """Play the whole trace; the outcomes in the order of arrival."""
        for name, engine in self.engines.items():
            self._do(self.shaper.backend_up(name, 0.0, float(engine.kv_tokens)))
        for row in trace:
            self._loop.at(row.arrival_s, partial(self._arrive, row))
        self._loop.run()
        return list(self.outcomes.values())

    def _arrive(self, row: TraceRequest) -> None:
        self.outcomes[row.id] = Outcome(row)
        self._do(self.shaper.arrive(asked(row), self._loop.now))

    def _do(self, actions: list[Action]) -> None:
        now = self._loop.now
        for action in actions:
            self.journal.append((now, action))
            outcome = self.outcomes[action.request.id]
            if isinstance(action, Send):
                outcome.backend, outcome.sent_s = action.backend, now
                engine = self.engines[action.backend]
                add = partial(self._add, action.backend, outcome.request)
                self._loop.at(now + engine.request_s, add)
            else:
                outcome.reject = action
        # One timer is enough: an earlier one that fires too soon finds nothing and sets the next.
        when = self.shaper.wake_at()
        if when < self._timer:
            self._timer = max(when, now)
            self._loop.at(self._timer, partial(self._wake, self._timer))

    def _wake(self, at: float) -> None:
        if at == self._timer:
            self._timer = inf
            due = self.shaper.wake_at() <= at
            self._do(self.shaper.wake(at) if due else [])

    def _add(self, name: str, row: TraceRequest) -> None:
        engine = self.engines[name]
        engine.add(served(row, self._loop.now, engine.limits.block_size))
        # After everything else due now: requests that come together share the first step.
        self._loop.at(self._loop.now, partial(self._start_step, name))

    def _start_step(self, name: str) -> None:
        engine = self.engines[name]
        if engine.has_work and name not in self._stepping:
            self._stepping.add(name)
            ends_at = self._loop.now + engine.start_step(self._loop.now)
            self._loop.at(ends_at, partial(self._end_step, name))

    def _end_step(self, name: str) -> None:
        now = self._loop.now
        result = self.engines[name].finish_step()
        self._stepping.remove(name)
        # As the server does: first those that go on, then those that end.
        ended = {request.id for request in result.finished}
        going_on = [request for request in result.outputs if request.id not in ended]
        for request in (*going_on, *result.finished):
            outcome = self.outcomes[request.id]
            if request.output_tokens == 1:
                outcome.first_token_s = now
                outcome.cached_tokens = max(0, request.cached_tokens)
                self._do(self.shaper.first_token(request.id, now))
            else:
                outcome.stall_s = max(outcome.stall_s, now - request.last_token_s)
            request.last_token_s = now
        for request in result.finished:
            self.outcomes[request.id].finished_s = now
            self._do(self.shaper.finish(request.id, now))
        self._start_step(name)
