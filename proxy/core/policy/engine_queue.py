"""The requests of one engine whose prompts are not computed yet, as `engine_step` orders them."""

from heapq import heappop, heappush
from math import inf
from typing import Any

Key = tuple[int, float, int]
"""Priority, time at which the request is due, order of arrival. Smaller goes first."""


class StepRequest:
    """A request from its arrival in the engine to the end of its prefill.

    Attributes:
        handle: the engine's own object.
        arrived_at: its arrival on the clock of `now`, seconds.
        tokens: tokens to compute before its next token: the prompt, and after a preemption its
            output so far, too.
        computed: how many of them, from the first on, are computed, or cached as far as is known.
            The engine keeps it up to date while the request is running.
        priority: lower goes first, where the engine has vLLM's priority policy.
        deadline: the latest time at which it is due, seconds.
        due: when it is due, set by `EngineSteps.add`.
    """

    __slots__ = (
        "arrived_at", "computed", "deadline", "due", "followers", "given", "handle", "is_short",
        "leader", "number", "plan", "priority", "queued", "tokens", "until",
    )  # fmt: skip

    def __init__(
        self,
        handle: Any,
        arrived_at: float,
        tokens: int,
        computed: int = 0,
        priority: int = 0,
        deadline: float = inf,
    ) -> None:
        self.handle = handle
        self.arrived_at = arrived_at
        self.tokens = tokens
        self.computed = computed
        self.priority = priority
        self.deadline = deadline
        self.due = inf
        self.is_short = False
        self.number = 0  # order among equals. 0: it does not wait
        self.queued = False
        self.given = 0  # tokens in the plan that is being made
        self.plan = 0  # number of the last plan in which it was running
        # Coalescing: it waits while its leader computes the tokens up to `until`.
        self.leader: StepRequest | None = None
        self.until = 0
        self.followers: list[StepRequest] = []


class SizeGroup:
    """The short or the long prompts: a list of running ones, and a heap of waiting ones.

    Removed requests stay in the heap until they come to its front or are half of it.
    """

    __slots__ = ("_heap", "closed", "next_", "partial", "running", "size")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, StepRequest]] = []
        self.size = 0  # waiting requests
        self.running: list[tuple[Key, StepRequest]] = []
        self.begin()

    def begin(self) -> None:
        """Begin a plan."""
        self.running.clear()
        self.next_ = 0  # place in `running` of the next request to plan
        self.closed = False  # no more are admitted
        self.partial: StepRequest | None = None  # got fewer tokens than it has left

    def push(self, key: Key, request: StepRequest) -> None:
        heappush(self._heap, (key, request))
        request.queued = True
        self.size += 1

    def removed(self) -> None:
        self.size -= 1
        if len(self._heap) > 64 + 2 * self.size:
            self._heap = sorted(entry for entry in self._heap if _waits(entry))

    def first(self) -> tuple[Key, StepRequest] | None:
        """Return the first waiting request, with its key."""
        heap = self._heap
        while heap and not _waits(heap[0]):
            heappop(heap)
        return heap[0] if heap else None

    def pop(self) -> None:
        """Remove the first waiting request from the heap."""
        heappop(self._heap)[1].queued = False
        self.size -= 1

    def head(self) -> tuple[Key, StepRequest] | None:
        """Return the first request, with its key, that is running or may be admitted."""
        running = self.running[self.next_] if self.next_ < len(self.running) else None
        waiting = None if self.closed else self.first()
        if running is None or (waiting is not None and waiting[0] < running[0]):
            return waiting
        return running


def _waits(entry: tuple[Key, StepRequest]) -> bool:
    return entry[1].queued and entry[1].number == entry[0][2]
