"""The floor of TTFT for any router: every request has an engine to itself.

A request begins when it comes and shares an engine with nobody. Whatever prefix an earlier one has
had computed by then, anywhere, is a hit and stays one; it may also wait for a prefix that is under
way. What is left is the prefill of what is in no cache yet, which waits for whoever asks first.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.sizing.floor import alone
from forebay.replay.engine.config import EngineConfig
from forebay.traces.schema import TraceRequest

LENGTHS = 48  # at which an engine is asked how long a prefill takes; between them a straight line
Prefill = Callable[[float], float]


def floor_s(rows: Sequence[TraceRequest], prefill_s: Prefill) -> NDArray[np.float64]:
    """Least TTFT of each of `rows`, seconds, in their order, which is that of arrival.

    Args:
        prefill_s: TTFT of so many tokens on an idle engine with an empty cache; what is left of
            them after a hit takes the difference, exact but for the steps that end there.
    """
    ready: dict[int, float] = {}  # when the prefix that ends with this block can be computed
    return np.array([_first_token_s(row, ready, prefill_s) for row in rows])


def _first_token_s(row: TraceRequest, ready: dict[int, float], prefill_s: Prefill) -> float:
    """TTFT of one more request; its prefixes are added to `ready`."""
    blocks, size, tokens = row.blocks or (), row.block_tokens or 0, row.input_tokens
    cold = prefill_s(tokens)
    best, began, hit = cold, row.arrival_s, 0
    known = 0
    while known < len(blocks) and blocks[known] in ready:
        known += 1
    for number in range(known, 0, -1):
        at = ready[blocks[number - 1]]
        if number < known and at == ready[blocks[number]]:
            continue  # a longer one is there as soon
        covered = min(number * size, tokens - 1)
        starts = max(row.arrival_s, at)
        takes = starts - row.arrival_s + max(prefill_s(1), cold - prefill_s(covered))
        if takes < best:
            best, began, hit = takes, starts, covered
    # What is known already cannot come sooner: whoever began it came first.
    saved = prefill_s(hit) if hit else 0.0
    for number in range(known, len(blocks)):
        until_here = prefill_s(min((number + 1) * size, tokens))
        ready[blocks[number]] = min(row.arrival_s + until_here, began + until_here - saved)
    return best


def prefill_on(engine: EngineConfig) -> Prefill:
    """TTFT by prompt tokens, asked of the simulated engine at `LENGTHS` lengths."""
    lengths = np.unique(np.geomspace(1, engine.context - 1, LENGTHS).astype(int))
    took = [alone(engine, int(length)).ttft_s for length in lengths]

    def seconds(tokens: float) -> float:
        return float(np.interp(tokens, lengths, took))

    return seconds
