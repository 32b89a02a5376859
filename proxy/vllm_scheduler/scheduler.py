"""vLLM's own scheduler, with the order and the size of prefills decided by the core.

vLLM's `schedule()` stays as it is: places, KV blocks, prefix hits, preemption, adapters,
connectors, encoders and drafts. It asks two things of this class. Its queue shows the requests that
may start in this step (`waiting`), and `_mamba_block_aligned_split` limits the tokens of each
request. vLLM calls this method for each request of both passes, to end a chunk with a block where
the model needs that. A chunk of 0 tokens is left out of the step, in all versions since 0.26.
"""

import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from forebay.proxy.core.learn.step_cost import Chunk
from forebay.proxy.core.policy.engine_step import StepLimits
from forebay.proxy.vllm_scheduler.prefills import Prefills, step_cost
from forebay.proxy.vllm_scheduler.reports import Reports
from forebay.proxy.vllm_scheduler.settings import check_engine, read_pause
from forebay.proxy.vllm_scheduler.waiting import Waiting

EMPTY_STEPS: Final = 3
"""After this many steps without a token, although requests wait, vLLM plans one itself. Two are
usual with asynchronous scheduling: the last tokens are then on their way."""


class BoundedScheduler(Scheduler):
    """Gives vLLM's scheduler the decision of each step, and learns from its time.

    Attributes:
        clock: returns seconds, never less than before.
        wall_clock: returns seconds since 1970, as vLLM's `arrival_time`.
        prefills: the decision, and the requests as it sees them.
        reports: what operators see of it.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    wall_clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Set up vLLM's scheduler with its own arguments, and the limits on its steps.

        Raises:
            ValueError: a bad setting, or an engine that is not supported.
        """
        pause_s = read_pause(vllm_config.additional_config)
        check_engine(vllm.__version__, vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        # With this attribute set, vLLM calls `_mamba_block_aligned_split` for each chunk. The
        # method below shortens the chunk, and aligns it only if vLLM would have aligned it.
        self._is_aligned: bool = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split: bool = True
        self.reports = Reports(getattr(self.parallel_config, "data_parallel_index", 0), pause_s)
        self.prefills = Prefills(self, self.limits(pause_s), step_cost(vllm_config))
        self.waiting = Waiting(self.prefills.came, self.prefills.went)
        self._caps: dict[str, int] = {}  # tokens of prefills in this step; of others, no limit
        self._empty_steps = 0
        self._bound_s = inf
        # Steps whose end is awaited: vLLM's plan, its start, and the chunks of prompts.
        self._begun: deque[tuple[Any, float, list[Chunk]]] = deque(maxlen=64)
        self._ended_at = -inf

    def limits(self, pause_s: float) -> StepLimits:
        """Return the limits of each step."""
        return StepLimits(
            pause_s=pause_s,
            step_tokens=self.max_num_scheduled_tokens,
            block_tokens=self.block_size,
            by_priority=self.policy == SchedulingPolicy.PRIORITY,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step."""
        began_at = self.clock()
        own = self._empty_steps >= EMPTY_STEPS or not self._decide()
        if own:
            self._leave_to_vllm()
        output = super().schedule(*args, **kwargs)
        self.waiting.startable.clear()
        # Remember the prompt tokens of the step, to learn from its time.
        counts = output.num_scheduled_tokens
        if not output.total_num_scheduled_tokens:
            self._empty_steps = self._empty_steps + 1 if len(self.waiting) else 0
            return output
        self._empty_steps = 0
        if not own:
            requests, chunks = self.requests, []
            for request_id in self._caps:
                if count := counts.get(request_id):
                    chunks.append((count, requests[request_id].num_computed_tokens - count))
            self._begun.append((output, began_at, chunks))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Learn from the time of a step, and let vLLM apply its results."""
        self._learn(scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *cached: int, **more: int
    ) -> int:
        """Return the number of tokens that a request gets, at most as many as vLLM gives it."""
        count: int = num_new_tokens
        most = self._caps.get(request.request_id)
        if most is not None:
            place = request.num_computed_tokens + sum(cached) + sum(more.values())
            # A prompt that must not be cut is computed whole, or not yet.
            if most and self._is_whole(request):
                most = count
            # An answer that begins right away has drafts behind its last token.
            if request.num_tokens - place > most or not most:
                count = min(count, most)
        if not count or not self._is_aligned:
            return count
        split: int = super()._mamba_block_aligned_split(request, count, *cached, **more)
        return split

    def _is_whole(self, request: Any) -> bool:
        """Return True if vLLM would not let a chunk of this request be cut."""
        if not self.scheduler_config.enable_chunked_prefill:
            return True
        # Before 0.29 vLLM asks for the end of a chunk after it has looked at its images.
        return not hasattr(self, "_reserve_prefill_lookahead") and bool(request.has_encoder_inputs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Forget a request that has ended."""
        self.prefills.ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _decide(self) -> bool:
        """Plan the prefills of the step. Returns False after a fault."""
        try:
            if self.prefills.is_broken:
                self.prefills.rebuild()
            plan = self.prefills.plan(self._threshold())
        except Exception:  # a fault of the decision must not become one of the engine
            self.prefills.is_broken = True
            self.reports.fault("a step could not be planned, so vLLM plans it")
            return False
        self._bound_s = plan.bound_s + self.prefills.steps.cost.base_s
        caps, startable = self._caps, self.waiting.startable
        caps.clear()
        for prompt, count in plan.running:
            caps[prompt.handle.request_id] = count
        for prompt, count in plan.admit:
            request: Any = prompt.handle
            # A cached prefix may be lost within the step, and a last token may come after a
            # preemption. Only a bound limits the tokens then.
            is_whole = plan.bound_s == inf and count >= prompt.tokens - prompt.computed
            caps[request.request_id] = request.num_tokens if is_whole else count
            startable.append(request)
        return True

    def _leave_to_vllm(self) -> None:
        """Let vLLM plan this step in its own order, without limits."""
        self._empty_steps = 0
        self._caps.clear()
        if self.policy == SchedulingPolicy.PRIORITY:
            waiting = sorted(self.waiting)
        else:
            waiting = sorted(self.waiting, key=lambda request: request.arrival_time)
        self.waiting.startable.extend(waiting)

    def _threshold(self) -> int:
        """Return the `--long-prefill-token-threshold` of this step, 0 without one."""
        threshold: int = self.scheduler_config.long_prefill_token_threshold
        if threshold and hasattr(self, "adaptive_long_prefill_threshold"):  # from 0.31 on
            count = sum(self.get_request_counts())
            if count <= 1:
                return 0
            if self.adaptive_long_prefill_threshold:
                share: int = self.scheduler_config.max_num_batched_tokens // count
                return max(threshold, share)
        return threshold

    def _learn(self, output: Any) -> None:
        """Learn from the time of a step. Steps end in the order in which they were planned."""
        if not output.total_num_scheduled_tokens:
            return
        now, before = self.clock(), self._ended_at
        self._ended_at = now
        while self._begun and self._begun[0][0] is not output:
            if all(begun[0] is not output for begun in self._begun):
                return  # vLLM planned it
            self._begun.popleft()
        if not self._begun:
            return
        _, began_at, chunks = self._begun.popleft()
        seconds = now - max(before, began_at)
        steps = self.prefills.steps
        steps.cost.observe(seconds, chunks)
        self.reports.step(now, seconds, self._bound_s, steps.passed_over)


class AsyncBoundedScheduler(BoundedScheduler, AsyncScheduler):
    """The same, above vLLM's scheduler for asynchronous scheduling."""


def ForebayScheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> BoundedScheduler:
    """Return the scheduler for an engine. vLLM calls what `--scheduler-cls` names like a class."""
    chosen = (
        AsyncBoundedScheduler if vllm_config.scheduler_config.async_scheduling else BoundedScheduler
    )
    return chosen(vllm_config, *args, **kwargs)
