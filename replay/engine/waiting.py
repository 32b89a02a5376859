"""The queue of waiting requests, in the order of admission."""

from collections import deque
from collections.abc import Iterator
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
