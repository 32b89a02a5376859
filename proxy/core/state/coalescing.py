"""Prompts that a backend will compute, so that requests with the same prefix can wait for them.

A prefill that many requests share is computed once (single-flight). Its leader is a waiting
request with a long prompt. Which request follows which is decided in `policy/coalesce.py`.
"""

from collections.abc import Iterable, Sequence

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import QueuedRequest


class ByPrefix:
    """Waiting requests of one backend by their prompts' blocks at positions 1, 2, 4, 8 ...

    Block hashes are chained: prompts that are equal in one block are equal in all before it.

    Attributes:
        by_id: all of them.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, QueuedRequest] = {}
        self._by_block: dict[int, dict[str, QueuedRequest]] = {}

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request."""
        request_id = waiting.request.id
        self.by_id[request_id] = waiting
        for block in _marks(waiting.request.blocks):
            self._by_block.setdefault(block, {})[request_id] = waiting

    def drop(self, request_id: str) -> bool:
        """Remove a request. True if it was there."""
        waiting = self.by_id.pop(request_id, None)
        if waiting is None:
            return False
        for block in _marks(waiting.request.blocks):
            group = self._by_block.get(block)
            if group is not None:
                group.pop(request_id, None)
                if not group:
                    del self._by_block[block]
        return True

    def near(self, blocks: Sequence[int], place: int) -> Iterable[QueuedRequest]:
        """Return all requests that share the block at a place, and some that share earlier blocks.

        Args:
            place: from 0, below the number of blocks.
        """
        mark = (1 << ((place + 1).bit_length() - 1)) - 1
        return self._by_block.get(blocks[mark], _NONE).values()

    def longest_run(self, request: Request, above: int) -> tuple[int, QueuedRequest | None]:
        """Find the prompt that shares the most leading blocks with a request.

        Args:
            above: only longer runs than this count.

        Returns:
            The length of the run in blocks and the other request, or `above` and None.
        """
        blocks, most, best = request.blocks, above, None
        if len(blocks) > above:
            next_block = blocks[above]
            for other in self.near(blocks, above):
                theirs = other.request.blocks
                same = len(theirs) > above and theirs[above] == next_block
                if same and other.request is not request:
                    run = common_run(blocks, theirs, above + 1)
                    if run > most:
                        most, best = run, other
        return most, best


class Leaders(ByPrefix):
    """Requests that wait for one backend with a long prompt and follow no other request."""

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request, unless its prompt is too short for others to wait for it."""
        if waiting.request.prompt_tokens > STEP_TOKENS:
            super().add(waiting)


_NONE: dict[str, QueuedRequest] = {}


def _marks(blocks: Sequence[int]) -> list[int]:
    return [blocks[(1 << power) - 1] for power in range(len(blocks).bit_length())]
