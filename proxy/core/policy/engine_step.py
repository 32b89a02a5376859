"""How many tokens of which prefills does the next step of an engine compute?

vLLM gives tokens in the order of admission, so a long prompt fills every step, and all other
requests pause behind it. Here

 1. every decoding request has its token first, and the prefills share the seconds that the pause
    leaves. A step may take three times a step that only decodes, though: else prefills would stand
    still behind many long answers. If no request decodes, and no short prompt came in the
    last seconds, a step is as long as the engine allows.
 2. Short prompts (prefilled within five pauses) go before long ones, and in both groups the request
    that is due first goes first, whether it runs or waits. Once a long prompt is due, it gets half
    of each step.
 3. A waiting request that does not fit in the KV cache keeps its place. Short prompts may pass a
    long one, and once it is due until they have five times as many tokens.
 4. A waiting request waits for a prefill that computes tokens of its prompt (coalescing). That
    prefill is then due no later than the request.
 5. If nothing else can run, the first prefill gets a block.

With vLLM's priority policy, a more urgent request goes before all others.

The engine keeps everything else: KV blocks, prefix hits, preemption, places. `plan` gives tokens,
and the engine may give fewer. In the order of arrival the plan is vLLM's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.core.learn.step_cost import StepCost
from forebay.proxy.core.model import MAJORITY
from forebay.proxy.core.policy.engine_queue import Key, SizeGroup, StepRequest
from forebay.proxy.core.policy.order import STRETCH, due_at

DECODES_SHARE: Final = 3.0
"""A step may take this many times a step that only decodes, even beyond the pause. Doubled: longer
pauses on slow GPUs."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of each step of an engine.

    Attributes:
        pause_s: longest pause inside an answer, as set by the operator, seconds. inf: no bound.
        step_tokens: token budget of a step (max_num_batched_tokens).
        block_tokens: a chunk that the pause bounds ends at a multiple of this. At least the
            engine's own alignment, else such an engine rounds a chunk down to nothing.
        by_priority: the engine has vLLM's priority policy.
        by_due: False for the order of arrival, without overtaking and without a bound.
    """

    pause_s: float = 0.1
    step_tokens: int = 8192
    block_tokens: int = 16
    by_priority: bool = False
    by_due: bool = True

    def __post_init__(self) -> None:
        assert self.pause_s > 0
        assert self.step_tokens > 0
        assert self.block_tokens > 0


Look = Callable[[StepRequest, int], int | None]
"""Return the number of leading tokens of a waiting request that are cached, None without room.

The number is the tokens of the KV cache that running prefills will still take: not free for it.
"""
Shared = Callable[[StepRequest, StepRequest], int]
"""Return the number of leading tokens that two prompts share, in whole blocks."""


@dataclass(slots=True)
class StepPlan:
    """The prefills of the next step.

    Attributes:
        running: running prefills and their tokens. All other running prefills get none.
        admit: waiting requests and their tokens, in the order of admission. No others start.
        bound_s: seconds that prefills may add to the step. inf: no bound.
    """

    running: list[tuple[StepRequest, int]]
    admit: list[tuple[StepRequest, int]]
    bound_s: float


class EngineSteps:
    """Plans the steps of one engine. The engine shows it the running requests at each step.

    Attributes:
        passed_over: how often a request was admitted before a long one without room.
    """

    def __init__(self, limits: StepLimits, cost: StepCost) -> None:
        self.limits = limits
        self.cost = cost
        self.passed_over = 0
        self._shorts = SizeGroup()
        self._longs = SizeGroup()
        self._numbers = self._fronts = 0
        self._short_at = -inf  # the last arrival of a short prompt
        self._planned: list[StepRequest] = []  # requests in the last plan's `admit`
        self._leaders: list[StepRequest] = []  # running prefills with followers
        self._followers = 0  # waiting for one of them
        self._plans = 0
        self._blocked: StepRequest | None = None  # a long prompt that had no room
        self._passed = 0  # tokens admitted before it since
        # The state of the plan in the making.
        self._plan = StepPlan([], [], inf)
        self._tokens_left = self._seats_left = self._owed = self._cap = 0
        self._has_given = False
        self._seconds_left = inf
        self._now = 0.0
        self._shared: Shared | None = None
        self._running: list[StepRequest] = []  # prefills that go on after this step

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._shorts.size + self._longs.size + len(self._planned) + self._followers

    def add(self, request: StepRequest) -> None:
        """Queue a request that has arrived, or that the engine has preempted."""
        # Only a request that is new gets a time at which it is due.
        preempted, limits = request.due < inf, self.limits
        if not limits.by_due:
            request.due = request.arrived_at if limits.by_priority else 0.0
        elif not preempted:
            left_s = self.cost.chunk_s(request.tokens - request.computed, request.computed)
            request.due = due_at(request.arrived_at, request.deadline, left_s)
        request.is_short = self._is_short(request)
        if request.is_short and not preempted:
            self._short_at = max(self._short_at, request.arrived_at)
        # Among equals a preempted request goes first, the others in the order in which they came.
        if preempted and not limits.by_priority:
            self._fronts -= 1
            request.number = self._fronts
        else:
            self._numbers += 1
            request.number = self._numbers
        self._push(request)

    def remove(self, request: StepRequest) -> None:
        """Forget a waiting request, which was admitted or aborted."""
        leader = request.leader
        if request.queued:
            request.queued = False
            (self._shorts if request.is_short else self._longs).removed()
        elif leader is not None:
            leader.followers.remove(request)
            request.leader = None
            self._followers -= 1
        else:
            self._planned.remove(request)
        if request is self._blocked:
            self._blocked = None

    def plan(
        self,
        now: float,
        decoding: int,
        prefilling: Sequence[StepRequest],
        look: Look,
        seats: int,
        cap: int = 0,
        shared: Shared | None = None,
    ) -> StepPlan:
        """Decide the prefills of the next step. The engine calls `remove` for each that it admits.

        Args:
            decoding: tokens that requests take that only decode.
            prefilling: running requests with prompt tokens to compute, in the order of admission.
            look: called for a waiting request before it is admitted.
            seats: how many requests may be admitted.
            cap: most tokens of one request (long_prefill_token_threshold). 0: no cap.
            shared: compares two prompts. None: no coalescing.
        """
        shorts, longs = self._shorts, self._longs
        for request in self._planned:  # that the engine did not admit
            self._push(request)
        self._planned.clear()
        # Set the limits of the step.
        self._owed = self._sort(prefilling)
        self._release()
        plan = self._plan = StepPlan([], [], self._bound_s(now, decoding))
        self._tokens_left = self.limits.step_tokens - decoding
        self._seconds_left = plan.bound_s
        self._seats_left, self._cap = seats, cap or self.limits.step_tokens
        self._has_given = False
        self._now, self._shared = now, shared
        self._running = list(prefilling)
        # Give tokens: by priority, then to a long prompt that is due, short prompts, long prompts.
        while self._goes_on(0.0):
            short, long = shorts.head(), longs.head()
            if short is None and long is None:
                break
            level = min(head[0][0] for head in (short, long) if head is not None)
            if long is not None and long[0][0] == level and long[0][1] <= now:
                self._serve(longs, level, look, self._seconds_left * MAJORITY)
            self._serve(shorts, level, look, 0.0)
            self._serve(longs, level, look, 0.0)
            if shorts.partial is not None or longs.partial is not None:
                break
        return self._finished(decoding)

    def _sort(self, prefilling: Sequence[StepRequest]) -> int:
        """Sort the running prefills, and return the tokens that they have left."""
        shorts, longs, by_due = self._shorts, self._longs, self.limits.by_due
        self._plans += 1
        shorts.begin()
        longs.begin()
        owed = 0
        for place, request in enumerate(prefilling):
            request.given = 0
            request.plan = self._plans
            if not by_due:  # in the order of admission, before all that wait
                shorts.running.append(((-(1 << 62), 0.0, place), request))
                continue
            owed += request.tokens - request.computed
            group = shorts if request.is_short else longs
            group.running.append((self._key(request), request))
        if len(prefilling) > 1:
            shorts.running.sort()
            longs.running.sort()
        return owed

    def _finished(self, decoding: int) -> StepPlan:
        """Return the plan with the tokens that were given."""
        plan, groups = self._plan, (self._shorts, self._longs)
        plan.admit = [(request, request.given) for request in self._planned if request.given]
        for group in groups:
            for _, request in group.running[: group.next_]:
                if request.given:
                    plan.running.append((request, request.given))
        if not decoding and not plan.running:
            # The engine may find no room for admitted requests. A running request must have tokens.
            for group in groups:
                if group.running:
                    request = group.running[0][1]
                    left = request.tokens - request.computed
                    plan.running.append((request, min(left, self._block(request.computed))))
                    break
        return plan

    def _block(self, place: int) -> int:
        """Return the tokens up to the end of the block of `place`."""
        block = self.limits.block_tokens
        return block - place % block

    def _key(self, request: StepRequest) -> Key:
        priority = request.priority if self.limits.by_priority else 0
        return priority, request.due, request.number

    def _push(self, request: StepRequest) -> None:
        group = self._shorts if request.is_short else self._longs
        if request.is_short and request is self._blocked:
            self._blocked = None  # its prefix was computed meanwhile
        group.push(self._key(request), request)

    def _is_short(self, request: StepRequest) -> bool:
        left = request.tokens - request.computed
        most_s = STRETCH * self.limits.pause_s
        return self.cost.chunk_s(left, request.computed) <= most_s or not self.limits.by_due

    def _release(self) -> None:
        """Queue the followers again whose leader has computed their prefix, or runs no more."""
        leaders, self._leaders = self._leaders, []
        for leader in leaders:
            runs, followers = leader.plan == self._plans, leader.followers
            leader.followers = []
            for request in followers:
                if runs and leader.computed < request.until:
                    leader.followers.append(request)
                    continue
                request.leader = None
                request.computed = max(request.computed, min(request.until, request.tokens - 1))
                request.is_short = self._is_short(request)
                self._followers -= 1
                self._push(request)
            if leader.followers:
                self._leaders.append(leader)

    def _follows(self, group: SizeGroup, request: StepRequest) -> bool:
        """Let the first that waits follow a prefill that computes tokens of its prompt."""
        if self._shared is None:
            return False
        for leader in self._running:
            until = self._shared(request, leader)
            if until > max(leader.computed + leader.given, request.computed):
                break
        else:
            return False
        group.pop()
        request.leader, request.until = leader, until
        if not leader.followers:
            self._leaders.append(leader)
        leader.followers.append(request)
        leader.due = min(leader.due, request.due)
        self._followers += 1
        return True

    def _bound_s(self, now: float, decoding: int) -> float:
        """Return the seconds that prefills may add to the step."""
        if not decoding and now - self._short_at > RECENT_S and self._shorts.head() is None:
            return inf
        base_s = self.cost.base_s
        return max(self.limits.pause_s, DECODES_SHARE * base_s) - base_s

    def _serve(self, group: SizeGroup, level: int, look: Look, kept_s: float) -> None:
        """Give requests of a group and a priority the tokens left, but keep `kept_s` seconds."""
        partial, group.partial = group.partial, None
        if partial is not None and not self._give(partial, kept_s):
            group.partial = partial
            return
        while self._goes_on(kept_s):
            head = group.head()
            if head is None or head[0][0] != level:
                return
            request = head[1]
            if not request.queued:
                group.next_ += 1
            elif not self._admit(group, head[0], request, look):
                continue
            whole = self._give(request, kept_s)
            if request.plan < self._plans and request.computed + request.given < request.tokens:
                self._running.append(request)
            if not whole:
                group.partial = request
                return

    def _goes_on(self, kept_s: float) -> bool:
        """Return True if another request could get a block, in any case if none has got one."""
        least_s = self.limits.block_tokens * self.cost.token_s if self._has_given else 0.0
        return self._tokens_left > 0 and self._seconds_left > kept_s + least_s

    def _admit(self, group: SizeGroup, key: Key, request: StepRequest, look: Look) -> bool:
        """Remove the first waiting request from its queue, if it may be admitted."""
        # Ask the engine whether it fits, unless it has to wait for a long prompt that did not.
        is_long = group is self._longs
        blocked = None if is_long else self._blocked
        if not self._seats_left or (blocked is not None and self._waits_for(blocked, key, request)):
            group.closed = True
            return False
        if self._follows(group, request):
            return False
        computed: int | None = request.computed
        if self.limits.by_due:
            computed = look(request, self._owed if is_long else 0)
        if computed is None:
            group.closed = True
            if is_long and self._blocked is None:
                self._blocked, self._passed = request, 0
            return False
        if blocked is not None and blocked.due <= self._now:
            self._passed += request.tokens
            self.passed_over += 1
        # The request starts in this step.
        request.computed = computed
        request.given = 0
        request.is_short = self._is_short(request)
        group.pop()
        self._planned.append(request)
        self._seats_left -= 1
        if self.limits.by_due:
            self._owed += request.tokens - computed
        return True

    def _waits_for(self, blocked: StepRequest, key: Key, request: StepRequest) -> bool:
        """Return True if short prompts have passed a long one for long enough."""
        passed = self._passed + request.tokens
        return passed > STRETCH * blocked.tokens and self._key(blocked)[0] <= key[0]

    def _give(self, request: StepRequest, kept_s: float) -> bool:
        """Give a request tokens. Returns False if the seconds end before its tokens do."""
        cost = self.cost
        if not self.limits.by_due:  # the engine counts its budget and blocks itself
            request.given = min(request.tokens, self._cap)
            self._tokens_left -= 1
            return True
        place = request.computed + request.given
        most = min(request.tokens - place, self._tokens_left, self._cap - request.given)
        if most <= 0:
            return True
        count, whole = most, True
        if self._seconds_left < inf:
            within = cost.tokens_within(self._seconds_left - kept_s, place)
            if within < most:
                # A chunk that the pause cuts ends with a block. The first is one block at least.
                block, whole = self.limits.block_tokens, False
                count = (place + within) // block * block - place
                if count <= 0:
                    count = 0 if self._has_given else min(most, self._block(place))
        if count > 0:
            self._has_given = True
            request.given += count
            self._tokens_left -= count
            self._seconds_left -= cost.chunk_s(count, place)
        return whole
