"""How much of a backend's KV cache the requests that run there hold.

A block that several of them share counts once; one that was cached and free counts as soon as
somebody runs on it, because it can no longer be evicted. Ends of prompts and outputs count whole.

Hashes are chained: prompts that share a block share all before it. So what one prompt shares with
the others is the longest beginning it has in common with any of them, and nothing needs to be
kept a block.
"""

from forebay.proxy.core.learn.chains import common_run
from forebay.proxy.core.model import Request


class _Root:
    """The running prompts that begin with one block."""

    __slots__ = ("block_tokens", "prompts")

    def __init__(self, block_tokens: float) -> None:
        self.block_tokens = block_tokens  # as the first of them reckoned
        self.prompts: dict[str, tuple[int, ...]] = {}

    def shared(self, blocks: tuple[int, ...]) -> int:
        """How many leading blocks of a prompt are held by these."""
        longest = 0
        for other in self.prompts.values():
            if longest == len(blocks):
                break
            # Another can only matter where it goes on as `blocks` does beyond the longest so far.
            if longest < len(other) and other[longest] == blocks[longest]:
                longest = common_run(blocks, other, longest + 1)
        return longest


class KvReserve:
    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}
        self.held = 0.0  # tokens

    @property
    def tokens(self) -> int:
        """Tokens held, whole ones."""
        return round(self.held)

    def need(self, request: Request, output_tokens: int) -> int:
        """Tokens that the request would add if it generates so many."""
        blocks = request.blocks
        root = self._roots.get(blocks[0]) if blocks else None
        shared = root.shared(blocks) if root is not None else 0
        return max(0, request.prompt_tokens + output_tokens - int(shared * request.block_tokens))

    def take(self, request: Request, output_tokens: int) -> None:
        """The request runs, and is reckoned to generate so many tokens."""
        self.held += _unshared(request, output_tokens)
        blocks = request.blocks
        if not blocks:
            return
        root = self._roots.get(blocks[0])
        if root is None:
            root = self._roots[blocks[0]] = _Root(request.block_tokens)
        self.held += (len(blocks) - root.shared(blocks)) * root.block_tokens
        root.prompts[request.id] = blocks

    def give_back(self, request: Request, output_tokens: int) -> None:
        """The request has left; `output_tokens` as when it came."""
        self.held -= _unshared(request, output_tokens)
        blocks = request.blocks
        if blocks:
            root = self._roots[blocks[0]]
            del root.prompts[request.id]
            self.held -= (len(blocks) - root.shared(blocks)) * root.block_tokens
            if not root.prompts:
                del self._roots[blocks[0]]
        if self.held < 0.5:  # of rounding
            self.held = 0.0


def _unshared(request: Request, output_tokens: int) -> float:
    whole = request.prompt_tokens + output_tokens
    return max(0.0, whole - len(request.blocks) * request.block_tokens)
