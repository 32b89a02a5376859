"""A request that was sent to a backend and has not finished."""

from collections.abc import Iterable
from math import ceil, inf
from typing import Final

from forebay.proxy.core.learn.cost import UNPROVEN
from forebay.proxy.core.learn.prefix_cache import Visit
from forebay.proxy.core.model import INSTANT_S, SLACK, Request
from forebay.proxy.core.state.kv_budget import Holding

STEP_TOKENS: Final = 2_048
"""Prompt tokens that fit into one engine step: the least max_num_batched_tokens of vLLM's defaults.
Prefills that together stay below it cost one step, however long a step takes.
Doubled: short documents count as hits, so several are computed at once."""


def counts(request: Request, uncached_tokens: int) -> bool:
    """True if a prefill counts towards `prefills_per_backend`. Cache hits do not."""
    return uncached_tokens > STEP_TOKENS or uncached_tokens == request.prompt_tokens


class InFlight:
    """A running request: sent to one backend, not finished.

    Attributes:
        visit: the request as the prefix cache sees it.
        prefill_s, cold_s: predicted prefill with the cache hit, and without any.
        reserved_tokens: KV cache reserved for its output.
        context_tokens: the tokens that a decode step reads for it, in the middle of its answer.
        holding: its share of the backend; None without a tenant.
        output_tokens: length of its answer; 0 while unknown.
        reached_at: when the engine gets it, as predicted: the API server tokenizes it first.
        sent_at: when it was sent.
        first_token_at: when its first token came; None before.
        ends_at: predicted end of a prefill whose first token cannot be seen; else inf.
        counts: it counts towards `prefills_per_backend`, as it is no cache hit.
        late_s: seconds of its prefill after which its answer is late, so it was hardly cached.
        overdue_s: least seconds its prefill counts for until its first token.
        priority: as sent to the engine; lower goes first.
    """

    def __init__(
        self,
        request: Request,
        bucket: str,
        prefill_s: float,
        cold_s: float,
        uncached_tokens: int,
        reserved_tokens: int,
        *,
        priority: int = 0,
    ) -> None:
        self.request = request
        self.visit = Visit(request, uncached_tokens)
        self.bucket = bucket
        self.prefill_s = prefill_s
        self.cold_s = cold_s
        self.uncached_tokens = uncached_tokens
        self.reserved_tokens = reserved_tokens
        self.context_tokens = request.sequences * request.prompt_tokens + reserved_tokens // 2
        self.priority = priority
        self.output_tokens = 0
        self.sent_at = self.reached_at = 0.0
        self.holding: Holding | None = None
        self.first_token_at: float | None = None
        self.ends_at = inf
        self.counts = counts(request, uncached_tokens)
        self.late_s = (1.0 + UNPROVEN) * prefill_s + INSTANT_S
        self.overdue_s = SLACK * cold_s  # the whole prompt may turn out uncached


def passing(
    prefills: Iterable[InFlight], uncached_tokens: float, chunk_tokens: float
) -> tuple[float, float]:
    """Return the seconds that a prefill of `uncached_tokens` waits for in a chunking engine.

    Returns:
        The whole prefills that are no longer than it. For longer prefills, which it passes, the
        chunks computed in the same steps, and in the steps that were planned before it came.
    """
    least = max(uncached_tokens, chunk_tokens)
    # Before its own steps: the rest of the running step, half on average, and the planned step.
    steps = 1.5 + ceil(uncached_tokens / chunk_tokens)
    equals_s = chunks_s = 0.0
    for prefill in prefills:
        if prefill.uncached_tokens <= least:
            equals_s += prefill.prefill_s
        else:
            share = steps * chunk_tokens / prefill.uncached_tokens
            chunks_s += prefill.prefill_s * min(1.0, share)
    return equals_s, chunks_s
