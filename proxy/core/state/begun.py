"""Prompts that come to an engine piece by piece (`pieces.py`), and who waits for what it computes.

A prompt of which a piece was sent will be computed there whole: whoever asks about it follows, as
one would follow a prefill that is under way, and whoever waits there waits for the rest, too.
"""

from math import fsum

from forebay.proxy.core.learn.chains import common_run
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.coalescing import Prompts
from forebay.proxy.core.state.queue import Waiting


class Begun(Prompts):
    """Of one backend, from the first piece until the rest is sent or the request is gone.

    While a piece of it runs a prompt waits in no queue; between two pieces it does like any other.
    """

    def promised(self, request: Request, head: Waiting | None = None) -> int:
        """How many leading blocks of the request belong to another of these prompts.

        None of one that has begun itself: no two ever wait for each other.

        Args:
            head: the request, where it is the head of a queue here: it awaits nobody behind it.
        """
        prompts = self._prompts
        if not prompts or request.id in prompts:
            return 0
        runs = [
            common_run(request.blocks, other.request.blocks)
            for other in prompts.values()
            if head is None or not other.backend or _before(other, head)
        ]
        return max(runs, default=0)

    def rest_s(self) -> float:
        """Seconds of prefill that are to come after the pieces that run."""
        return fsum(waiting.rest_s for waiting in self._prompts.values() if not waiting.backend)

    def ahead_of(self, waiting: Waiting, deadline: float, due: float) -> tuple[float, int]:
        """Of these seconds, what goes before the request, and of how many prompts.

        By the order of the queues: who is due first in a bucket, the earlier deadline between two.
        """
        seconds, count = 0.0, 0
        for other in self._prompts.values():
            if other.backend or other is waiting:
                continue
            same = other.bucket == waiting.bucket
            if other.due <= due if same else other.deadline <= deadline:
                seconds, count = seconds + other.rest_s, count + 1
        return seconds, count


def _before(other: Waiting, head: Waiting) -> bool:
    """Whether it can be sent while `head` may not."""
    return other.lane != head.lane or other.bucket != head.bucket or other.key < head.key
