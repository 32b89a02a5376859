"""Engines with several groups of layers, which `planning` plans without their blocks.

That is exact as long as no prompts share a prefix and the blocks are enough for all requests.
"""

from forebay.replay.engine.hardware.kv_layout import KvLayout
from forebay.replay.engine.kv_blocks.chunk_ends import ChunkEnds
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.sim.engine.request import SimRequest


class KvDecides(Exception):
    """Several groups of layers share a prefix or lack blocks, which `Planner` cannot compute."""


class SeveralGroups:
    """Raises `KvDecides` as soon as the blocks of an engine could change a decision.

    Attributes:
        aligns: chunks end at blocks, where a recurrent state is kept.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, limits: SchedulerLimits) -> None:
        self._layout = layout
        self._blocks = num_blocks - 1
        self._held = int(limits.watermark * num_blocks)  # the most blocks of all running requests
        self.aligns = layout.has_states and limits.enable_prefix_caching
        self._ends = ChunkEnds(limits)
        self._begun: set[tuple[int, int]] = set()  # first trace blocks of prompts

    def begin(self, request: SimRequest) -> None:
        """Note the first block of a prompt, which no other may have."""
        begins = request.block_tokens, request.ids[0]
        if begins in self._begun:
            raise KvDecides
        self._begun.add(begins)

    def hold(self, request: SimRequest) -> None:
        """Count the most blocks of an admitted request."""
        self._held += self._layout.request_blocks(request.last)
        if self._held > self._blocks:
            raise KvDecides

    def chunk(
        self, request: SimRequest, before: int, count: int, budget: int, behind: int = 0
    ) -> int:
        """Return the tokens of the next chunk: `count` behind `before`, or fewer.

        Args:
            budget: tokens that are left in the step after a token for each decoding request.
            behind: most decoding requests that the scheduler plans after this request.
        """
        prompt, tokens = request.prompt_tokens, request.tokens
        size = self._ends.chunk(prompt, tokens, before, min(count, budget))
        if behind and size != self._ends.chunk(prompt, tokens, before, min(count, budget + behind)):
            raise KvDecides
        return size

    def release(self, request: SimRequest) -> None:
        """Count the blocks of a finished request no more."""
        self._held -= self._layout.request_blocks(request.last)
