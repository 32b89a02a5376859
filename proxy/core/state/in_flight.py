"""A request that was sent to a backend and has not finished."""

from math import inf
from typing import Final

from forebay.proxy.core.learn.prefix_index import Touch
from forebay.proxy.core.model import Request

STEP_TOKENS: Final = 2_048
"""So many are computed in one engine step (the least max_num_batched_tokens of vLLM's defaults):
prefills that come to less cost one step together, however long a step is."""

OVERDUE_SHARE: Final = 0.1  # of a prefill: what it counts for until it answers


class Flight:
    """A request that was sent and has not finished."""

    __slots__ = (
        "bucket",
        "cold_s",
        "counts",
        "ends_at",
        "evidence",
        "exact",
        "first_token_at",
        "outdated",
        "output_tokens",
        "overdue_s",
        "prefill_s",
        "request",
        "reserved_tokens",
        "touch",
        "uncached_tokens",
    )

    def __init__(
        self,
        request: Request,
        bucket: str,
        prefill_s: float,
        cold_s: float,
        uncached_tokens: int,
        reserved_tokens: int,
        *,
        fresh: bool = False,
    ) -> None:
        """`fresh`: what is matched of it has just been computed for it."""
        self.request = request
        self.bucket = bucket
        self.prefill_s = prefill_s
        self.cold_s = cold_s
        self.uncached_tokens = uncached_tokens
        self.reserved_tokens = reserved_tokens  # KV cache for its output
        self.output_tokens = 0  # as it turned out; 0 while not known
        self.first_token_at: float | None = None
        self.ends_at = inf  # predicted, of a prefill whose end cannot be seen
        self.exact = False  # the match was looked up in what the engine reports to hold
        self.evidence = 0  # the stamp that is proved too old if the match was wrong; 0: none
        # Counts towards the bucket's limit: an answer from the cache is in nobody's way.
        self.counts = uncached_tokens > STEP_TOKENS or uncached_tokens == request.prompt_tokens
        self.touch: Touch | None = None
        # Of the whole prompt, in case nothing is cached; of the rest where the cache is certain.
        self.overdue_s = OVERDUE_SHARE * (prefill_s if fresh else cold_s)
        self.outdated = False  # the cache that it was sent to is gone

    @property
    def matched_tokens(self) -> int:
        """Of its prompt, taken to be cached when it was sent."""
        return self.request.prompt_tokens - self.uncached_tokens
