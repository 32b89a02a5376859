"""Plan a step in which some requests prefill: which requests get how many tokens.

The rules are `engine.scheduler`'s. Decoding requests are one cohort and KV blocks are runs,
so planning a step costs time for its prefills only, regardless of the number of decoding requests.
"""

from collections import deque
from typing import Final

from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.replay.engine.hardware.kv_layout import KvLayout
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.timing.step_time import StepWork
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.engine.block_runs import RunPool
from forebay.replay.sim.engine.cohort import Cohort
from forebay.replay.sim.engine.decided import DecidedPrefills, step_of
from forebay.replay.sim.engine.request import ENDING, PREFILLING, SimRequest
from forebay.replay.sim.engine.runs import Run
from forebay.replay.sim.engine.several_groups import SeveralGroups
from forebay.replay.sim.engine.stalls import LongestSince

RELEASED: list[tuple[Run, int]] = []
PLANNED: Final = -1  # the planned step prefills or preempts
NOTHING: Final = -2  # no request can be scheduled
UNLIMITED: Final = 1 << 40


class Planner:
    """The WAITING and RUNNING requests and the KV blocks of one engine.

    Attributes:
        waiting: waiting requests, the next one first. With a decision: the new ones.
        arriving: requests that came after the next step was planned (asynchronous scheduling).
        running: running requests in the order of admission, in a dict for cheap removal.
        prefilling: running requests whose prompt is not fully computed, in the same order.
        cohort: all decoding requests.
        stalls: durations of past steps.
        work: tokens, contexts and chunks of the step planned last.
        sampling: requests whose prompt that step completes.
        preempted: True if that step preempted a request.
        groups: counts the blocks of several groups of layers, None for one group.
        decision: Forebay's scheduler, None for vLLM's own.
    """

    def __init__(self, limits: SchedulerLimits, num_blocks: int, layout: KvLayout) -> None:
        # KV cache and requests, by their state.
        self.limits = limits
        self.block_size = limits.block_size
        self.pool_blocks = num_blocks - 1
        self.groups = None if layout.one_kind else SeveralGroups(layout, num_blocks, limits)
        self.pool = RunPool(num_blocks if layout.one_kind else UNLIMITED, limits.block_size)
        self.cohort = Cohort(limits.block_size, limits.sliding_window)
        self.stalls = LongestSince()
        self.waiting: deque[SimRequest] = deque()
        self.arriving: list[SimRequest] = []
        self.running: dict[SimRequest, None] = {}
        self.prefilling: list[SimRequest] = []
        self.decision = DecidedPrefills(limits) if limits.pause_s else None
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        # The step that is planned.
        self.work = StepWork()
        self.sampling: list[SimRequest] = []
        self.preempted = False
        # Limits as numbers, because each step reads them.
        self._longest = limits.max_model_len
        self._caching = limits.enable_prefix_caching
        self._watermark_blocks = 0 if self.groups else int(limits.watermark * num_blocks)
        self._budget = limits.max_num_batched_tokens
        self._threshold = limits.long_prefill_token_threshold
        self._seats = limits.max_num_seqs
        self._chunked = limits.enable_chunked_prefill
        self._admitted = 0
        self._freed_too_late = 0
        self._in_flight = False

    def add(self, request: SimRequest, *, late: bool = False) -> None:
        """Queue a request (ValueError: it can never run).

        Args:
            late: the next step is planned already, so the request waits in `arriving`.
        """
        prompt, longest = request.prompt_tokens, self._longest
        if not 0 < prompt < longest:
            raise ValueError(f"{request!r}: the context holds {longest} tokens")
        if request.output_target < 1:
            raise ValueError(f"{request!r}: no output wanted")
        end = prompt + request.output_target
        request.last = (end if end < longest else longest) - 1
        request.shareable = 0
        if request.ids and self._caching:
            if request.block_tokens % self.block_size:  # engine blocks end inside the trace's
                hashes = hashes_of_ids(request.ids, request.block_tokens, prompt, self.block_size)
                request.ids = tuple(hashes)
                request.block_tokens = self.block_size
            per_id = request.block_tokens // self.block_size
            whole, named = prompt // self.block_size, len(request.ids) * per_id
            request.shareable = whole if whole < named else named
            if self.groups is not None and request.shareable:
                self.groups.begin(request)
        if late:
            self.arriving.append(request)
        else:
            self.waiting.append(request)

    @property
    def waiting_count(self) -> int:
        decision = self.decision
        return len(self.waiting) + (0 if decision is None else len(decision.steps))

    def plan(self, step: int, now: float, at: float, *, in_flight: bool = False) -> int:
        """Schedule `step`, which starts `now`: RUNNING first, then WAITING from the head.

        Returns PLANNED when the step prefills or preempts, and NOTHING when it is empty. Otherwise
        all requests only decode, until a request ends. Then the step is not recorded, except for
        the blocks it takes. Returns their number.

        Args:
            at: when the plan is made: `now`, or at the start of the step before.
            in_flight: the plan was made while the step before was running (asynchronous
                scheduling): the block that its tokens fill is not in the prefix cache yet.
        """
        self._in_flight = in_flight
        cohort, work, pool = self.cohort, self.work, self.pool
        work.chunks = []
        self.sampling = []
        self.preempted = False
        cap = self._threshold
        if cap and len(self.running) + self.waiting_count == 1:
            cap = 0  # alone
        if self.decision is not None:
            seats = self._seats - len(self.running)
            self.decision.decide(
                at, self.waiting, self.prefilling, cohort.size, seats, cap, self._look
            )
        # Running requests first, decodes and prefills alike. A shortage of blocks preempts.
        blocks = cohort.phases[step % self.block_size]
        chunks: list[tuple[SimRequest, int]] = []
        if self.prefilling or blocks > pool.free:
            chunks = self._chunks(step, now, cap)
            blocks = cohort.phases[step % self.block_size]
        work.tokens = work.sequences = work.sampled = cohort.size
        work.decode_context = cohort.offsets + cohort.size * step
        if cohort.window:
            cohort.slide(step)
            work.window_context = cohort.window_context(step)
        budget = self._budget - cohort.size
        if self.preempted:  # then nothing is admitted in this step
            pool.hold_back(self._freed_too_late)
            pool.free -= blocks
            self._compute_all(chunks)
            pool.hold_back(-self._freed_too_late)
        else:
            pool.free -= blocks
            budget -= self._compute_all(chunks)
            if self.decision is not None:
                self._admit_decided(self.decision, budget, cap)
            while self.waiting and budget > 0 and len(self.running) < self._seats:
                count = self._admit(self.waiting[0], budget, cap)
                if not count:
                    break
                self.waiting.popleft()
                budget -= count
            # Only decodes: the caller plans a stretch of such steps.
            if work.sequences == cohort.size > 0:
                return blocks
            if not work.sequences:
                return NOTHING
        work.sampled += len(self.sampling)
        return PLANNED

    def _compute_all(self, chunks: list[tuple[SimRequest, int]]) -> int:
        """Record the prefill chunks of running requests, and return their tokens."""
        tokens = 0
        for request, count in chunks:
            self._compute(request, count)
            tokens += count
        if self.sampling:
            self.prefilling = [
                request for request in self.prefilling if request.computed < request.tokens
            ]
        return tokens

    def _compute(self, request: SimRequest, count: int) -> None:
        """Record a prefill chunk, for which there are enough free blocks."""
        block_size, work = self.block_size, self.work
        before = request.computed
        request.computed = end = before + count
        self.pool.free += -end // block_size - -before // block_size
        shareable = request.shareable
        if shareable * block_size > before:
            full = end // block_size
            if full > shareable:
                full = shareable
            if full * block_size > before:
                self.pool.register(request.runs, request.ids, request.block_tokens, full)
        work.tokens += count
        work.sequences += 1
        if count == 1:
            work.decode_context += end
            window = self.cohort.window
            work.window_context += end if end < window else window
        else:
            work.chunks.append((count, before))
        if end == request.tokens:
            self.sampling.append(request)

    def finish(self, request: SimRequest) -> None:
        """Remove a request that produced its last token. It is not decoding any more."""
        if request not in self.running:  # preempted while its last token was being sampled
            if self.decision is None or request in self.waiting:
                self.waiting.remove(request)
            else:
                self.decision.steps.remove(step_of(request))
            return
        del self.running[request]
        block_size, last = self.block_size, request.last
        if self.groups is not None:
            self.groups.release(request)
        full = last // block_size
        uncached = 1 if last % block_size else 0
        if self._caching:
            self.pool.release(request.runs, full - request.shareable, uncached)
        else:
            self.pool.release_uncached(full + uncached)
        request.runs = RELEASED  # the driver keeps the request, not its runs

    def _preempt(self, step: int, now: float) -> int:
        """Move the last of RUNNING, which has no part in `step` yet, back to WAITING.

        Returns the number of uncached blocks among the blocks that it frees.
        """
        # Its tokens so far are kept. Which of them have KV depends on its phase.
        victim, _none = self.running.popitem()
        pending = self._in_flight and victim.phase != PREFILLING and victim.since < step - 1
        if victim.phase == PREFILLING:
            self.prefilling.remove(victim)
        elif victim.phase == ENDING:
            victim.computed = victim.last
        else:
            victim.tokens = victim.offset + step
            victim.computed = victim.tokens - 1
            self.cohort.leave(victim)
            victim.stall_s = max(victim.stall_s, self.stalls.since(victim.since))
            victim.gap_from = now  # its last token came with the step before
        # Full blocks stay cached for its return, the uncached rest is free at once.
        block_size, computed = self.block_size, victim.computed
        full = (computed - pending) // block_size
        uncached = -(-computed // block_size) - full
        if self._caching:
            victim.private = self.pool.release_for_now(
                victim.runs, victim.shareable, full - victim.shareable, uncached
            )
        else:
            self.pool.release_uncached(full + uncached)
        victim.rank = -1
        victim.loaded = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.preempted = True
        if self.decision is None:
            self.waiting.appendleft(victim)
        else:
            self.waiting.append(victim)
        return uncached

    def _chunks(self, step: int, now: float, cap: int) -> list[tuple[SimRequest, int]]:
        """Divide the step's budget among prefills, after one token for each decoding request.

        The budget always covers the decoding requests. A request is admitted only when budget is
        left after all requests before it, and no request before it needs more in a later step.

        While blocks are short, the last of RUNNING is preempted. The scheduler finds the shortage
        on its way along RUNNING, but preempts as many requests: while the remaining requests need
        more blocks than are free, at least one request does not get its blocks.
        """
        block_size, phases = self.block_size, self.cohort.phases
        victims: list[tuple[int, int]] = []  # free blocks before, uncached blocks that it freed
        while True:
            budget = self._budget - self.cohort.size
            blocks = phases[step % block_size]
            chunks = []
            for request in self.prefilling:
                before = request.computed
                count = request.tokens - before
                if 0 < cap < count:
                    count = cap
                if count > request.cap:
                    count = request.cap
                    if not count:
                        continue
                if self.groups is not None and self.groups.aligns:
                    behind = self.cohort.size if self._decodes_behind(request) else 0
                    count = self.groups.chunk(request, before, count, budget, behind)
                    if not count:
                        continue
                if count > budget:
                    count = budget
                    assert not self._decodes_behind(request), request
                    if count <= 0:
                        break
                budget -= count
                blocks += -(-(before + count) // block_size) - -(-before // block_size)
                chunks.append((request, count))
            free = self.pool.free
            if blocks <= free:
                # Uncached blocks are allocated first, except blocks of a victim that itself found
                # no free block: by the time it freed them, all others had got their blocks.
                self._freed_too_late = sum(
                    uncached for before, uncached in victims if blocks <= before
                )
                return chunks
            victims.append((free, self._preempt(step, now)))

    def _decodes_behind(self, request: SimRequest) -> bool:
        for other in reversed(self.running):
            if other is request:
                return False
            if other.phase >= 0:
                return True
        raise AssertionError(f"{request!r} is not running")

    def _admit_decided(self, decision: DecidedPrefills, budget: int, cap: int) -> None:
        """Admit the requests that the decision chose, as far as they fit."""
        while decision.admit and budget > 0 and len(self.running) < self._seats:
            count = self._admit(decision.admit[-1], budget, cap)
            if not count:
                return
            decision.admitted()
            budget -= count

    def _look(self, step: StepRequest, owed: int) -> int | None:
        """Return the cached tokens of a waiting request, or None if it does not fit now.

        Args:
            owed: tokens of blocks that are not free for it. -1: it need not fit.
        """
        request: SimRequest = step.handle
        step.tokens = request.tokens
        hits, _, in_free, _ = self.pool.find(request)
        computed = max(hits * self.block_size, request.loaded)
        if owed >= 0:
            spare = self.pool.free - -(-owed // self.block_size)
            if self.running:
                spare -= self._watermark_blocks
            if -(-request.tokens // self.block_size) - hits + in_free > spare:
                return None
        return computed

    def _first_chunk(self, request: SimRequest, computed: int, budget: int, cap: int) -> int:
        """Return the tokens of an admitted request's first step, 0 if it must wait."""
        count = min(request.tokens - computed, request.cap, cap if cap > 0 else request.tokens)
        if count > budget:
            count = budget if self._chunked else 0
        if count and self.groups is not None and self.groups.aligns:
            count = self.groups.chunk(request, computed, count, budget)
        return count

    def _admit(self, request: SimRequest, budget: int, cap: int) -> int:
        """Admit a waiting request. Returns its tokens in this step, 0 when it does not fit."""
        pool, block_size, tokens = self.pool, self.block_size, request.tokens
        hits, shared, in_free, path = self.pool.find(request)
        computed = max(hits * block_size, request.loaded)
        count = self._first_chunk(request, computed, budget, cap)
        if not count:
            return 0
        # Blocks for all of its tokens must be free now, and hits in the free list use free blocks.
        spare = pool.free - self._watermark_blocks if self.running else pool.free
        if -(-tokens // block_size) - hits + in_free > spare:
            return 0
        if self.groups is not None:
            self.groups.hold(request)
        # Nothing can fail from here on.
        self.running[request] = None
        self._admitted += 1
        request.rank = self._admitted
        request.runs = pool.take(path, shared, in_free - (hits - shared)) if path else []
        private = request.private
        if private is not None:
            if hits > shared:
                pool.take_private(private)
            request.private = None
        if not request.preemptions:
            if self._caching:
                self.prefix_queries += tokens
                self.prefix_hits += hits * block_size
            request.cached_tokens = hits * block_size
        pool.load(request, hits)
        request.computed = computed
        self._compute(request, count)
        if computed + count < tokens:
            self.prefilling.append(request)
        return count
