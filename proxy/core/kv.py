"""How much of a backend's KV cache the requests that run there hold.

A block that several of them share counts once; one that was cached and free counts as soon as
somebody runs on it, because it can no longer be evicted. Ends of prompts and outputs count whole.
"""

from forebay.proxy.core.model import Request
from forebay.proxy.core.prefix import leading_run


class KvReserve:
    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # block: requests on it
        self._size: dict[int, float] = {}  # block: its tokens, as the first of them reckoned
        self.held = 0.0  # tokens

    @property
    def tokens(self) -> int:
        """Tokens held, whole ones."""
        return round(self.held)

    def need(self, request: Request) -> int:
        """Tokens that the request would add."""
        shared = leading_run(self._running, request.blocks)
        return max(0, self._whole(request) - int(shared * request.block_tokens))

    def take(self, request: Request) -> None:
        """The request runs."""
        running, blocks = self._running, request.blocks
        self.held += self._unshared(request)
        shared = leading_run(running, blocks)
        for block in blocks[:shared]:
            running[block] += 1
        block_tokens, size = request.block_tokens, self._size
        for block in blocks[shared:]:
            running[block] = 1
            size[block] = block_tokens
        self.held += (len(blocks) - shared) * block_tokens

    def give_back(self, request: Request) -> None:
        """The request has left."""
        running = self._running
        self.held -= self._unshared(request)
        for block in request.blocks:
            others = running[block] - 1
            if others:
                running[block] = others
            else:
                del running[block]
                self.held -= self._size.pop(block)
        if not running:
            self.held = max(0.0, self.held)

    def _whole(self, request: Request) -> int:
        return request.prompt_tokens + request.output_tokens

    def _unshared(self, request: Request) -> float:
        return max(0.0, self._whole(request) - len(request.blocks) * request.block_tokens)
