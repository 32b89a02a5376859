"""What else an engine does while a request waits in a queue for it.

By the earliest deadline the request goes before much of it. But buckets have their turns
(`turns.py`), more urgent ones come meanwhile, and an engine that cuts long prefills into chunks
computes one of each in every step (`chunks.py`).
"""

from collections.abc import Mapping
from math import fsum
from typing import Final

from forebay.proxy.core.model import Bucket
from forebay.proxy.core.policy.order import BUCKETS_SHARE
from forebay.proxy.core.state.backend import Backend

Buckets = Mapping[str, Bucket]
OVERTAKEN_MOST: Final = 1.0 - BUCKETS_SHARE / 2  # of the engine: what more urgent buckets can take
FULL_STEP_TOKENS: Final = 8_192
"""What a step computes while enough wait: vLLM's default `max_num_batched_tokens` for servers."""


def passes(buckets: Buckets, backend: Backend, bucket: str, other: str) -> bool:
    """Whether prefills of one bucket pass those of another, which are longer, in the engine."""
    return backend.line.chunked and buckets[bucket].up_to < buckets[other].up_to


def overtaken(buckets: Buckets, backend: Backend, bucket: str, now: float) -> float:
    """Share of the engine that more urgent buckets take while this one waits.

    A queued request waits 1/(1 - share) times the work before it (M/G/1 with priorities).
    """
    max_wait_s = buckets[bucket].max_wait_s
    share = fsum(
        backend.worked_share(other.name, now)
        for other in buckets.values()
        if other.max_wait_s < max_wait_s
    )
    return min(OVERTAKEN_MOST, share)


def owed_s(
    buckets: Buckets, backend: Backend, bucket: str, ahead_s: float, deadline: float, now: float
) -> float:
    """Of other buckets, work with a later deadline that goes first: it has its part of turns.

    While `ahead_s` is done, each other bucket in which somebody has waited long by then gets its
    share of the seconds.
    """
    share, due_s = BUCKETS_SHARE / len(backend.queues), 0.0
    for name, queue in backend.queues.items():
        if name == bucket or not queue.count or passes(buckets, backend, bucket, name):
            continue
        if queue.late_at() <= now + ahead_s:
            theirs_s = min(queue.work_s, share * ahead_s / (1.0 - share))
            due_s += max(0.0, theirs_s - queue.urgent(deadline)[0])
    return due_s


def lump_s(buckets: Buckets, backend: Backend, bucket: str, wait_s: float, now: float) -> float:
    """How much longer it may wait because what goes first by its turn comes in one piece.

    Prefills longer than the wait itself are kept away (`partition.py`).
    """
    max_wait_s, most = buckets[bucket].max_wait_s, 0.0
    for other in buckets.values():
        queue = backend.queues[other.name]
        if other.max_wait_s <= max_wait_s or queue.late_at() > now + wait_s:
            continue
        owed = backend.turns.buckets.owed_s(other.name) + wait_s * BUCKETS_SHARE / len(buckets)
        for head in queue.heads():
            if most < head.next_s <= max_wait_s and owed >= head.next_s:
                most = head.next_s
    return most


def beside_s(
    buckets: Buckets,
    backend: Backend,
    bucket: str,
    uncached_tokens: float,
    ahead_s: float,
    now: float,
) -> float:
    """How much longer it may wait because `ahead_s` is computed beside chunks of longer prefills.

    Full steps carry a chunk of each of them, until they end; others of their kind follow if they
    have waited long by then.
    """
    line, least = backend.line, max(uncached_tokens, backend.line.chunk_tokens)
    longer = [flight for flight in line.prefills.values() if flight.uncached_tokens > least]
    if not longer or ahead_s <= 0.0:
        return 0.0
    left = max(line.chunk_tokens, FULL_STEP_TOKENS - len(longer) * line.chunk_tokens)
    chunks_s = fsum(f.prefill_s * line.chunk_tokens / f.uncached_tokens for f in longer)
    all_s = fsum(flight.prefill_s for flight in longer)
    for name, queue in backend.queues.items():
        if passes(buckets, backend, bucket, name) and queue.late_at() <= now + ahead_s:
            all_s += queue.work_s
    return min(all_s, ahead_s * chunks_s / backend.cost.predict_s(left, left))
