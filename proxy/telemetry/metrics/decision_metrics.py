"""Metrics of the quality of decisions: SLO attainment, needless rejections, prediction errors.

They are read from the sums of the receipts at each scrape. Labels: buckets, and fixed lists.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from forebay.proxy.core.explain.receipt import ERROR_S, DecisionTally, Receipts
from forebay.proxy.core.shaper import Shaper


class DecisionMetrics:
    """A collector. `clock` is the clock of the shaper."""

    def __init__(self, shaper: Shaper, receipts: Receipts, clock: Callable[[], float]) -> None:
        self._shaper = shaper
        self._receipts = receipts
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        self._shaper.settle(self._clock())
        # Every series from the start, so that the first one counts in a rate.
        tallies = [(bucket, self._receipts.tally(bucket)) for bucket in self._shaper.buckets]
        admitted = CounterMetricFamily(
            "forebay_admitted",
            "Admitted requests, by whether the first token came within the target",
            labels=["bucket", "outcome"],
        )
        refusals = CounterMetricFamily(
            "forebay_refusals_in_hindsight",
            "Requests rejected for lack of time or room, by whether that was right (an estimate)",
            labels=["bucket", "verdict"],
        )
        errors = HistogramMetricFamily(
            "forebay_ttft_error_seconds",
            "Error of the time to first token predicted on arrival, late and early",
            labels=["bucket", "side"],
        )
        observed = CounterMetricFamily(
            "forebay_observed",
            "Requests in mode observe, by the rule that would have decided",
            labels=["bucket", "rule"],
        )
        # Then the counts of each bucket.
        for bucket, tally in tallies:
            for rule, count in tally.observed.items():
                observed.add_metric([bucket, rule], count)
            for outcome, count in tally.admitted.items():
                admitted.add_metric([bucket, outcome], count)
            for verdict, count in tally.refusals.items():
                refusals.add_metric([bucket, verdict], count)
            for side, counts, sum_s in _errors(tally):
                bounds = [*map(str, ERROR_S), "+Inf"]
                cumulative = [float(count) for count in accumulate(counts)]
                errors.add_metric([bucket, side], list(zip(bounds, cumulative, strict=True)), sum_s)
        yield from (admitted, refusals, errors, observed)


def _errors(tally: DecisionTally) -> Iterable[tuple[str, list[int], float]]:
    yield "late", tally.late, tally.late_s
    yield "early", tally.early, tally.early_s
