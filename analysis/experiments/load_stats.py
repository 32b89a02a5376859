"""Statistics over the requests of a load: percentiles, TTFT, cache hits, goodput, validity."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.analysis.experiments.systems import Seen
from forebay.replay.plan.slo import Slo, meets
from forebay.replay.results.summary import LEAST_BEYOND
from forebay.traces.buckets import bucket_of


def percentile(values: Iterable[float | None], percent: float) -> float | None:
    """The nearest-rank percentile; None with fewer than LEAST_BEYOND samples above it."""
    known = sorted(v for v in values if v is not None)
    rank = max(1, math.ceil(percent / 100 * len(known) - 1e-9))
    return known[rank - 1] if len(known) - rank >= LEAST_BEYOND else None


def ttfts(seen: Iterable[Seen]) -> list[float]:
    return [one.ttft_s for one in seen if one.ok and one.ttft_s is not None]


def hit_ratio(seen: Iterable[Seen]) -> float | None:
    """Cached share of the prompt tokens; None if a server does not report cached tokens."""
    answered = [one for one in seen if one.ok]
    if not answered or any(one.cached_tokens is None for one in answered):
        return None
    prompt = sum(one.prompt_tokens or 0 for one in answered)
    return sum(one.cached_tokens or 0 for one in answered) / prompt if prompt else None


def good(seen: Iterable[Seen], slos: Sequence[Slo]) -> int:
    """Number of requests that met all their targets, counted from when they were due."""
    met = 0
    for one in seen:
        bucket = bucket_of(one.request.input_tokens) or "other"
        values = {"ttft": one.ttft_s, "e2e": one.e2e_s, "tpot": one.tpot_s, "stall": one.stall_s}
        met += one.ok and meets(slos, bucket, values)
    return met


def window_s(seen: Sequence[Seen]) -> float:
    """Seconds of arrivals: from the first to the last, plus one mean gap."""
    if len(seen) < 2:
        return 0.0
    due = [one.due_s for one in seen]
    return (max(due) - min(due)) * len(due) / (len(due) - 1)


def doubted(words: str, notes: list[str], rows: Iterable[Mapping[str, Any]], *keys: str) -> str:
    """Add to `words` and `notes` which loads are not valid; `keys` name a row."""
    bad = [
        f"{' '.join(f'{row[k]:g}' if isinstance(row[k], float) else str(row[k]) for k in keys)} "
        f"({row['verdict']})"
        for row in rows
        if row["verdict"] != "valid"
    ]
    if not bad:
        return words
    notes.append(f"not valid: {', '.join(bad)}")
    return f"Not valid, because the load generator or an engine could not keep up: {words}"
