"""Where the chunks of a prompt end if its recurrent states are kept in the prefix cache.

The rules are vLLM 0.32's and 0.33's `Scheduler._mamba_block_aligned_split`.
"""

from forebay.replay.engine.limits import SchedulerLimits


def prefill_end(prompt_tokens: int, tokens: int) -> int:
    """Return the tokens up to which chunks are aligned: the prompt's, or more after preemption."""
    return max(prompt_tokens, tokens - 1)


class ChunkEnds:
    """The ends of chunks: at whole blocks, and at the last state of a prompt that can be kept."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._block_size = limits.block_size
        self._exports = limits.enable_prefix_caching and any(g.exports for g in limits.groups)
        self._most_prefill = limits.max_num_batched_tokens
        if limits.long_prefill_token_threshold:
            self._most_prefill = min(self._most_prefill, limits.long_prefill_token_threshold)

    def chunk(
        self, prompt_tokens: int, tokens: int, start: int, count: int, junction: int = 0
    ) -> int:
        """Return the tokens of the next chunk: `count` behind `start`, or fewer.

        Args:
            prompt_tokens, tokens: tokens of the request, without and with its output.
            junction: tokens of the longest prefix that any layers have. 0: as many as the hit.
        """
        size, end = self._block_size, start + count
        last = prefill_end(prompt_tokens, tokens)
        if start >= last:
            return count
        exports = self.exports_state(last, start, end, last)
        # Several chunks fill a block that is too large for one.
        if end < last:
            aligned = end // size * size
            if aligned > start or size <= self._most_prefill:
                end = aligned
        # A chunk stops at the last state that can be kept, and where a shared prefix ended.
        stops = [] if exports else [(tokens - 1) // size * size]
        if start % size and not exports:
            stops.append((start // size + 1) * size)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

    def exports_state(self, last: int, start: int, end: int, upto: int) -> bool:
        """Return True if a chunk that ends the prompt also leaves a state inside it.

        Args:
            last: tokens up to which chunks are aligned.
            upto: the state is the last before this token.
        """
        size, boundary = self._block_size, (upto - 1) // self._block_size * self._block_size
        if not self._exports or end < last or start % size:
            return False
        block = -(-end // size) - 2  # the block at whose end it leaves the state
        return block > (start - 1) // size and start + size <= boundary
