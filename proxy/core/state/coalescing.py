"""Prompts that a backend will compute, so that requests with the same prefix can wait for them.

A prefill that many requests share is computed once (single-flight). Its leader is a waiting
request with a long prompt. Which request follows which is decided in `policy/coalesce.py`.
"""

from collections.abc import Iterable

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import QueuedRequest


class Leaders:
    """Requests that wait for one backend with a long prompt and follow no other request."""

    def __init__(self) -> None:
        self.by_id: dict[str, QueuedRequest] = {}

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request, unless its prompt is too short for others to wait for it."""
        if waiting.request.prompt_tokens > STEP_TOKENS:
            self.by_id[waiting.request.id] = waiting

    def drop(self, request_id: str) -> bool:
        """Remove a request. True if it was a leader."""
        return self.by_id.pop(request_id, None) is not None


def longest_run(
    request: Request, others: Iterable[QueuedRequest], above: int
) -> tuple[int, QueuedRequest | None]:
    """Find the prompt that shares the most leading blocks with a request.

    Args:
        above: only longer runs than this count.

    Returns:
        The length of the run in blocks and the other request, or `above` and None.
    """
    blocks, most, best = request.blocks, above, None
    if len(blocks) > above:
        next_block = blocks[above]
        for other in others:
            theirs = other.request.blocks
            if len(theirs) > above and theirs[above] == next_block and other.request is not request:
                run = common_run(blocks, theirs, above + 1)
                if run > most:
                    most, best = run, other
    return most, best
