"""Simulate a trace of any length without keeping its requests.

The arrival times are kept, because the schedule needs them all: making it takes 46 bytes a row (526
MiB for 10 million rows), and 8 bytes a row stay (149 MiB with everything else). Rows are read again
while they are played. A request that has ended is counted into histograms of three significant
digits, as in a replay. The share of the possible goodput and the times of sessions are not
computed, because they need every request.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hdrh.histogram import HdrHistogram

from forebay.replay.plan.schedule import Schedule, make_schedule
from forebay.replay.plan.slo import SESSION, Slo, meets
from forebay.replay.plan.source import TraceSource
from forebay.replay.results.summary import PERCENTILES, rank_of, throughput
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.summary import simulated_verdict
from forebay.replay.sim.sweep import SweepCase
from forebay.replay.sim.workload import with_blocks
from forebay.traces.buckets import LengthBucket, bucket_of
from forebay.traces.command_line.garbage import no_collections
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

MOST_US = 3_600_000_000
METRICS = ("ttft", "e2e", "tpot", "stall", "queue")


@dataclass(slots=True)
class StreamTotals:
    """Counts of requests that have ended, and histograms by bucket and metric."""

    buckets: tuple[LengthBucket, ...]
    slos: tuple[Slo, ...]
    requests: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    output_tokens: int = 0
    last_s: float = 0.0
    histograms: dict[tuple[str, str], HdrHistogram] = field(default_factory=dict)

    def add(self, outcome: SimOutcome) -> None:
        """Count a request that was answered or rejected."""
        row = outcome.request
        bucket = bucket_of(row.input_tokens, self.buckets) or "other"
        self.requests[bucket] += 1
        if outcome.reject is not None:
            self.rejected[outcome.reject.reason] += 1
            return
        first_s, end_s = outcome.first_token_s, outcome.finished_s
        if first_s is None or end_s is None or outcome.sent_s is None:
            return
        several = row.output_tokens > 1
        values: dict[str, float | None] = {
            "ttft": first_s - row.arrival_s,
            "e2e": end_s - row.arrival_s,
            "tpot": (end_s - first_s) / (row.output_tokens - 1) if several else None,
            "stall": outcome.stall_s if several else None,
            "queue": outcome.sent_s - row.arrival_s,
        }
        for metric, value in values.items():
            if value is not None:
                self._histogram(metric, bucket).record_value(max(1, round(value * 1e6)))
        self.good[bucket] += meets(self.slos, bucket, values)
        self.prompt_tokens[outcome.backend or ""] += row.input_tokens
        self.cached_tokens += outcome.cached_tokens
        self.output_tokens += row.output_tokens
        self.last_s = max(self.last_s, end_s)

    def _histogram(self, metric: str, bucket: str) -> HdrHistogram:
        histogram = self.histograms.get((metric, bucket))
        if histogram is None:
            histogram = self.histograms[metric, bucket] = HdrHistogram(1, MOST_US, 3)
        return histogram

    def distributions(self, metric: str) -> dict[str, dict[str, float | int | None]]:
        """Return count, percentiles and maximum in ms, of all and of each bucket."""
        everything = HdrHistogram(1, MOST_US, 3)
        shown = {}
        for bucket in self.buckets:
            histogram = self.histograms.get((metric, bucket.name)) or HdrHistogram(1, MOST_US, 3)
            everything.add(histogram)
            shown[bucket.name] = _in_ms(histogram)
        return {"all": _in_ms(everything), **shown}


def _in_ms(histogram: HdrHistogram) -> dict[str, float | int | None]:
    count = histogram.get_total_count()
    shown: dict[str, float | int | None] = {"count": count}
    for percentile in PERCENTILES:
        # The library rounds ranks. A percentile of Forebay is the nearest rank above.
        share = 100 * rank_of(percentile, count) / count if count else 0.0
        value = histogram.get_value_at_percentile(share) / 1e3
        shown[f"p{percentile:g}"] = value if count else None
    shown["max"] = histogram.get_max_value() / 1e3 if count else None
    return shown


def stream_case(case: SweepCase) -> dict[str, Any]:
    """Simulate one case, and return its summary with the keys of `summary.json`.

    Raises:
        InputError: a trace that cannot be read or paced, or a pace that needs all requests.
    """
    scenario, workload = case.scenario, case.workload
    if workload.load is not None or workload.arrivals.closed:
        raise InputError("--stream: give --rate or --speed; a --load needs all requests")
    if any(slo.metric == SESSION for slo in case.slos):
        raise InputError(f"--stream keeps no request: leave out --slo {SESSION}")
    source = TraceSource(
        workload.trace,
        format_name=workload.format_name,
        skip_bad=workload.skip_bad,
        max_model_len=scenario.engine.context,
        too_long=workload.too_long,
    )
    # Read the trace once for the times of all arrivals, and again while it is played.
    scan = source.scan()
    source.check(scan, len(scan.arrivals_s))
    schedule = make_schedule(
        scan.arrivals_s,
        workload.arrivals,
        rate_per_s=workload.rate,
        speed=workload.speed,
        duration_s=workload.duration,
        seed=workload.seed,
    )
    del scan
    # Count each request when it ends, so that no request stays in memory.
    totals = StreamTotals(scenario.buckets(), case.slos)
    engines = scenario.new_engines()
    fleet = scenario.new_fleet(engines, totals.add)
    gc.collect()
    started = time.process_time()
    with no_collections():
        fleet.run(_paced(source, schedule))
    busy = [engine.busy_s / totals.last_s if totals.last_s else 0.0 for engine in engines.values()]
    preemptions = sum(engine.preemptions for engine in engines.values())
    return {
        **_summary(case, totals, schedule),
        "busy": [round(share, 4) for share in busy],
        "preemptions": preemptions,
        "constants_remarks": scenario.constants_remarks(),
        "cpu_s": round(time.process_time() - started, 3),
    }


def _paced(source: TraceSource, schedule: Schedule) -> Iterator[TraceRequest]:
    first_s = schedule.times_s[0]
    for row, at_s in zip(source.requests(), schedule.times_s, strict=False):
        yield replace(with_blocks(row), arrival_s=at_s - first_s)


def _summary(case: SweepCase, totals: StreamTotals, schedule: Schedule) -> dict[str, Any]:
    # Totals, over all requests that arrived.
    count, window_s = totals.requests.total(), schedule.window_s
    completed = count - totals.rejected.total()
    good, prompt_tokens = totals.good.total(), totals.prompt_tokens.total()
    summary: dict[str, Any] = {
        "case": dict(case.values),
        "requests": count,
        "completed": completed,
        "rejected": dict(sorted(totals.rejected.items())),
        "failed": {},
        "duration_s": totals.last_s,
        "window_s": window_s,
        "offered_rate_per_s": count / window_s if window_s else None,
        **throughput(completed, prompt_tokens, totals.output_tokens, totals.last_s),
        "goodput_per_s": good / window_s if window_s else None,
        "attainment": good / count,
        "attainment_by_bucket": {
            bucket.name: totals.good[bucket.name] / total
            if (total := totals.requests[bucket.name])
            else None
            for bucket in totals.buckets
        },
        "requests_by_bucket": {
            bucket.name: totals.requests[bucket.name] for bucket in totals.buckets
        },
        "possible_goodput_per_s": None,
        "share_of_possible": None,
        "slos": [str(slo) for slo in case.slos],
        "hit_ratio": totals.cached_tokens / prompt_tokens if prompt_tokens else None,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "prompt_tokens_per_backend": dict(sorted(totals.prompt_tokens.items())),
        **simulated_verdict(count, completed, dict(totals.rejected)),
    }
    # Percentiles come from histograms, because no row was kept.
    for metric in METRICS:
        summary[f"{metric}_ms"] = totals.distributions(metric)
    return summary
