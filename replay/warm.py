"""Whether the servers' caches held a run's prompts before it began.

Every replay of a trace with one salt sends the same bytes, so that runs can be repeated; against
the same servers the second finds what the first left in their caches. What the prompts share among
themselves bounds what cold caches can hit: in whatever order requests are served, and however many
fail, a block must be computed once. Hits beyond that were there before.

Only for prompts that the replayer makes: text of the trace is sent unsalted, and what of it an
engine shares depends on the tokenizer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from forebay.replay.source import TraceSource
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.sharing import IdealCache

CLEAR_SHARE = 0.02  # of the prompt tokens, and a block: less may be a request tried twice
MOST_BLOCKS = 1_000_000  # looked at, 100 MB; of a larger trace nothing is said


def cache_warnings(
    source: TraceSource, sent: int, input_tokens: int, summary: Mapping[str, Any]
) -> list[str]:
    """What a run's summary says under `warnings`: a line if the caches were warm, else nothing.

    Args:
        sent: requests that left, the first so many of `source`.
        input_tokens: what the trace says of the prompts whose tokens the servers counted.
    """
    prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    if cached is None:
        return []
    try:
        shared = most_hits(islice(source.requests(), sent), input_tokens, prompt, cached)
    except InputError:  # the file has changed; what was measured is kept
        return []
    if shared is None:
        return []
    return [
        f"the caches were warm: {cached:,} of {prompt:,} prompt tokens were found in them, and "
        f"the prompts of this run share {shared:,} at most; --salt NEW makes prompts that no "
        "cache has seen"
    ]


def most_hits(
    sent: Iterable[TraceRequest], input_tokens: int, prompt_tokens: int, cached_tokens: int
) -> int | None:
    """The tokens that cold caches can have hit, if `cached_tokens` are clearly more; else None.

    None as well where it cannot be known. Reads no further than it must to tell.
    """
    # Tokens beyond the trace's count are a chat template, which all prompts share, or a tokenizer
    # that cuts words: either way they may be hits.
    shared = float(max(0, prompt_tokens - input_tokens))
    cache = IdealCache()
    clear = CLEAR_SHARE * prompt_tokens
    blocks = 0
    for request in sent:
        if request.text is not None:
            return None
        clear = max(clear, request.block_tokens)
        if request.blocks is None:  # lengths only: its text is made from its id
            name = (hash(request.id),)
            request = replace(request, blocks=name, block_tokens=request.input_tokens)
        shared += cache.look_up(request).hit_tokens
        blocks += len(request.blocks or ())
        if cached_tokens - shared <= clear or blocks > MOST_BLOCKS:
            return None
    return round(shared)
