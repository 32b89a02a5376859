"""The waiting requests of a vLLM engine, mirrored into the queue of the decision."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class Waiting(RequestQueue):
    """A queue that shows vLLM only the requests that may start in this step, in their order.

    vLLM adds and removes requests in many places, also for features that are unknown here. So
    the queue reports what comes and goes, instead of the scheduler.

    Attributes:
        startable: the requests that may start in this step. All others wait unseen.
    """

    def __init__(self, came: Callable[[Any], None], went: Callable[[Any], None]) -> None:
        """Take the functions that are called for a request that came or went."""
        self._requests: dict[str, Any] = {}
        self._came, self._went = came, went
        self.startable: deque[Any] = deque()

    def add_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self._came(request)

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        # vLLM iterates from the last to the first, since each goes to the front.
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Any:
        return self.startable[0]

    def pop_request(self) -> Any:
        request = self.startable.popleft()
        self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._went(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self.startable)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests.values())
