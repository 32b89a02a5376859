"""The engine core: scheduler, block pool and step-time model behind two calls for each step.

Time is an argument. A driver (an asyncio server, a discrete-event simulator, a test) calls
`start_step`, lets the returned seconds pass, calls `finish_step` and delivers the tokens. Requests
that are added or aborted in between take effect in the next step, as in vLLM.
"""

from dataclasses import dataclass
from typing import ClassVar

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduled, Scheduler
from forebay.replay.engine.timing.api_server import ApiServer

IDLE_S = 0.001
"""Seconds that vLLM's loop sleeps while all requests wait for blocks (`_process_engine_step`)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step.

    Attributes:
        duration_s: seconds the step took.
        tokens: tokens computed, prefill and decode.
        outputs: requests that got tokens, in scheduling order: one each, or several with
            speculative decoding. The driver has yet to set their `first_token_s` and
            `last_token_s`.
        finished: requests of `outputs` that are done and have left the engine.
        aborted: requests aborted since the previous step. They have left the engine.
    """

    duration_s: float
    tokens: int
    outputs: list[EngineRequest]
    finished: list[EngineRequest]
    aborted: list[EngineRequest]


class EngineCore:
    """One simulated engine, without clock, I/O or randomness."""

    SCHEDULER: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model, self.gpu = config.model_spec, config.gpu_spec
        self.timing = config.timing()
        self.speculation = config.speculation
        self.limits = config.limits()
        self.pool = BlockPool(
            config.kv_budget.blocks, uncached_first=config.release.uncached_blocks_first
        )
        self.scheduler = self.SCHEDULER(self.limits, self.pool)
        self.prompt_tokens = 0  # prompts of requests that produced their first token
        self.generation_tokens = 0
        self._caches_new = self.speculation is not None and config.release.caches_new_tokens
        self.drafted = [0] * (1 + self.limits.proposed_tokens)  # proposals by accepted tokens
        self.steps = 0
        self.busy_s = 0.0
        self._requests: dict[str, EngineRequest] = {}
        self._step: Scheduled | None = None
        self._duration_s = 0.0
        self._step_s = 0.0  # the part of `_duration_s` without admissions
        self._admitting_s = 0.0  # delays the next step
        self._aborted: list[EngineRequest] = []

    def __repr__(self) -> str:
        return (
            f"<EngineCore {self.model.name} on {self.gpu.name}: {self.running} running, "
            f"{self.waiting} waiting, KV {self.kv_usage:.1%}, {self.steps} steps>"
        )

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens that the KV cache holds."""
        return self.config.kv_budget.pool_tokens(self.config.context)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._loads

    def api_server(self) -> ApiServer:
        """Return the API server in front of the engine, without any request."""
        return self.config.api_server(self.timing.calibration)

    @property
    def tokens_per_s(self) -> float:
        """Return the chunks of output a second of the running step, 0 without one.

        A chunk is a token, or with speculative decoding the tokens that a step gives a request.
        """
        step, seconds = self._step, self._duration_s
        return step.work.sampled / seconds if step is not None and seconds else 0.0

    @property
    def streams(self) -> int:
        """Return the number of requests that get a token from the running step."""
        return self._step.work.sampled if self._step is not None else 0

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        return self.pool.usage

    @property
    def prefix_queries(self) -> int:
        return self.scheduler.prefix_queries

    @property
    def prefix_hits(self) -> int:
        return self.scheduler.prefix_hits

    @property
    def _loads(self) -> bool:
        """Return True while blocks are loaded, so that a step may be empty."""
        return self.scheduler.loading is not None and self.scheduler.loading.copies.busy

    @property
    def preemptions(self) -> int:
        return self.scheduler.preemptions

    def unfinished(self) -> list[EngineRequest]:
        """Return the requests in the engine, oldest first."""
        return list(self._requests.values())

    def add(self, request: EngineRequest) -> None:
        """Queue a request (ValueError: it can never run, which callers check first)."""
        if not 0 < request.prompt_tokens < self.limits.max_model_len:
            raise ValueError(f"{request!r}: the context holds {self.limits.max_model_len} tokens")
        if request.output_target < 1:
            raise ValueError(f"{request!r}: output_target is below 1")
        if request.id in self._requests:
            raise ValueError(f"{request!r}: the id is in use")
        self._requests[request.id] = request
        self._admitting_s += self.timing.admit_s(request.prompt_tokens)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a waiting or running request. False if the engine does not have it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.aborted = True
        self.scheduler.remove(request)
        self._aborted.append(request)
        return True

    def start_step(self, now: float) -> float:
        """Schedule a step, and return the seconds until `finish_step` is due."""
        if self._step is not None:
            raise RuntimeError("a step is running")
        step = self._step = self.scheduler.schedule(now, self._admitting_s)
        if not step.tokens and not step.preempted and self._requests and not self._loads:
            raise RuntimeError(f"nothing can be scheduled: {self!r}")
        return self._lasts(step)

    def _lasts(self, step: Scheduled) -> float:
        """Set and return the seconds of the step that starts, with the admissions before it."""
        timing = self.timing
        # A step that preempts may schedule no request: it takes only the CPU's time.
        if step.tokens:
            self._step_s = timing.step_s(step.work)
        else:
            self._step_s = timing.calibration.step_s if step.preempted else IDLE_S
        self._duration_s, self._admitting_s = self._admitting_s + self._step_s, 0.0
        return self._duration_s

    def finish_step(self) -> StepResult:
        """Return the tokens of the running step and end the requests that are done."""
        step = self._step
        if step is None:
            raise RuntimeError("no step is running")
        self._step = None
        longest = self.limits.max_model_len
        outputs, finished = self._outputs(step), []
        for request in outputs:
            count, rejected = self._yield(step, request) if step.drafted else (1, 0)
            self._arrived(request, count, rejected)
            self.generation_tokens += count
            # Its first token ends the prompt, its last the request.
            tokens = request.tokens
            produced = tokens - request.prompt_tokens
            if produced == 1:
                self.prompt_tokens += request.prompt_tokens
            if produced >= request.output_target:
                finished.append(request)
            elif tokens >= longest:
                request.finish_reason = "length"
                finished.append(request)
        return self._ended(step, outputs, finished)

    def _outputs(self, step: Scheduled) -> list[EngineRequest]:
        """Return the requests that get tokens from a step that has ended."""
        if self._aborted:
            return [request for request in step.sampled if not request.aborted]
        return step.sampled

    def _arrived(self, request: EngineRequest, count: int, rejected: int) -> None:
        """Record that a request got `count` tokens, and that some proposals were rejected."""
        request.computed -= rejected
        request.drafts = self.limits.proposed_tokens
        request.tokens += count
        if self._caches_new and request.blocks:
            full = min(request.computed, request.tokens - 1) // self.limits.block_size
            self.scheduler.tables.register(request, full)

    def _yield(self, step: Scheduled, request: EngineRequest) -> tuple[int, int]:
        """Return the tokens that the step gives a request, and its rejected proposals."""
        proposed, speculation = step.drafted.get(request, 0), self.speculation
        if not proposed or speculation is None:
            return 1, 0
        accepted = 0  # stays 0 for a padded request: its proposals are no tokens
        if request not in step.admitted:
            seed = self.config.seed or 0
            accepted = speculation.accepted(proposed, seed, request.id, request.tokens)
            self.drafted[accepted] += 1
        last = min(request.prompt_tokens + request.output_target, self.limits.max_model_len)
        return min(1 + accepted, max(1, last - request.tokens)), proposed - accepted

    def _ended(
        self, step: Scheduled, outputs: list[EngineRequest], finished: list[EngineRequest]
    ) -> StepResult:
        """Remove finished requests, update the counters and return the step's outcome."""
        self.scheduler.finish(finished)
        for request in finished:
            del self._requests[request.id]
        self.steps += 1
        if step.tokens or step.preempted:
            self.busy_s += self._duration_s
        if self.scheduler.planned is not None:
            self.scheduler.planned.lessons.observe(self._step_s, step.work.chunks)
        aborted, self._aborted = self._aborted, []
        return StepResult(self._duration_s, step.work.tokens, outputs, finished, aborted)

    def step(self, now: float) -> StepResult:
        """Start and finish a step at once, for drivers without events during a step."""
        self.start_step(now)
        return self.finish_step()
