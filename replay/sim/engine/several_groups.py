"""Engines with several groups of layers, which `planning` plans without their blocks.

That is exact as long as no prompts share a prefix and the blocks are enough for all requests.
"""

from forebay.replay.engine.hardware.kv_layout import KvLayout
from forebay.replay.sim.engine.request import SimRequest


class KvDecides(Exception):
    """Several groups of layers share a prefix or lack blocks, which `Planner` cannot compute."""


class SeveralGroups:
    """Raises `KvDecides` as soon as the blocks of an engine could change a decision."""

    def __init__(self, layout: KvLayout, num_blocks: int, watermark: float) -> None:
        self._layout = layout
        self._blocks = num_blocks - 1
        self._held = int(watermark * num_blocks)  # the most blocks of all running requests
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

    def release(self, request: SimRequest) -> None:
        """Count the blocks of a finished request no more."""
        self._held -= self._layout.request_blocks(request.last)
