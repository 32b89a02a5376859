"""Detect if the servers' caches contained a run's prompts before it began.

Replays of a trace with one salt send the same bytes, so that runs can be repeated. Against the same
servers the second replay hits the blocks that the first replay left in their caches. Cold caches
can hit only blocks that the prompts share with one another: in any order, and with any failures,
each block must be computed once. More hits mean that the caches were warm.

This works only for prompts that the replayer makes. Text of the trace is sent without a salt, and
the tokenizer determines which of its blocks an engine shares.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from forebay.replay.plan.source import TraceSource
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

CLEAR_SHARE = 0.02  # excess hits, as a share of prompt tokens. Fewer may be a retried request
MOST_BLOCKS = 1_000_000  # most blocks to check, in 100 MB. A larger trace gets no warning


def cache_warnings(
    source: TraceSource, sent: int, input_tokens: int, summary: Mapping[str, Any]
) -> list[str]:
    """Make the `warnings` of a run's summary: one line if the caches were warm, else no line.

    Args:
        sent: number of requests sent, the first requests of `source`.
        input_tokens: the trace's count of the prompts whose tokens the servers counted.
    """
    prompt, cached = summary["prompt_tokens"], summary["cached_tokens"]
    if cached is None:
        return []
    try:
        shared = most_hits(islice(source.requests(), sent), input_tokens, prompt, cached)
    except InputError:  # the file has changed: keep the measurements
        return []
    if shared is None:
        return []
    return [
        f"the caches were warm: {cached:,} of {prompt:,} prompt tokens were found in them, but "
        f"the prompts of this run share {shared:,} at most; without --salt "
        "each run has prompts that no cache has seen"
    ]


def most_hits(
    sent: Iterable[TraceRequest], input_tokens: int, prompt_tokens: int, cached_tokens: int
) -> int | None:
    """Return the most tokens that cold caches can hit, if `cached_tokens` is clearly more.

    Returns None otherwise, and if it is unknown. Reads no more requests than necessary.
    """
    # Tokens beyond the trace's count are from a chat template, which all prompts share, or from a
    # tokenizer that splits words. Both may be hits.
    shared = float(max(0, prompt_tokens - input_tokens))
    cache = IdealCache()
    clear = CLEAR_SHARE * prompt_tokens
    blocks = 0
    for request in sent:
        if request.text is not None:
            return None
        clear = max(clear, request.block_tokens)
        if request.blocks is None:  # only lengths are known: its text is made from its id
            name = (hash(request.id),)
            request = replace(request, blocks=name, block_tokens=request.input_tokens)
        shared += cache.look_up(request).hit_tokens
        blocks += len(request.blocks or ())
        if cached_tokens - shared <= clear or blocks > MOST_BLOCKS:
            return None
    return round(shared)
