"""Simulate an engine in virtual time: the timestamps of `EngineCore` with a few events a request.

Computing every step costs a pass over RUNNING for every token. Here

- a stretch of steps in which all requests decode is one event. It lasts until a request ends or
  outgrows the window of sliding layers, until free blocks run out, or until the end of the step in
  which a request arrives. The time of a decode step is affine in the tokens of context, so the time
  of a stretch has a closed form.
- a step that prefills, admits or preempts requests is one event. It costs time for these requests
  only, regardless of the number of decoding requests (`planning`).

Decoding requests are represented by a few sums (`cohort`), blocks by runs (`block_runs`). The
rules are `engine.scheduler`'s, with scheduling policy fcfs only.
"""

from math import inf, sqrt
from typing import Final

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.planning import NOTHING, PLANNED, Planner
from forebay.replay.sim.engine.request import ENDING, SimRequest

__all__ = ["SimRequest", "SkippingEngine"]

# States, in an order that `add` and `advance` rely on: from STEP on a step is running.
IDLE: Final = 0
READY: Final = 1  # was idle: the first step is planned when `advance` is called at `next_at`
STEP: Final = 2  # one step, which the planner has recorded
STRETCH: Final = 3  # steps in which all requests decode, recorded when it ends
MOST_STEPS: Final = 1 << 29  # more than any stretch has
NONE: Final[list[SimRequest]] = []  # never written to
NO_CHUNKS: Final[list[tuple[int, int]]] = []  # neither


class SkippingEngine:
    """One engine, without clock, I/O or randomness.

    A driver calls `advance` when time reaches `next_at`, and `add` in between. A request added at
    the instant of `next_at`, before `advance`, takes part in the step that starts then. A request
    added just after `advance` takes part in the next step. Block ids match within one
    `block_tokens` only.

    Attributes:
        steps: engine steps that have ended.
        busy_s: seconds they took.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raise ValueError for a scheduling policy other than fcfs."""
        limits = config.limits()
        if limits.scheduling_policy != "fcfs":
            raise ValueError(
                f"--scheduling-policy {limits.scheduling_policy}: only fcfs can be skipped through"
            )
        self._timing = config.timing()
        self._planner = Planner(limits, config.kv_budget.blocks, config.kv_budget.layout)
        self._cohort = self._planner.cohort
        self._pool = self._planner.pool
        self._pool_block_size = limits.block_size
        self._stalls = self._planner.stalls
        self._terms: dict[int, tuple[float, float]] = {}  # cached StepTimeModel.decode_terms
        self.kv_tokens = config.kv_budget.pool_tokens(config.context)
        self.steps = 0
        self.busy_s = 0.0
        self._state = IDLE
        self._next = inf
        self._started = 0.0
        self._seconds = 0.0  # duration of the current step or stretch
        self._step_s = 0.0  # duration of the current step, or of the first of a stretch
        self._chunks: list[tuple[int, int]] = []  # its prefill chunks
        self._is_news = True  # the scheduler has not learned from it yet
        self._admitting_s = 0.0  # delays the next step
        # The current stretch:
        self._count = 0  # number of steps
        self._first = self._growth = 0.0  # seconds of its first step, growth with each step
        self._delay_s = 0.0  # admissions before its first step
        self._taken = 0  # blocks of the first step that the planner has allocated
        self._is_cut = False  # an arrival has set its end
        self._tail_s = 0.0  # admissions before its last step
        # Asynchronous scheduling: the next step is planned when a step starts.
        self._ahead = config.asynchronous
        self._seen_until = -inf  # what comes later is not part of that plan

    @property
    def running(self) -> int:
        return len(self._planner.running)

    @property
    def waiting(self) -> int:
        return self._planner.waiting_count + len(self._planner.arriving)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second in the present step or stretch."""
        if self._state == STRETCH:
            return self._cohort.size * self._count / self._seconds
        if self._state == STEP and self._seconds > 0.0:
            return self._planner.work.sampled / self._seconds
        return 0.0

    @property
    def streams(self) -> int:
        """Requests that get a token from the present step, or from each of the stretch."""
        if self._state == STRETCH:
            return self._cohort.size
        return self._planner.work.sampled if self._state == STEP else 0

    @property
    def prefix_queries(self) -> int:
        return self._planner.prefix_queries

    @property
    def prefix_hits(self) -> int:
        return self._planner.prefix_hits

    @property
    def preemptions(self) -> int:
        return self._planner.preemptions

    def cached_tokens(self, ids: tuple[int, ...], block_tokens: int, tokens: int) -> int:
        """Return the tokens that a prompt of `tokens` with these full blocks would hit now."""
        size = self._pool_block_size
        limit = min(len(ids) * block_tokens, tokens - 1) // size
        hits, _, _ = self._pool.lookup(ids, block_tokens, limit)
        return hits * size

    def next_at(self) -> float:
        """Return when `advance` is due if no request is added before, inf without work."""
        return self._next

    def add(self, request: SimRequest, now: float) -> None:
        """Queue a request (ValueError: it can never run)."""
        state, planner = self._state, self._planner
        if state == STRETCH and not self._is_cut:
            self._cut(now)
        seconds = self._timing.admit_s(request.prompt_tokens)
        late = self._ahead and state >= STEP and now > self._seen_until
        request.queued_s = now
        planner.add(request, late=late)
        if self._ahead and state == STRETCH and not late:  # one more step of the stretch follows
            self._tail_s += seconds
            self._seconds += seconds
            self._next += seconds
        else:
            self._admitting_s += seconds
        if state == IDLE:
            self._state = READY
            self._next = now

    def advance(self, now: float) -> tuple[list[SimRequest], list[SimRequest]]:
        """Pass `now` == `next_at`. Returns requests with a first token now, and finished ones."""
        planner, cohort, state = self._planner, self._cohort, self._state
        first = finished = NONE
        # Record the step or the stretch that ends now, and the requests that end with it.
        if state == STRETCH:
            count = self._count
            self._pool.free -= cohort.blocks(self.steps + 1, count) - self._taken
            self.steps = step = self.steps + count
            self.busy_s += self._seconds
            last_s = self._tail_s + self._first + self._growth * (count - 1)
            self._stalls.push(step, max(self._delay_s + self._first, last_s))
            if cohort.next_end() <= step:
                finished = self._end(now, [])
        elif state == STEP:
            self.steps = step = self.steps + 1
            self.busy_s += self._seconds
            self._stalls.push(step, self._seconds)
            done: list[SimRequest] = []
            if planner.sampling:
                first = self._sample(now, done)
            if done or (cohort.size and cohort.next_end() <= step):
                finished = self._end(now, done)
        # Start the next step. Planned ahead, it cannot know that requests have ended.
        began, self._started = self._started, now
        self._seen_until = -inf
        if self._ahead and state >= STEP:
            if state == STRETCH and self._count > 1:
                self._learn()
                self._is_news = False
                began = now - last_s
            self._follow(now, began, finished)
        else:
            if state >= STEP:
                self._learn()
            for request in finished:
                planner.finish(request)
            self._plan(now)
        return first, finished

    def _plan(self, now: float) -> None:
        """Plan the step that starts now from all that is known now."""
        planner = self._planner
        if planner.waiting_count or planner.prefilling:
            self._take(planner.plan(self.steps + 1, now, now), now)
        elif self._cohort.size:
            self._plan_stretch(now, 0)
        else:
            self._state = IDLE
            self._next = inf
            self._stalls.clear()

    def _learn(self) -> None:
        """Let the scheduler learn from the step that has ended, or the first of a stretch."""
        decision = self._planner.decision
        if decision is not None and self._is_news:
            decision.lessons.observe(self._step_s, self._chunks)

    def _follow(self, now: float, began: float, finished: list[SimRequest]) -> None:
        """Start the step that was planned when the step before it started, at `began`.

        It is planned only here, but from the state at that time: without the requests that came
        meanwhile, and while `finished` still hold their blocks and seats.
        """
        planner = self._planner
        taken = NOTHING
        if planner.waiting_count or planner.prefilling or self._cohort.size:
            taken = planner.plan(self.steps + 1, now, began, in_flight=True)
        self._learn()
        room = bool(finished)
        for request in finished:
            planner.finish(request)
        if planner.arriving:
            # Behind a head that does not fit, vLLM's own scheduler admits no request.
            room = room or not planner.waiting_count or planner.decision is not None
            planner.waiting.extend(planner.arriving)
            planner.arriving.clear()
        if taken == NOTHING or (taken == PLANNED and not planner.work.sequences):
            self._plan(now)  # an empty step takes no time
        elif taken >= 0 and room and planner.waiting_count:
            self._plan_stretch(now, taken, 1)  # the next step may admit a request
        else:
            self._take(taken, now)

    def _take(self, taken: int, now: float) -> None:
        """Start the step or stretch that the planner has planned."""
        planner, timing = self._planner, self._timing
        while taken == PLANNED and not planner.work.sequences and self._ahead:
            taken = planner.plan(self.steps + 1, now, now)
        if taken == NOTHING:
            raise RuntimeError(f"nothing can be scheduled: {planner.waiting_count} waiting")
        if taken >= 0:
            # A request that was to be admitted did not fit: the next plan may choose another.
            decision = planner.decision
            missed = decision is not None and len(decision.admit) > 0
            self._plan_stretch(now, taken, 1 if missed else MOST_STEPS)
            return
        # A step that preempts may schedule no request: it costs CPU time only.
        work = planner.work
        self._is_news = True
        self._step_s = timing.step_s(work) if work.sequences else timing.calibration.step_s
        self._chunks = work.chunks
        self._seconds = self._step_s + self._admitting_s
        self._admitting_s = 0.0
        self._next = now + self._seconds
        self._state = STEP

    def _plan_stretch(self, now: float, taken: int, most: int = MOST_STEPS) -> None:
        """Plan a stretch of at most `most` steps in which all requests decode."""
        # How many steps: until a request ends, or the free blocks are used up.
        cohort, step = self._cohort, self.steps + 1
        size, free = cohort.size, self._pool.free + taken
        count = min(most, cohort.next_end() - self.steps)
        if count * size > free:  # an upper bound: few steps take a block for every request
            count = cohort.steps_within(step, count, free)
            if not count:
                self._take(self._planner.plan(step, now, now), now)
                return
        # :How long they take: each step reads more context than the step before.
        try:
            without_context, per_token = self._terms[size]
        except KeyError:
            without_context, per_token = self._terms[size] = self._timing.decode_terms(size)
        first = without_context + per_token * (cohort.offsets + size * step)
        growth = per_token * size
        if cohort.window:
            cohort.slide(step)
            count = min(count, cohort.next_outgrown() - self.steps)
            first += self._timing.window_s * cohort.window_context(step)
            growth += self._timing.window_s * cohort.near
        # Their sum in closed form is the time of the next plan.
        self._is_news = True
        self._first = self._step_s = first
        self._growth = growth
        self._chunks = NO_CHUNKS
        self._count = count
        self._taken = taken
        self._is_cut = False
        self._tail_s = 0.0
        self._delay_s, self._admitting_s = self._admitting_s, 0.0
        self._seconds = seconds = self._delay_s + count * (first + 0.5 * growth * (count - 1))
        self._next = now + seconds
        self._state = STRETCH

    def _cut(self, now: float) -> None:
        """End the stretch with the step that is running at `now`."""
        start, first, half = self._started + self._delay_s, self._first, 0.5 * self._growth
        elapsed = max(0.0, now - start)
        # count*first + half*count*(count-1) = elapsed, solved without cancellation
        linear = first - half
        count = int(2 * elapsed / (linear + sqrt(linear * linear + 4 * half * elapsed))) or 1
        # Rounded down. The running step is the first that ends at or after the arrival.
        seconds = count * (first + half * (count - 1))
        while start + seconds < now:
            count += 1
            seconds = count * (first + half * (count - 1))
        if self._ahead:
            if count == self._count:
                return  # the step after the stretch is planned already
            self._seen_until = start + seconds
            count += 1  # so is the step after the running one
            seconds = count * (first + half * (count - 1))
        self._is_cut = True
        if count < self._count:
            self._count = count
            self._seconds = self._delay_s + seconds
            self._next = start + seconds

    def _sample(self, now: float, done: list[SimRequest]) -> list[SimRequest]:
        """Return the requests whose completed prefill gave the first token.

        Requests whose last token this is are added to `done`.
        """
        cohort, step = self._cohort, self.steps
        first = []
        for request in self._planner.sampling:
            if request.first_token_s < 0:
                request.first_token_s = now
                first.append(request)
            else:  # was preempted
                request.stall_s = max(request.stall_s, now - request.gap_from)
            request.since = step
            if request.tokens == request.last:
                done.append(request)
            else:
                cohort.join(request, step)
        return first

    def _end(self, now: float, done: list[SimRequest]) -> list[SimRequest]:
        """Return `done` and the decoding requests whose last step has ended, in RUNNING's order.

        They still hold their blocks and seats.
        """
        finished = self._cohort.ended(self.steps)
        stalls = self._stalls
        if done:
            finished = sorted(finished + done, key=_rank)
        for request in finished:
            request.finished_s = now
            stall_s = stalls.since(request.since)
            if stall_s > request.stall_s:
                request.stall_s = stall_s
            request.phase = ENDING
        return finished


def _rank(request: SimRequest) -> int:
    return request.rank
