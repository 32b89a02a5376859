"""One engine behind its API server, in virtual time: a client sends requests and receives tokens.

They are the engine and the server of `forebay engine`. A driver calls `send` when a request leaves
the proxy, and `advance` when time reaches `next_at`.
"""

from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Final

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.kv_layout import WHOLE
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.timing.api_server import ApiProcess, ApiServer
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.skipping import SkippingEngine
from forebay.replay.sim.engine.stalls import LongestSince
from forebay.replay.sim.engine.stepping import SteppingEngine

# Unions, not protocols: compiled code then calls the first of each directly.
Engine = SkippingEngine | SteppingEngine
"""A simulated engine. `SteppingEngine` is the slow reference."""

IN: Final = 0  # the request reaches the engine
FIRST: Final = 1  # the client has the first token
END: Final = 2  # the client has the whole answer


class ServedEngine:
    """An engine and its API server.

    `first_token_s`, `finished_s` and `stall_s` of a request that `advance` has returned are those
    at the client.

    Attributes:
        engine: the engine itself.
        kv_tokens: number of tokens that its KV cache holds.
    """

    def __init__(self, engine: Engine, server: ApiServer) -> None:
        self.engine = engine
        self.kv_tokens = engine.kv_tokens
        self._server = server
        self._passages: list[tuple[float, int, int, SimRequest]] = []
        self._count = 0  # orders passages of one instant
        # Pauses of the streams of each process while it decoded a prompt, by their ends.
        self._pauses: dict[ApiProcess, LongestSince] = {}

    @property
    def busy_s(self) -> float:
        return self.engine.busy_s

    @property
    def preemptions(self) -> int:
        return self.engine.preemptions

    def send(self, request: SimRequest, now: float) -> None:
        """Send a request to the server."""
        self.enter(request, self.receive(request, now))

    def receive(self, request: SimRequest, now: float) -> float:
        """Take a request into the API server, and return when the engine may have it."""
        process = request.process = self._server.next_process()
        return process.receive(request.prompt_tokens, now)

    def enter(self, request: SimRequest, at: float) -> None:
        """Let the engine have a request that the API server has received."""
        self._pass(at, IN, request)

    def next_at(self) -> float:
        """Return when `advance` is due if no request is sent before, inf without work."""
        due = self.engine.next_at()
        if self._passages and self._passages[0][0] < due:
            return self._passages[0][0]
        return due

    def advance(self, now: float) -> tuple[list[SimRequest], list[SimRequest]]:
        """Pass `now` == `next_at`.

        Returns requests whose first token a client has now, and requests answered completely.
        """
        engine, passages = self.engine, self._passages
        first: list[SimRequest] = []
        finished: list[SimRequest] = []
        # A request that arrives as a step ends takes part in the next plan.
        while passages and passages[0][0] <= now:
            _, _, kind, request = heappop(passages)
            if kind == IN:
                engine.add(request, now)
            elif kind == FIRST:
                first.append(request)
            else:
                finished.append(request)
        if engine.next_at() <= now:
            self._step(now)
        return first, finished

    def _step(self, now: float) -> None:
        """Let the engine pass its due time, and send the tokens that it produced."""
        engine = self.engine
        first, finished = engine.advance(now)
        for request in first:
            assert request.process is not None
            request.first_token_s = at = request.process.answer(request.prompt_tokens, now)
            self._pass(at, FIRST, request)
        for request in reversed(first):  # a step's pause counts from its earliest first token
            process = request.process
            assert process is not None
            if process not in self._pauses:
                self._pauses[process] = LongestSince()
            self._pauses[process].push(request.first_token_s, process.pause_s(now))
        for request in finished:
            process = request.process
            assert process is not None
            request.stall_s = max(
                request.stall_s, self._pauses[process].since(request.first_token_s)
            )
            at = process.sent_at(now)
            if at < request.first_token_s:
                at = request.first_token_s
            request.finished_s = at
            self._pass(at, END, request)
        self._server.load(engine.tokens_per_s, engine.streams, now)

    def _pass(self, at: float, kind: int, request: SimRequest) -> None:
        self._count += 1
        heappush(self._passages, (at, self._count, kind, request))


def can_skip(config: EngineConfig, *, hopeful: bool = False) -> bool:
    """True if `SkippingEngine` can simulate this engine. Otherwise every step is computed.

    Args:
        hopeful: the caller starts over where the engine raises `KvDecides`.
    """
    limits = config.limits()
    if hopeful:
        limits = replace(limits, groups=(WHOLE,), tokens_in_flight=0)
    skippable = SchedulerLimits(
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        enable_prefix_caching=limits.enable_prefix_caching,
        block_size=limits.block_size,
        watermark=limits.watermark,
        # Rules of scheduling by priority and of recurrent states, which `skippable` does not have.
        recaches_boundary=limits.recaches_boundary,
        minds_skipped_victims=limits.minds_skipped_victims,
        passes_self_preempted=limits.passes_self_preempted,
        sliding_window=limits.sliding_window,
        pause_s=limits.pause_s,
    )
    return limits == skippable and config.release.uncached_blocks_first


def served_engine(
    config: EngineConfig, *, exact: bool = False, hopeful: bool = False
) -> ServedEngine:
    """Return an idle engine and its API server.

    Args:
        exact: compute every step, even if the engine can skip some.
        hopeful: the caller starts over where the engine raises `KvDecides`.
    """
    step = exact or not can_skip(config, hopeful=hopeful)
    engine: Engine = SteppingEngine(config) if step else SkippingEngine(config)
    return ServedEngine(engine, config.api_server())


def run_alone(engine: ServedEngine, request: SimRequest, now: float) -> float:
    """Send a request to an idle engine, and return the time at which it is idle again."""
    engine.send(request, now)
    while (at := engine.next_at()) < inf:
        now = at
        engine.advance(now)
    return now
