"""Engines that cut long prefills into chunks, so that shorter ones pass them.

With `--long-prefill-token-threshold` vLLM computes at most so many tokens of one prompt in a step
while there are others. A prefill then shares each of its steps with one chunk of every longer one:
it waits for a few chunks instead of for the whole prefill, and no engine need be kept clear.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final

from forebay.proxy.core.state.in_flight import Flight

STEP_UNDER_WAY: Final = 0.5  # of a step: what is left, on average, of the one that a newcomer meets
LEARN_FROM: Final = 4.0
"""Work is attributed to the prefills that end. Of those under way nobody knows how far they are:
what has ended must be so many times more for it not to matter."""


def passing(
    line: Iterable[Flight], uncached_tokens: float, chunk_tokens: float
) -> tuple[float, float]:
    """What a prefill of so many tokens waits for in a line, in seconds.

    Returns:
        Those that are no longer than it, whole; and of the longer ones, which it passes, the
        chunks computed in the same steps.
    """
    least = max(uncached_tokens, chunk_tokens)
    steps = ceil(uncached_tokens / chunk_tokens) + STEP_UNDER_WAY
    equals_s = chunks_s = 0.0
    for flight in line:
        if flight.uncached_tokens <= least:
            equals_s += flight.prefill_s
        else:
            share = steps * chunk_tokens / flight.uncached_tokens
            chunks_s += flight.prefill_s * min(1.0, share)
    return equals_s, chunks_s
