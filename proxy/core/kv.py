"""How much of a backend's KV cache the requests that run there hold.

A block that several of them share counts once; one that was cached and free counts as soon as
somebody runs on it, because it can no longer be evicted. Ends of prompts and outputs count whole.
"""

from forebay.proxy.core.model import Request


class KvReserve:
    def __init__(self) -> None:
        self._blocks: dict[int, list[float]] = {}  # hash: [requests on it, tokens]
        self._tokens = 0.0

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return round(self._tokens)

    def need(self, request: Request) -> int:
        """Tokens that the request would add."""
        held = self._blocks
        shared = 0
        for block in request.blocks:
            if block not in held:
                break
            shared += 1
        return max(0, self._whole(request) - int(shared * request.block_tokens))

    def take(self, request: Request) -> None:
        """The request runs."""
        self._tokens += self._unshared(request)
        for block in request.blocks:
            held = self._blocks.get(block)
            if held is None:
                self._blocks[block] = [1, request.block_tokens]
                self._tokens += request.block_tokens
            else:
                held[0] += 1

    def give_back(self, request: Request) -> None:
        """The request has left."""
        self._tokens -= self._unshared(request)
        for block in request.blocks:
            held = self._blocks[block]
            held[0] -= 1
            if not held[0]:
                del self._blocks[block]
                self._tokens -= held[1]

    def _whole(self, request: Request) -> int:
        return request.prompt_tokens + request.output_tokens

    def _unshared(self, request: Request) -> float:
        return max(0.0, self._whole(request) - len(request.blocks) * request.block_tokens)
