"""Statistics over the requests of a load: percentiles, TTFT, cache hits, goodput, validity."""

from collections.abc import Iterable, Sequence

from forebay.replay.plan.slo import Slo, meets
from forebay.replay.results.row import Row as RequestRow
from forebay.replay.results.summary import LEAST_BEYOND, rank_of


def percentile(values: Iterable[float | None], percent: float) -> float | None:
    """The nearest-rank percentile, or None with fewer than LEAST_BEYOND samples above it."""
    ordered = sorted(v for v in values if v is not None)
    rank = rank_of(percent, len(ordered))
    return ordered[rank - 1] if len(ordered) - rank >= LEAST_BEYOND else None


def ttfts(seen: Iterable[RequestRow]) -> list[float]:
    """TTFT of the answered requests since they were due, in seconds."""
    times = (reply.ttft_response_s for reply in seen if reply.outcome == "ok")
    return [time_s for time_s in times if time_s is not None]


def hit_ratio(seen: Iterable[RequestRow]) -> float | None:
    """Cached share of the prompt tokens, or None if a server does not report cached tokens."""
    answered = [reply for reply in seen if reply.outcome == "ok"]
    if not answered or any(reply.cached_tokens is None for reply in answered):
        return None
    prompt = sum(reply.prompt_tokens or 0 for reply in answered)
    return sum(reply.cached_tokens or 0 for reply in answered) / prompt if prompt else None


def good(seen: Iterable[RequestRow], slos: Sequence[Slo]) -> int:
    """Number of requests that met all their targets, counted from when they were due."""
    met = 0
    for reply in seen:
        values = {
            "ttft": reply.ttft_response_s,
            "e2e": reply.e2e_response_s,
            "tpot": reply.tpot_s,
            "stall": reply.stall_s,
        }
        met += reply.outcome == "ok" and meets(slos, reply.bucket, values)
    return met


def window_s(due_s: Sequence[float]) -> float:
    """Seconds of arrivals: from the first to the last, plus one mean gap."""
    if len(due_s) < 2:
        return 0.0
    return (max(due_s) - min(due_s)) * len(due_s) / (len(due_s) - 1)


def middle_rate(times_s: Sequence[float]) -> float:
    """Events per second between the 10th and the 90th percentile of time. 0 with too few events.

    The ends are left out, because the first answer comes late and the last may be long.
    """
    ordered = sorted(times_s)
    first, last = len(ordered) // 10, len(ordered) - 1 - len(ordered) // 10
    span = ordered[last] - ordered[first] if last > first else 0.0
    return (last - first) / span if span > 0 else 0.0
