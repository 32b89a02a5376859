"""Long prompts that wait for an engine, so that who asks about the same text joins them there.

Without it a hot document is computed on every engine that its askers wait for: until the first of
them is sent, nobody knows that it will be anywhere. And who is asked about by many is due sooner:
one prefill ends the wait of them all, and work that is worth n waits goes before work of the same
length that is worth one (W. E. Smith, "Various optimizers for single-stage production", 1956).
"""

from collections.abc import Iterable

from forebay.proxy.core.learn.chains import common_run
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.coalescing import Prompts
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import Waiting


class Leaders(Prompts):
    """Of one backend: who waits for it with a long prompt and follows nobody."""

    def add(self, waiting: Waiting) -> None:
        """One more waits, unless it is so short that nobody need wait for it."""
        if waiting.request.prompt_tokens > STEP_TOKENS:
            super().add(waiting)


def longest_run(
    request: Request, others: Iterable[Waiting], known: int
) -> tuple[int, Waiting | None]:
    """Who of the others has the most leading blocks in common with the request, and how many.

    Args:
        known: of interest are more than so many.
    """
    blocks, most, found = request.blocks, known, None
    if len(blocks) > known:
        next_block = blocks[known]
        for other in others:
            theirs = other.request.blocks
            if len(theirs) > known and theirs[known] == next_block and other.request is not request:
                run = common_run(blocks, theirs, known + 1)
                if run > most:
                    most, found = run, other
    return most, found
