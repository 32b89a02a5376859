"""Statistics over the requests of a load: percentiles, TTFT, cache hits, goodput, validity."""

import math
from collections.abc import Iterable, Sequence

from forebay.analysis.experiments.systems import Seen
from forebay.replay.plan.slo import Slo, meets
from forebay.replay.results.summary import LEAST_BEYOND
from forebay.traces.ground.buckets import bucket_of


def percentile(values: Iterable[float | None], percent: float) -> float | None:
    """The nearest-rank percentile, or None with fewer than LEAST_BEYOND samples above it."""
    ordered = sorted(v for v in values if v is not None)
    rank = max(1, math.ceil(percent / 100 * len(ordered) - 1e-9))
    return ordered[rank - 1] if len(ordered) - rank >= LEAST_BEYOND else None


def ttfts(seen: Iterable[Seen]) -> list[float]:
    return [reply.ttft_s for reply in seen if reply.ok and reply.ttft_s is not None]


def hit_ratio(seen: Iterable[Seen]) -> float | None:
    """Cached share of the prompt tokens, or None if a server does not report cached tokens."""
    answered = [reply for reply in seen if reply.ok]
    if not answered or any(reply.cached_tokens is None for reply in answered):
        return None
    prompt = sum(reply.prompt_tokens or 0 for reply in answered)
    return sum(reply.cached_tokens or 0 for reply in answered) / prompt if prompt else None


def good(seen: Iterable[Seen], slos: Sequence[Slo]) -> int:
    """Number of requests that met all their targets, counted from when they were due."""
    met = 0
    for reply in seen:
        bucket = bucket_of(reply.request.input_tokens) or "other"
        values = {
            "ttft": reply.ttft_s,
            "e2e": reply.e2e_s,
            "tpot": reply.tpot_s,
            "stall": reply.stall_s,
        }
        met += reply.ok and meets(slos, bucket, values)
    return met


def window_s(seen: Sequence[Seen]) -> float:
    """Seconds of arrivals: from the first to the last, plus one mean gap."""
    if len(seen) < 2:
        return 0.0
    due = [reply.due_s for reply in seen]
    return (max(due) - min(due)) * len(due) / (len(due) - 1)
