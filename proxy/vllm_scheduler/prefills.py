"""The prompts that an engine has not computed yet, as the decision sees them."""

from math import inf, isfinite
from typing import Any, Final

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.learn.step_cost import StepCost
from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.proxy.core.policy.engine_step import EngineSteps, StepLimits, StepPlan

TIMEOUT: Final = "forebay_timeout_s"
"""The key in `vllm_xargs` by which a request may say how soon it wants its first token."""
STARTABLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def step_cost(vllm_config: Any) -> StepCost:
    """Return the cost of steps to begin with: the slope follows from the model's dimensions."""
    text = vllm_config.model_config.hf_text_config

    def size(*names: str) -> int:
        """Return the first of these fields that is a number. Some models have a list."""
        values = (getattr(text, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    wide = size("moe_intermediate_size", "intermediate_size")
    if not (heads and hidden and wide):
        return StepCost()
    head = size("head_dim") or max(1, hidden // heads)
    kv_heads, experts = size("num_key_value_heads") or heads, size("num_experts_per_tok") or 1
    weights = 2 * hidden * head * (heads + kv_heads) + 3 * hidden * wide * experts
    return StepCost(slope=weights / (2.0 * heads * head))


class Prefills:
    """Plans the prefills of each step. Its caller reports the requests that come and go.

    Attributes:
        steps: the decision.
        is_broken: a change could not be followed, so `rebuild` has to come first.
    """

    def __init__(self, scheduler: Any, limits: StepLimits, cost: StepCost) -> None:
        self.steps = EngineSteps(limits, cost)
        self.is_broken = False
        self._scheduler = scheduler
        # All layers attend to all tokens, and have the same blocks.
        groups = scheduler.kv_cache_config.kv_cache_groups
        is_full = all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups)
        hashed = scheduler.kv_cache_manager.block_pool.hash_block_size
        self._is_plain = len(groups) == 1 and is_full and scheduler.block_size == hashed
        self._coalesces = (
            limits.by_due and self._is_plain and scheduler.kv_cache_manager.enable_caching
        )
        self._prompts: dict[str, StepRequest] = {}
        self._waiting: dict[str, StepRequest] = {}  # prompts in `steps`
        self._aside: dict[str, StepRequest] = {}  # wait for more than their turn
        self._stuck: list[StepRequest] = []  # found so while the plan was made
        self._adapters: set[int] | None = None  # adapters of running requests; None: any may come

    def came(self, request: Any) -> None:
        """Queue a request that has arrived, or that the engine has preempted or skipped."""
        try:
            prompt = self._prompt(request)
            prompt.tokens, prompt.computed = request.num_tokens, self._cached(request, 0)
            if request.status in STARTABLE:
                self._queue(request.request_id, prompt)
            else:
                self._aside[request.request_id] = prompt
        except Exception:  # the decision's fault must not become the engine's
            self._break()

    def went(self, request: Any) -> None:
        """Forget that a request waits."""
        try:
            if self._aside.pop(request.request_id, None) is None:
                self.steps.remove(self._waiting.pop(request.request_id))
        except Exception:  # as above
            self._break()

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._prompts.pop(request_id, None)

    def _break(self) -> None:
        self.is_broken = True
        self._scheduler.reports.fault("a change of the waiting requests could not be followed")

    def rebuild(self) -> None:
        """Queue again the requests that wait in the engine."""
        passed_over, self.is_broken = self.steps.passed_over, False
        self.steps = EngineSteps(self.steps.limits, self.steps.cost)
        self.steps.passed_over = passed_over
        self._prompts.clear()
        self._waiting.clear()
        self._aside.clear()
        for request in self._scheduler.waiting:
            self.came(request)

    def plan(self, cap: int) -> StepPlan:
        """Decide the next step.

        Args:
            cap: most tokens of one request. 0: no cap.
        """
        scheduler = self._scheduler
        # Requests that had to wait for a grammar or an adapter may be ready by now.
        self._adapters = self._running_adapters()
        for request_id, prompt in list(self._aside.items()):
            if not self._is_stuck(prompt.handle):
                del self._aside[request_id]
                self._queue(request_id, prompt)
        # Running requests: prompts that are half computed, and answers.
        decoding, prefilling = 0, []
        for request in scheduler.running:
            if request.is_prefill_chunk:
                prompt = self._prompt(request)
                prompt.tokens, prompt.computed = request.num_tokens, request.num_computed_tokens
                prefilling.append(prompt)
            else:
                decoding += self._decoded(request)
        sessions = scheduler.num_waiting_for_streaming_input
        seats = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        plan = self.steps.plan(
            scheduler.clock(),
            decoding,
            prefilling,
            self._look,
            max(0, seats - len(scheduler.running) - sessions),
            cap,
            self._shared if self._coalesces else None,
        )
        planned = {id(prompt) for prompt, _ in plan.running}
        plan.running += [(prompt, 0) for prompt in prefilling if id(prompt) not in planned]
        # Whoever is stuck makes way for the others from the next step on.
        for prompt in self._stuck:
            request_id = prompt.handle.request_id
            self.steps.remove(self._waiting.pop(request_id))
            self._aside[request_id] = prompt
        self._stuck.clear()
        return plan

    def _decoded(self, request: Any) -> int:
        """Return the tokens that a running request takes that only decodes, drafts included."""
        coming, computed = request.num_output_placeholders, request.num_computed_tokens
        # Tokens on their way may be the last ones.
        if coming and computed + 2 - coming >= request.num_prompt_tokens + request.max_tokens:
            return 0
        if not self._scheduler.num_spec_tokens:
            return 1
        # Drafts end where the context does.
        end = min(request.num_tokens_with_spec + coming, self._scheduler.max_model_len - 1)
        return max(0, int(end - computed))

    def _queue(self, request_id: str, prompt: StepRequest) -> None:
        self._waiting[request_id] = prompt
        self.steps.add(prompt)

    def _prompt(self, request: Any) -> StepRequest:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            waited_s = max(0.0, self._scheduler.wall_clock() - request.arrival_time)
            arrived_at = self._scheduler.clock() - waited_s
            prompt = self._prompts[request.request_id] = StepRequest(
                request, arrived_at, request.num_tokens, 0, request.priority,
                arrived_at + _timeout_s(request),
            )  # fmt: skip
        return prompt

    def _look(self, prompt: StepRequest, owed: int) -> int | None:
        """Return the cached tokens of a waiting request, or None if vLLM has no room for it."""
        request: Any = prompt.handle
        if self._is_stuck(request):
            self._stuck.append(prompt)
            return None
        # With asynchronous scheduling a last token may have come after the preemption.
        prompt.tokens = request.num_tokens
        if self._adapters is not None and request.lora_request is not None:
            self._adapters.add(request.lora_request.lora_int_id)
        cached = prompt.computed = self._cached(request, prompt.computed)
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        # vLLM itself decides of a request that is alone, or whose layers differ in their blocks.
        if not (scheduler.running and self._is_plain and self.steps.limits.by_due):
            return cached
        blocks = -(-(request.num_tokens - cached + owed) // scheduler.block_size)
        spare = getattr(manager, "watermark_blocks", 0)
        return cached if blocks + spare <= manager.block_pool.get_num_free_blocks() else None

    def _shared(self, waiting: StepRequest, leader: StepRequest) -> int:
        """Return the number of leading tokens that two prompts share, in whole blocks."""
        request: Any = waiting.handle
        mine, theirs = request.block_hashes, leader.handle.block_hashes
        if request.skip_reading_prefix_cache or not mine or not theirs or mine[0] != theirs[0]:
            return 0
        # vLLM computes the last token always.
        size: int = self._scheduler.block_size
        most: int = (request.num_tokens - 1) // size
        return min(common_run(mine, theirs, 1), most) * size

    def _is_stuck(self, request: Any) -> bool:
        """Return True if a request has to wait for more than its turn."""
        scheduler = self._scheduler
        if request.status not in STARTABLE and not scheduler._handle_blocked_waiting_request(
            request
        ):
            return True
        adapter = request.lora_request
        if self._adapters is None or adapter is None:
            return False
        most = scheduler.lora_config.max_loras
        return len(self._adapters) >= most and adapter.lora_int_id not in self._adapters

    def _running_adapters(self) -> set[int] | None:
        """Return the LoRA adapters in use.

        All running requests count. vLLM before 0.33 counts the requests of a step only, and then
        admits an adapter too many while a running request gets no tokens.
        """
        if not self._scheduler.lora_config:
            return None
        running = self._scheduler.running
        return {r.lora_request.lora_int_id for r in running if r.lora_request}

    def _cached(self, request: Any, before: int) -> int:
        """Return the number of leading tokens of a waiting request that are in the KV cache.

        Args:
            before: the number at the last look. Looking at their end is enough: a
                block is never evicted before the blocks behind it.
        """
        manager = self._scheduler.kv_cache_manager
        if request.num_computed_tokens:
            return int(request.num_computed_tokens)
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        hashes, count = request.block_hashes, before // self._scheduler.block_size
        if self._is_plain and 0 < count <= len(hashes):
            look = manager.block_pool.get_cached_block
            is_longer = count < len(hashes) and look(hashes[count], [0])
            if look(hashes[count - 1], [0]) and not is_longer:
                return before
        hit = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(hit[1])


def _timeout_s(request: Any) -> float:
    """Return the seconds after its arrival at which a request is due, if it says so."""
    parameters = request.sampling_params
    extra = parameters.extra_args if parameters is not None else None
    timeout = extra.get(TIMEOUT) if extra else None
    if isinstance(timeout, int | float) and isfinite(timeout) and timeout > 0:
        return float(timeout)
    return inf
