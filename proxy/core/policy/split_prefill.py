"""Long prompts in pieces, so that others get in between: chunked prefill from outside the engine.

An engine that has begun a long prefill ends it before anything else. What it has computed of a
prompt stays in its prefix cache, though: so the proxy sends the beginning of a long prompt alone,
for one token, then a longer beginning, of which only the end is new, and at last the prompt itself.
Between any two of these those with less patience have their turn. A piece is so many tokens that
its prefill is predicted to take about `piece_s` (attention makes later tokens dearer): what is left
is cut evenly, so that the last one is no longer than the others.

This costs a step and a round trip a piece, so prompts go in pieces only while others come in that
would be held up (`Partition.long_s`), and need an engine that caches prefixes: one that does not,
or drops them at once, computes every piece from the start. So once a piece has found less there
than the one before it was to leave, the rest goes whole.
"""

from math import ceil
from typing import Final

from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.in_flight import Flight

LONGER: Final = 0.15  # of `piece_s`: so much longer may pieces be where there is one less for it
FOUND: Final = 0.5  # of what should be there
FROM_THE_START: Final = 0.75  # of a prefill with nothing cached: so long only without a cache


def may_be_cut(request: Request) -> bool:
    """Whether it is known where, and a beginning of it means the same."""
    return bool(request.blocks) and not request.whole


def beginning(
    request: Request, matched_tokens: int, before_blocks: int, cost: CostModel, piece_s: float
) -> Request | None:
    """What to send of the prompt next, as a request for one token; None: all of it.

    Args:
        matched_tokens: of it, believed to be cached.
        before_blocks: what the last piece was, 0 if there was none.
    """
    tokens, blocks = request.prompt_tokens, request.blocks
    if not may_be_cut(request):
        return None
    left_s = cost.predict_s(tokens - matched_tokens, tokens)
    pieces_left = ceil(left_s / piece_s - LONGER)
    if pieces_left <= 1:
        return None
    fixed_s = cost.predict_s(0, 0)  # of every piece
    each_s = (left_s + (pieces_left - 1) * fixed_s) / pieces_left
    matched_blocks = round(matched_tokens / request.block_tokens)
    if matched_blocks < before_blocks:
        return None
    count = max(
        matched_blocks + 1,
        int(_end(matched_tokens, tokens, cost, each_s) / request.block_tokens),
    )
    if count >= len(blocks):
        return None
    return Request(
        request.id,
        int(count * request.block_tokens),
        1,
        blocks[:count],
        request.block_tokens,
        request.timeout_s,
        True,  # the end of one token is its beginning
        request.tenant,
        request.service_class,
    )


def found_the_last(
    piece: Flight, cached_tokens: int | None, prompt_tokens: int, taken_s: float
) -> bool:
    """Whether the engine still held what was computed before this piece.

    Args:
        cached_tokens: as the engine says; None: it does not, and what the piece took tells.
        prompt_tokens: of the piece, as the engine counts; 0 when not known.
        taken_s: since the engine began with it.
    """
    if not piece.matched_tokens:
        return True
    if cached_tokens is None:
        return taken_s < FROM_THE_START * piece.cold_s
    tokens = piece.request.prompt_tokens
    return cached_tokens * tokens >= FOUND * piece.matched_tokens * (prompt_tokens or tokens)


def _end(begin: int, most: int, cost: CostModel, piece_s: float) -> int:
    """Up to which token a prefill from `begin` takes `piece_s`; `begin` where none does."""
    low, high = begin, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.predict_s(middle - begin, middle) <= piece_s:
            low = middle
        else:
            high = middle - 1
    return low
