"""The queue of waiting requests, and the steps in which prefills wait."""

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from forebay.replay.engine.request import EngineRequest


class WaitingQueue:
    """Waiting requests in the order of admission: fcfs, or (priority, arrival, id)."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._line: deque[EngineRequest] = deque()
        self._heap: list[tuple[int, float, str, int, EngineRequest]] = []
        self._entered = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter([entry[-1] for entry in sorted(self._heap)] if self._heap else self._line)

    def head(self) -> EngineRequest:
        return self._heap[0][-1] if self._by_priority else self._line[0]

    def pop(self) -> EngineRequest:
        return heappop(self._heap)[-1] if self._by_priority else self._line.popleft()

    def append(self, request: EngineRequest) -> None:
        if self._by_priority:
            self._entered += 1
            entry = (request.priority, request.arrival_s, request.id, self._entered, request)
            heappush(self._heap, entry)
        else:
            self._line.append(request)

    def put_back(self, request: EngineRequest) -> None:
        """Return a preempted request to the front (fcfs) or to the place of its priority."""
        if self._by_priority:
            self.append(request)
        else:
            self._line.appendleft(request)

    def remove(self, request: EngineRequest) -> None:
        if self._by_priority:
            self._heap = [entry for entry in self._heap if entry[-1] is not request]
            heapify(self._heap)
        else:
            self._line.remove(request)


class PrefillInterval:
    """Keeps prefills out of the N - 1 steps after a step with prefills (prefill_schedule_interval).

    Attributes:
        holds: True if the present step computes no prefill.
    """

    def __init__(self, interval: int) -> None:
        self.holds = False
        self._interval = interval
        self._executed = 0  # steps with tokens
        self._prefilled_at = -interval  # the last of these with a prefill
        self._backed_up = False  # the last step that was not held left requests waiting

    def begin(self, running: Iterable[EngineRequest]) -> None:
        """Decide whether prefills are kept out of the step that begins: others decode meanwhile."""
        self.holds = (
            not self._backed_up
            and self._executed + 1 - self._prefilled_at < self._interval
            and any(not request.prefilling for request in running)
        )

    def admitted(self, waiting: int) -> None:
        """Record that the step admits no more, and how many requests still wait."""
        if not self.holds:
            self._backed_up = waiting > 0

    def end(self, prefills: bool) -> None:
        """Record a step with tokens, and whether it prefilled."""
        self._executed += 1
        if prefills:
            self._prefilled_at = self._executed
