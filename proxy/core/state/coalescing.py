"""Prompts that a backend will compute, so that requests with the same prefix can wait for them.

A prefill that many requests share is computed once (single-flight). Its leader is either a waiting
request with a long prompt (`Leaders`) or a prompt that is sent in pieces (`SplitPrompts`).
Which request follows which is decided in `policy/coalesce.py`.
"""

from collections.abc import Iterable
from math import fsum

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import QueuedRequest


class PromptSet:
    """Waiting requests in `by_id`."""

    def __init__(self) -> None:
        self.by_id: dict[str, QueuedRequest] = {}

    def add(self, waiting: QueuedRequest) -> None:
        self.by_id[waiting.request.id] = waiting

    def drop(self, request_id: str) -> bool:
        """Remove a request; return whether it was in the set."""
        return self.by_id.pop(request_id, None) is not None


class Leaders(PromptSet):
    """Requests that wait for one backend with a long prompt and follow no other request."""

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request, unless its prompt is too short for others to wait for it."""
        if waiting.request.prompt_tokens > STEP_TOKENS:
            super().add(waiting)


class SplitPrompts(PromptSet):
    """Prompts that go to one backend in pieces, from the first piece until the last one is sent.

    While a piece runs, the request is in no queue; between two pieces it waits as any other does.
    The backend will compute the whole prompt: requests that share it follow, and every other
    request there waits for the rest as well.
    """

    def promised(self, request: Request, head: QueuedRequest | None = None) -> int:
        """Return how many leading blocks of the request belong to another split prompt.

        0 for a request whose own prompt is being sent in pieces: no two wait for each other.

        Args:
            head: the request, if it heads a queue here: it does not wait for requests behind it.
        """
        if not self.by_id or request.id in self.by_id:
            return 0
        runs = [
            common_run(request.blocks, other.request.blocks)
            for other in self.by_id.values()
            if head is None or not other.backend or _before(other, head)
        ]
        return max(runs, default=0)

    def rest_s(self) -> float:
        """Return the prefill seconds that will follow the running pieces."""
        return fsum(waiting.rest_s for waiting in self.by_id.values() if not waiting.backend)

    def ahead_of(self, waiting: QueuedRequest, deadline: float, due: float) -> tuple[float, int]:
        """Return the seconds of `rest_s` that go before a request, and of how many prompts.

        The queues' order decides: by due time in one bucket, by deadline between two.
        """
        seconds, count = 0.0, 0
        for other in self.by_id.values():
            if other.backend or other is waiting:
                continue
            same = other.bucket == waiting.bucket
            if other.due <= due if same else other.deadline <= deadline:
                seconds, count = seconds + other.rest_s, count + 1
        return seconds, count


def _before(other: QueuedRequest, head: QueuedRequest) -> bool:
    """Return whether `other` can be sent while `head` may not start."""
    return other.flow != head.flow or other.bucket != head.bucket or other.key < head.key


def longest_run(
    request: Request, others: Iterable[QueuedRequest], known: int
) -> tuple[int, QueuedRequest | None]:
    """Find the prompt that shares the most leading blocks with a request.

    Args:
        known: only longer runs than this count.

    Returns:
        The length of the run in blocks and the other request; `known` and None if there is none.
    """
    blocks, most, found = request.blocks, known, None
    if len(blocks) > known:
        next_block = blocks[known]
        for other in others:
            theirs = other.request.blocks
            if len(theirs) > known and theirs[known] == next_block and other.request is not request:
                run = common_run(blocks, theirs, known + 1)
                if run > most:
                    most, found = run, other
    return most, found
