"""Async scheduling, vLLM's default on a GPU: plan step N+1 before step N's tokens are known.

A token that is being sampled is a placeholder. It counts as one output token, so that its successor
can be planned. The consequences are vLLM's:
- A request that ends unexpectedly (EOS, abort) is computed once more for nothing. An end by
  max_tokens is known in advance.
- A request that arrives during step N takes part in step N+2 at the earliest.
- A block of output enters the prefix cache when its tokens arrive.
The module follows vllm/v1/core/sched/async_scheduler.py and EngineCore.step_with_batch_queue of
vLLM 0.32.
"""

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduled, Scheduler


class AsyncScheduler(Scheduler):
    """A scheduler for tokens that arrive after the next step is planned."""

    def arrived(self, request: EngineRequest, count: int = 1, rejected: int = 0) -> None:
        """Record that the oldest placeholders of `request` became tokens, or were rejected."""
        request.tokens += count
        if request.placeholders:  # 0: it was preempted, and its prefill includes the tokens
            request.placeholders -= count + rejected
            request.computed -= rejected
            full = (request.computed - request.placeholders) // self._block_size
            self.tables.register(request, full)

    def finish(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            if not request.blocks:  # it was preempted while its last token was being sampled
                self.waiting.remove(request)
        super().finish([request for request in requests if request.blocks])

    def settle(self, step: Scheduled) -> None:
        """Record that a step has ended, and no longer reads its blocks."""
        for request, count in step.tokens.items():
            request.in_flight -= count

    def _commit(self, step: Scheduled) -> None:
        super()._commit(step)
        if self.tables.several:
            for request, count in step.tokens.items():
                request.in_flight += count
        for request in step.sampled:
            request.placeholders += 1 + step.drafted.get(request, 0)
            request.drafts = self._proposed


class AsyncEngineCore(EngineCore):
    """An engine core that plans the next step while one is running."""

    SCHEDULER = AsyncScheduler
    scheduler: AsyncScheduler

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._next: Scheduled | None = None

    @property
    def has_work(self) -> bool:
        """True also for a planned step whose requests have all ended: it still runs."""
        return super().has_work or bool(self._next and self._next.tokens)

    def start_step(self, now: float) -> float:
        """Start the planned step and plan the next. Return the seconds until `finish_step`."""
        if self._step is not None:
            raise RuntimeError("a step is running")
        step = self._next
        while step is None or not step.tokens:  # an empty step takes no time on the GPU
            step = self.scheduler.schedule(now, self._admitting_s)
            if not step.tokens and not step.preempted:
                if self._loads or not self._requests:
                    break
                raise RuntimeError(f"nothing can be scheduled: {self!r}")
        self._step = step
        admitting_s = self._admitting_s
        self._next = self.scheduler.schedule(now, admitting_s) if self._requests else None
        return self._lasts(step)

    def _outputs(self, step: Scheduled) -> list[EngineRequest]:
        if self.scheduler.tables.several:
            self.scheduler.settle(step)
        return [request for request in step.sampled if self._requests.get(request.id) is request]

    def _arrived(self, request: EngineRequest, count: int, rejected: int) -> None:
        self.scheduler.arrived(request, count, rejected)


def new_core(config: EngineConfig) -> EngineCore:
    """Return the engine core that `config` asks for."""
    return AsyncEngineCore(config) if config.asynchronous else EngineCore(config)
