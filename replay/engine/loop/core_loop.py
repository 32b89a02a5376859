"""Step an engine core in real (or virtual) time and deliver each token to its request's sink.

One task runs the steps. Step boundaries lie on the simulated clock: a step starts exactly where the
previous one ended. Lateness of this process never accumulates, because the next sleep is shorter.
The lateness is a metric, because a simulation that cannot keep up must show it.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Protocol

from forebay.replay.engine.engine import EngineCore, StepResult
from forebay.replay.engine.loop.metrics import EngineMetrics
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.api_server import ApiProcess


class Unavailable(Enum):
    """Why the engine serves no request: over a queue limit, shutting down or dead."""

    QUEUE_FULL = "max_num_queued_reqs"
    BACKLOG_FULL = "max_num_queued_tokens"
    SHUTTING_DOWN = "shutting down"
    ENGINE_DEAD = "engine dead"


class Sink(Protocol):
    """The receiver of a request's tokens. The step loop calls it: it must not block."""

    def push(self, produced: int) -> None:
        """Take note that `produced` tokens exist now."""

    def end(self, produced: int, reason: str) -> None:
        """End the answer after `produced` tokens for `reason`."""

    def fail(self, why: Unavailable) -> None:
        """End without further tokens: the engine is gone."""


class EngineLoop:
    """Drives one `EngineCore` behind its API server. Times are simulated seconds since the start.

    Attributes:
        server: the API server, which delays requests and tokens.
        after_step: called when a step is done, before its tokens are delivered.
        died: set when an injected fault killed the engine.
        draining: it accepts no more requests.
        backlog_tokens: prompt tokens of requests without a first token.
    """

    def __init__(self, core: EngineCore, metrics: EngineMetrics, time_scale: float = 1.0) -> None:
        self.core = core
        self.metrics = metrics
        self.server = core.api_server()
        self.after_step: Callable[[], None] | None = None
        self.died = asyncio.Event()
        self.draining = False
        self._idle = asyncio.Event()
        self._scale = time_scale
        self._clock = asyncio.get_running_loop().time
        self._born = self._clock()
        self._wake = asyncio.Event()
        self.backlog_tokens = 0
        self._last_end_s = math.nan  # not equal to any time
        # Tokens on their way through the API server: when they are out, whose, how many, and why
        # the answer ends with them.
        self._outbox: deque[tuple[float, EngineRequest, int, str | None]] = deque()
        self._sending: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return (self._clock() - self._born) * self._scale

    def wall_s(self, simulated_s: float) -> float:
        return simulated_s / self._scale

    async def receive(self, prompt_tokens: int, *, text: bool) -> ApiProcess:
        """Wait until the API server has read and tokenized a prompt, and return the process."""
        process, now = self.server.next_process(), self.now()
        await asyncio.sleep(self.wall_s(process.receive(prompt_tokens, now, text=text) - now))
        return process

    def add(self, request: EngineRequest) -> None:
        """Queue a request whose `sink` is a Sink. The next step can include it."""
        self.core.add(request)
        self.backlog_tokens += request.prompt_tokens
        self._wake.set()

    def abort(self, request: EngineRequest) -> None:
        """Drop a request whose client has left, and its unsent tokens."""
        if self.core.abort(request.id):
            self._leave_backlog(request)
        request.aborted = True

    def abort_all(self) -> None:
        """End every request with finish reason "abort", as vLLM does on SIGTERM."""
        self._send_until(math.inf)
        for request in self.core.unfinished():
            self.abort(request)
            self.metrics.success["abort"] += 1
            request.sink.end(request.output_tokens, "abort")

    async def drain(self, timeout_s: float) -> None:
        """Accept no more requests and let the present ones finish within `timeout_s`."""
        self.draining = True
        if self.core.has_work:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.wall_s(timeout_s)):
                    await self._idle.wait()

    def die(self) -> None:
        """End like a crashed engine process: every request fails and `run` returns."""
        self.died.set()
        self._wake.set()
        self._send_until(math.inf)
        for request in self.core.unfinished():
            self.abort(request)
            request.sink.fail(Unavailable.ENGINE_DEAD)

    async def run(self) -> None:
        """Step while there is work and sleep otherwise, until cancelled or dead."""
        end_s = 0.0
        while not self.died.is_set():
            if not self.core.has_work:
                self._wake.clear()
                self._idle.set()
                await self._wake.wait()
                self._idle.clear()
                end_s = max(end_s, self.now())
                continue  # the request that woke the loop may have been aborted
            start_s = end_s
            end_s += self.core.start_step(start_s)
            self.server.load(self.core.tokens_per_s, self.core.streams, start_s)
            # A sleep of 0 s still serves sockets, so that a late engine stays reachable.
            await asyncio.sleep(max(0.0, self._born + end_s / self._scale - self._clock()))
            self._note_lag(end_s)
            result = self.core.finish_step()
            self.metrics.step_tokens.observe(result.tokens)
            if self.after_step is not None:
                self.after_step()
            self._deliver(result, end_s)

    def _note_lag(self, due_s: float) -> None:
        lag_s = max(0.0, self.now() - due_s)
        self.metrics.lag_s = lag_s
        self.metrics.step_lag.observe(lag_s)
        if lag_s > self.metrics.max_lag_s:
            self.metrics.max_lag_s = lag_s

    def _deliver(self, result: StepResult, now: float) -> None:
        last_end_s, self._last_end_s = self._last_end_s, now
        inter_token = self.metrics.inter_token
        finished = set(map(id, result.finished)) if result.finished else ()
        steady = 0  # requests with a token in the previous step too: one observation for all
        # The API server decodes the prompts behind first tokens, then it sends the later tokens.
        for request in sorted(result.outputs, key=lambda request: request.output_tokens > 1):
            last_s = request.last_token_s
            if last_s == last_end_s:
                steady += 1
            elif last_s >= 0:
                inter_token.observe(now - last_s)
            else:
                self._leave_backlog(request)
                request.first_token_s = now
                self.metrics.first_token(request, now)
            request.last_token_s = now
            if not finished or id(request) not in finished:
                self._send(request, now, None)
        # Count the steady requests, and end the others.
        if steady:
            inter_token.observe(now - last_end_s, steady)
        for request in result.finished:
            self.metrics.finished(request, now)
            self._send(request, now, request.finish_reason)
        if result.finished and not self.core.has_work:
            self.server.load(0.0, 0, now)

    def _send(self, request: EngineRequest, now: float, reason: str | None) -> None:
        """Pass the tokens of a request through the API server. `reason` ends the answer."""
        produced, process = request.output_tokens, request.process
        if process is None:
            at_s = now
        elif produced == 1:
            at_s = process.answer(request.prompt_tokens, now)
        else:
            at_s = process.sent_at(now)
        if self._outbox and self._outbox[-1][0] > at_s:
            at_s = self._outbox[-1][0]  # another process is slower: streams keep their order
        if at_s <= self.now() and not self._outbox:
            _hand_over(request, produced, reason)
            return
        self._outbox.append((at_s, request, produced, reason))
        if self._sending is None:
            self._send_later(at_s)

    def _send_later(self, at_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._sending = loop.call_at(self._born + at_s / self._scale, self._send_due)

    def _send_due(self) -> None:
        assert self._sending is not None
        # A timer may fire a hair early: the first token is due even then.
        self._send_until(max(self.now(), self._outbox[0][0]) if self._outbox else math.inf)

    def _send_until(self, due_s: float) -> None:
        """Hand over the tokens that are out of the API server."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        outbox = self._outbox
        while outbox and outbox[0][0] <= due_s:
            _, request, produced, reason = outbox.popleft()
            _hand_over(request, produced, reason)
        if outbox:
            self._send_later(outbox[0][0])

    def _leave_backlog(self, request: EngineRequest) -> None:
        """Subtract the prompt of a request without a first token from the backlog."""
        if request.first_token_s < 0:
            self.backlog_tokens -= request.prompt_tokens


def _hand_over(request: EngineRequest, produced: int, reason: str | None) -> None:
    if request.aborted:
        return
    if reason is None:
        request.sink.push(produced)
    else:
        request.sink.end(produced, reason)
