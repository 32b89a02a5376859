"""Let Forebay's scheduler decide the prefills of a skipping engine, as `engine.waiting` does."""

from collections import deque

from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.proxy.core.policy.engine_step import Look
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.waiting import StepLessons, steps_of
from forebay.replay.sim.engine.request import UNCAPPED, SimRequest


class DecidedPrefills:
    """The decision of each step, and the waiting requests that it knows.

    Attributes:
        steps: the decision.
        lessons: its teacher.
        admit: requests to admit in the present step, the next one last.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.steps = steps_of(limits)
        self.lessons = StepLessons(self.steps.cost)
        self.admit: list[SimRequest] = []
        self._capped: list[SimRequest] = []
        self._block_size = limits.block_size

    def decide(
        self,
        now: float,
        arrived: deque[SimRequest],
        prefilling: list[SimRequest],
        decoding: int,
        seats: int,
        cap: int,
        look: Look,
    ) -> None:
        """Cap the running prefills, and choose the requests to admit.

        Args:
            arrived: requests that came or were preempted since the last plan. They are taken out.
            prefilling: running prefills, in the order of admission.
            decoding: number of requests that decode.
            seats: how many requests may be admitted.
            cap: most tokens of one request, 0 for no cap.
            look: see `engine_step`.
        """
        for request in self._capped:
            request.cap = UNCAPPED
        self._capped.clear()
        self.admit.clear()
        while arrived:
            self._add(arrived.popleft(), look)
        if not prefilling and not len(self.steps):
            return
        # Running prefills that the plan leaves out get no tokens.
        running = []
        for request in prefilling:
            step = step_of(request)
            step.computed = request.computed
            running.append(step)
            self._cap(request, 0)
        plan = self.steps.plan(now, decoding, running, look, seats, cap, self._shared)
        for step, count in plan.running:
            self._cap(step.handle, count)
        for step, count in reversed(plan.admit):
            self._cap(step.handle, count)
            self.admit.append(step.handle)

    def admitted(self) -> None:
        """Take out the next request to admit."""
        self.steps.remove(step_of(self.admit.pop()))

    def _shared(self, waiting: StepRequest, leader: StepRequest) -> int:
        """Return the leading tokens that two prompts share, in whole blocks."""
        ours: SimRequest = waiting.handle
        theirs: SimRequest = leader.handle
        blocks = min(ours.shareable, theirs.shareable, (waiting.tokens - 1) // self._block_size)
        if not blocks or ours.block_tokens != theirs.block_tokens:
            return 0
        per_id = ours.block_tokens // self._block_size
        count = 0
        for our_id, their_id in zip(ours.ids, theirs.ids, strict=False):
            if our_id != their_id:
                break
            count += per_id
            if count >= blocks:
                return blocks * self._block_size
        return count * self._block_size

    def _cap(self, request: SimRequest, count: int) -> None:
        request.cap = count
        self._capped.append(request)

    def _add(self, request: SimRequest, look: Look) -> None:
        step = request.step
        if step is None:
            step = request.step = StepRequest(
                request, request.queued_s, request.tokens, 0, request.priority
            )
        step.tokens = request.tokens
        step.computed = look(step, -1) or 0
        self.steps.add(step)


def step_of(request: SimRequest) -> StepRequest:
    """Return the request as the decision knows it."""
    assert request.step is not None
    return request.step
