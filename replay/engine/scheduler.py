"""Decide how many tokens of which requests the next step computes, as vLLM 0.33's v1 scheduler.

The rules, in order:
1. RUNNING requests get tokens first, in the order of their admission, prefills and decodes alike,
   until the token budget is spent. A request without free blocks preempts another: the last in
   RUNNING (fcfs) or the worst by (priority, arrival). The preempted request loses its blocks,
   starts over and goes to the head of the queue.
2. If no request was preempted, WAITING requests follow from the head: a prefix-cache lookup, then
   admission if enough blocks are free for the *whole* request (or, without
   scheduler_reserve_full_isl, for its next tokens). No request overtakes a head that does not fit.
3. Scheduled tokens count as computed at once, and full blocks enter the prefix cache before they
   are computed. A request whose tokens are all computed produces one token at the end of the step.
4. With speculative decoding, a decoding request also gets its proposed tokens. Rejected tokens are
   computed again. A prompt of which all but one token are cached is padded with proposals.
5. With prefill_schedule_interval N, the N - 1 steps after a step that prefilled only decode, unless
   the last step free to prefill left requests waiting.
6. With --kv-offloading-size, a prompt whose next blocks are copied in the host's memory waits until
   they are loaded (`LoadingQueue`).

`vllm_versions` names the rules of older versions. With --scheduler-cls forebay, `PlannedQueue`
orders WAITING and caps each prefill.

The scheduler has no clock, no randomness and no text. A request that arrives during a step waits
for the next one.
"""

from dataclasses import dataclass, field

from forebay.replay.engine.kv_blocks.groups import tables_of
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_time import StepWork
from forebay.replay.engine.waiting import LoadingQueue, PlannedQueue, PrefillInterval, WaitingQueue


@dataclass(slots=True)
class Scheduled:
    """One step: the requests in it and their tokens.

    Attributes:
        tokens: scheduled tokens of each request, in scheduling order.
        drafted: proposed tokens among them, of requests that have such tokens.
        sampled: the requests that produce a token at the end of the step, in the same order.
        admitted: the requests that moved from WAITING to RUNNING.
        preempted: the requests that moved from RUNNING to WAITING.
        prefills: True if it admits a request with more to compute than its last token, or preempts
            a request that it had given tokens of its prompt.
        work: tokens, contexts and chunks of the step, for the step-time model.
    """

    tokens: dict[EngineRequest, int] = field(default_factory=dict)
    drafted: dict[EngineRequest, int] = field(default_factory=dict)
    sampled: list[EngineRequest] = field(default_factory=list)
    admitted: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    prefills: bool = False
    work: StepWork = field(default_factory=StepWork)

    def take_drafts(self, request: EngineRequest, count: int) -> None:
        """Record the first `count` proposals of a request as part of its tokens, if above 0."""
        request.drafts = 0
        if count > 0:
            self.drafted[request] = count


class Scheduler:
    """Schedules the WAITING and RUNNING requests of one engine over its block pool."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[EngineRequest] = []
        self.prefix_queries = 0  # tokens looked up for requests that were never preempted
        self.prefix_hits = 0  # cached tokens among them
        self.preemptions = 0
        self._block_size = limits.block_size
        self.tables = tables_of(limits, pool)
        # The queue of the options.
        self.waiting: WaitingQueue = WaitingQueue(limits.scheduling_policy)
        self.planned: PlannedQueue | None = None
        self.loading: LoadingQueue | None = None
        if limits.pause_s:
            self.waiting = self.planned = PlannedQueue(limits, self.tables, pool)
        elif limits.host_blocks:
            rules = (self._can_load, self._count_lookup)
            self.waiting = self.loading = LoadingQueue(limits, self.tables, pool, *rules)
        # Limits as numbers, because each step reads them.
        self._watermark_blocks = int(limits.watermark * pool.num_blocks)
        self._seats = limits.max_num_active_seqs or limits.max_num_seqs
        self._fcfs = limits.scheduling_policy == "fcfs"
        self._window = limits.sliding_window
        self._proposed = limits.proposed_tokens
        self._lookahead = limits.lookahead_tokens
        self._slots = limits.draft_slots
        self._self_preempted_ends = self._fcfs or not limits.passes_self_preempted
        self._interval = PrefillInterval(limits.prefill_schedule_interval)
        self._tracks_prefills = limits.prefill_schedule_interval > 1 or self._proposed > 0

    @property
    def deferred(self) -> int:
        """Return the number of waiting requests whose blocks come from the host's memory."""
        return 0 if self.loading is None else self.loading.deferred

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(request)

    def remove(self, request: EngineRequest) -> None:
        """Remove a waiting or running request and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self._leave(request)
        else:
            self.waiting.remove(request)

    def finish(self, requests: list[EngineRequest]) -> None:
        """Remove requests that produced their last token. The next step can use their blocks."""
        if len(requests) == 1:
            self.running.remove(requests[0])
        elif requests:
            gone = set(map(id, requests))
            self.running = [request for request in self.running if id(request) not in gone]
        for request in requests:
            self._leave(request)

    def schedule(self, now: float = 0.0, admitting_s: float = 0.0) -> Scheduled:
        """Decide the next step and record it in the requests.

        Args:
            now: seconds on the clock of `EngineRequest.queued_s`.
            admitting_s: seconds from now until the engine has admitted its new requests.
        """
        limits, step, cap = self.limits, Scheduled(), self._prefill_cap()
        self.tables.begin_step()
        if self.planned is not None:
            seats, reserve = self._seats - len(self.running), self._watermark_blocks
            self.planned.plan(now, self.running, seats, cap, reserve if self.running else 0)
        if self.loading is not None:
            self.loading.begin(now + admitting_s)
        if limits.prefill_schedule_interval > 1:
            self._interval.begin(self.running)
        budget = self._schedule_running(step, limits.max_num_batched_tokens, cap)
        if not step.preempted:
            if budget > self._slots and self.waiting:
                self._schedule_waiting(step, budget, cap)
            self._interval.admitted(len(self.waiting) - self.deferred)
        self._commit(step)
        if self.loading is not None:
            self.loading.store(step.tokens)
        if self._tracks_prefills:
            self._note_prefills(step)
        for request in step.admitted:
            if request.admitted_s < 0:
                request.admitted_s = now
        return step

    def _note_prefills(self, step: Scheduled) -> None:
        """Record which requests have prompt tokens left, for the interval and for `_padding`."""
        if step.tokens:
            prefilling = any(request.prefilling for request in step.tokens)
            self._interval.end(step.prefills or prefilling)
        for request in step.tokens:
            request.prefilling = True
        for request in step.sampled:
            request.prefilling = False

    def _prefill_cap(self) -> int:
        """Return the most tokens of one request in this step."""
        limits = self.limits
        cap, together = limits.long_prefill_token_threshold, len(self.running) + len(self.waiting)
        if not cap or (together <= 1 and limits.cap_spares_lone_request):
            return limits.max_model_len
        if limits.long_prefill_token_threshold_adaptive:
            return max(cap, limits.max_num_batched_tokens // together)
        return cap

    def _schedule_running(self, step: Scheduled, budget: int, cap: int) -> int:
        running, scheduled, slots = self.running, step.tokens, self._slots
        holds, tables = self._interval.holds, self.tables
        last_position = self.limits.max_model_len - 1
        index = 0
        while index < len(running) and budget > slots:
            request = running[index]
            index += 1
            # Count the tokens that this request may compute in the step.
            computed, unknown = request.computed, request.placeholders
            if unknown and computed + 2 - unknown >= request.prompt_tokens + request.max_tokens:
                continue  # the request's last token is being sampled
            if holds and request.prefilling:
                continue
            count = request.tokens + unknown + request.drafts - computed
            count = min(count, cap, request.cap, budget - slots, last_position - computed)
            if tables.aligns:
                count = tables.chunk(request, computed, count)
            if count <= 0:
                continue
            # Find blocks for them, if need be by preemption.
            end = computed + count
            # A decode within its present blocks needs nothing: this test keeps it fast.
            if (end > request.room or count > 1) and not tables.extend(request, end):
                freed, passed = self._make_room(request, end, step)
                budget += freed
                index -= passed
                if not request.blocks:  # it was preempted itself
                    if self._self_preempted_ends:
                        return budget
                    continue  # all behind it have a higher priority
            scheduled[request] = count
            budget -= count + slots
            if request.drafts:
                step.take_drafts(request, end - request.tokens - unknown)
        return budget

    def _make_room(self, request: EngineRequest, end: int, step: Scheduled) -> tuple[int, int]:
        """Preempt until `request` has blocks up to token `end`, or is preempted itself.

        Returns the tokens that preempted requests had got in this step, and how many places the
        pass over RUNNING has to go back.
        """
        running, scheduled = self.running, step.tokens
        freed = passed = 0
        while True:
            victim = running[-1] if self._fcfs else max(running, key=_worst_first)
            if victim in scheduled:  # only under priority: it comes before `request`
                freed += scheduled.pop(victim) + self._slots
                step.drafted.pop(victim, None)
                passed += 1
                step.prefills |= victim.prefilling
            elif victim is request or self._was_passed(victim, request):
                passed += 1
            self._preempt(victim, step)
            if victim is request or self.tables.extend(request, end):
                return freed, passed

    def _was_passed(self, victim: EngineRequest, request: EngineRequest) -> bool:
        """Return True if the pass over RUNNING went past `victim`, and the version minds that."""
        if self._fcfs or not self.limits.minds_skipped_victims:
            return False
        return self.running.index(victim) < self.running.index(request)

    def _schedule_waiting(self, step: Scheduled, budget: int, cap: int) -> None:
        limits, waiting, running, slots = self.limits, self.waiting, self.running, self._slots
        tables = self.tables
        overtaken = []
        while budget > slots and len(running) < self._seats:
            request = waiting.head()
            if request is None:
                break
            # Look its prefix up, and count the tokens that it may compute.
            computed = self._cached(request)
            if limits.counts_every_lookup:
                self._count_lookup(request, computed)
            count = request.tokens - computed
            prefills = count > 1
            if prefills and self._interval.holds:
                break
            count = min(count + self._padding(step, computed, count), cap, request.cap)
            if count > budget - slots:
                if not (limits.enable_chunked_prefill and prefills):
                    if not limits.whole_prompts_overtake:
                        break
                    overtaken.append(waiting.pop())
                    continue
                count = budget - slots
            count = tables.chunk(request, computed, count)
            if not count or not self._has_room(request, computed + count):
                break
            # Admit it, with the cached blocks and new blocks for its tokens.
            self._admit(waiting.pop(), computed, count, step)
            step.prefills |= prefills
            if not prefills:
                step.take_drafts(request, count - 1)
            budget -= count + slots
        for request in reversed(overtaken):
            waiting.put_back(request)

    def _cached(self, request: EngineRequest) -> int:
        """Return the tokens of a waiting request that are in the KV cache."""
        if request.blocks:  # they were loaded
            return request.computed
        return self.tables.look_up(request) * self._block_size

    def _has_room(self, request: EngineRequest, end: int) -> bool:
        return self.tables.admissible(request, end, self._spare_blocks())

    def _spare_blocks(self) -> int:
        return self.pool.free_blocks - (self._watermark_blocks if self.running else 0)

    def _can_load(self, request: EngineRequest, count: int, holders: list[EngineRequest]) -> bool:
        """Return True if `count` blocks behind the cached ones leave enough for known tokens."""
        size, hits = self._block_size, request.lookup[0]
        if not self._has_room(request, (len(hits) + count) * size):
            return False
        owed = sum(
            max(0, -(-holder.tokens // size) - len(holder.blocks))
            for holder in (*self.running, *holders)
        )
        return count + self.pool.count_free(hits) + owed <= self._spare_blocks()

    def _admit(self, request: EngineRequest, computed: int, count: int, step: Scheduled) -> None:
        """Move a request to RUNNING: `computed` tokens are cached, `count` are in the step."""
        self.running.append(request)
        if not request.blocks:
            self.tables.take_hits(request)
            if not self.limits.counts_every_lookup:
                self._count_lookup(request, computed)
        request.computed = computed
        if request.cached_tokens < 0:
            request.cached_tokens = computed
            request.loaded_tokens = min(request.loaded_tokens, computed)
        fits = self.tables.extend(request, computed + count)
        assert fits, request
        step.admitted.append(request)
        step.tokens[request] = count

    def _padding(self, step: Scheduled, computed: int, count: int) -> int:
        """Return the proposals that a request with one token to compute gets when admitted.

        They give its step as many rows as other decodes have. A step that prefills has none.
        """
        proposed = self._proposed
        if not proposed or count > 1 or proposed + computed + 2 > self.limits.max_model_len:
            return 0
        running = len(step.tokens) > len(step.admitted)
        if not (running or computed) or any(request.prefilling for request in step.tokens):
            return 0
        return proposed

    def _count_lookup(self, request: EngineRequest, hits: int) -> None:
        if self.limits.enable_prefix_caching and not request.preemptions:
            self.prefix_queries += request.tokens
            self.prefix_hits += hits

    def _preempt(self, victim: EngineRequest, step: Scheduled) -> None:
        if self.running[-1] is victim:
            self.running.pop()
        else:
            self.running.remove(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(victim)
        step.preempted.append(victim)

    def _leave(self, request: EngineRequest) -> None:
        """Free the blocks of a request that is gone."""
        if self.loading is not None:
            self.loading.copies.touch(request)
        self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self.tables.release(request)
        request.computed = request.placeholders = request.drafts = 0
        request.prefilling = False

    def _commit(self, step: Scheduled) -> None:
        work, sampled = step.work, step.sampled
        decode_context = total = 0
        for request, count in step.tokens.items():
            before = request.computed
            end = request.computed = before + count
            total += count
            drafts = step.drafted.get(request, 0) if step.drafted else 0
            if count == 1 + drafts:
                decode_context += end
                work.window_context += min(end, self._window)
            else:
                work.chunks.append((count, before))
            if end == request.tokens + request.placeholders + drafts:
                sampled.append(request)
                work.drafted += drafts
        work.tokens = total
        work.decode_context = decode_context
        work.sequences = len(step.tokens)
        work.sampled = len(sampled)


def _worst_first(request: EngineRequest) -> tuple[int, float]:
    return request.priority, request.arrival_s
