"""Sum up the records of many runs: figures by router with intervals over seeds. Pure.

Only valid records count. Percentiles are of the answered requests of all seeds together; their 95 %
intervals come from drawing whole seeds with replacement (requests of one run are not independent,
runs are), so with few seeds they are wide, and with one there is none. Versions of Forebay are
never mixed.

A record has latencies as counts in bins that are 2 % wide: it is small, seeds can be pooled, and
each percentile is exact to 1 %.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from routers.plan import IDENTITY, Record, latest

from forebay.analysis.statistics.intervals import ConfidenceInterval
from forebay.analysis.statistics.quantiles import Floats, finite, order_statistic

WIDTH = math.log(1.02)  # of a bin
RESAMPLES = 1_000
OURS = "forebay"
SEED = 20_240_229  # of the resamples
Group = tuple[str, int, str, str]  # engines, count, model, endpoint
Matrix = NDArray[np.float64]


def summarise(seconds: Floats, requests: int) -> Record:
    """Return the answered of `requests`, their p50 and p99 in ms, and bins: [bin, count, ...]."""
    ordered = np.sort(finite(seconds))
    numbers, counts = np.unique([bin_of(value) for value in ordered.tolist()], return_counts=True)
    pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
    return {
        "requests": requests,
        "answered": len(ordered),
        **{
            name: round(order_statistic(ordered, share) * 1e3, 1) if len(ordered) else None
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "bins": [int(value) for value in chain.from_iterable(pairs)],
    }


def bin_of(seconds: float) -> int:
    """Number of the bin; bin 0 is 0.1 ms and below."""
    return max(0, round(math.log(max(seconds, 1e-9) / 1e-4) / WIDTH))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; None where there are too few seeds."""

    value: float
    interval: ConfidenceInterval | None


@dataclass(frozen=True)
class Entry:
    """One router on one workload: its latest records."""

    workload: str
    router: str
    records: Sequence[Record] = field(repr=False)

    @cached_property
    def valid(self) -> list[Record]:
        chosen = (record for record in self.records if record.get("verdict") == "valid")
        return sorted(chosen, key=lambda record: record["seed"])

    @property
    def error(self) -> str | None:
        """Why it has no figures at all, where it could not be started."""
        errors = [record["error"] for record in self.records if "error" in record]
        return errors[-1] if errors and len(errors) == len(self.records) else None

    @property
    def invalid(self) -> list[str]:
        return [record["why"] for record in self.records if record.get("verdict") == "invalid"]

    def answered(self, bucket: str) -> int:
        """Requests of a bucket that were answered, all seeds together."""
        figures = (record["figures"]["ttft"].get(bucket) for record in self.valid)
        return sum(of["answered"] for of in figures if of is not None)

    def ttft(self, bucket: str, share: float) -> Estimate | None:
        """A percentile of the answered, seconds."""
        summaries = (record["figures"]["ttft"].get(bucket) for record in self.valid)
        return percentile([summary for summary in summaries if summary is not None], share)

    def mean(self, name: str) -> Estimate | None:
        """The mean over seeds of a figure."""
        values = [record["figures"][name] for record in self.valid]
        known = np.array([value for value in values if value is not None], dtype=float)
        if not len(known):
            return None
        drawn = _weights(len(known)) @ known / len(known)
        return Estimate(fmean(known.tolist()), _interval(drawn, len(known)))

    def reasons(self, kind: str) -> Counter[str]:
        """Rejected or failed requests by reason, all seeds together."""
        counts: Counter[str] = Counter()
        for record in self.valid:
            counts.update(record["figures"][kind])
        return counts


def percentile(summaries: Sequence[Record], share: float) -> Estimate | None:
    """The percentile in seconds of the answered of all seeds; None where nothing was answered."""
    columns = [
        dict(zip(of["bins"][::2], of["bins"][1::2], strict=True)) for of in summaries
    ]  # fmt: skip
    numbers = sorted(set().union(*columns))
    if not numbers:
        return None
    counts = np.array([[of.get(number, 0) for number in numbers] for of in columns], dtype=float)
    # The first row counts each seed once, the others are resamples of the seeds.
    weights = np.vstack([np.ones(len(summaries)), _weights(len(summaries))])
    below = np.cumsum(weights @ counts, axis=1)
    totals = below[:, -1]
    ranks = np.maximum(1.0, np.ceil(share * totals - 1e-9))
    places = np.minimum((below < ranks[:, None]).sum(axis=1), len(numbers) - 1)
    values = np.array([1e-4 * math.exp(number * WIDTH) for number in numbers])[places]
    drawn = values[1:][totals[1:] > 0]
    return Estimate(float(values[0]), _interval(drawn, len(summaries)))


def _weights(count: int) -> Matrix:
    """Counts of each of `count` seeds in each resample; the same draws for equal counts."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    return generator.multinomial(count, [1 / count] * count, size=RESAMPLES).astype(np.float64)


def _interval(drawn: Matrix, seeds: int) -> ConfidenceInterval | None:
    if seeds < 2 or not len(drawn):
        return None
    known = np.sort(drawn)
    low, high = known[int(0.025 * len(known))], known[min(len(known) - 1, int(0.975 * len(known)))]
    return ConfidenceInterval(float(low), float(high))


def groups(records: Iterable[Record]) -> dict[Group, list[Entry]]:
    """Entries by what stood behind the routers, in order of first appearance."""
    found: dict[Group, dict[tuple[str, str], list[Record]]] = {}
    for record in _same_traces(latest(_one_program(list(records)))):
        group = (record["engines"], record["count"], record["model"], record["endpoint"])
        key = record["workload"], record["router"]
        found.setdefault(group, {}).setdefault(key, []).append(record)
    return {
        group: [Entry(workload, router, of) for (workload, router), of in entries.items()]
        for group, entries in found.items()
    }


def _one_program(records: Sequence[Record]) -> list[Record]:
    """Without runs of ours on a workload by other sources than the newest that count.

    The newest count from their second valid run on; a router that we did not write is what it is.
    """
    runs: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    for record in records:
        if record["router"] == OURS:
            runs.setdefault(_cell(record), {}).setdefault(record["version"], []).append(record)
    kept = {}
    for cell, of in runs.items():
        enough = [
            version for version, them in of.items()
            if sum(record.get("verdict") == "valid" for record in them) > 1
        ]  # fmt: skip
        kept[cell] = max(enough or of, key=lambda version: max(one["date"] for one in of[version]))
    return [one for one in records if kept.get(_cell(one), one["version"]) == one["version"]]


def _cell(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in IDENTITY if name != "seed")


def _same_traces(records: Sequence[Record]) -> list[Record]:
    """Without those of a trace that has been made anew since: only equal traces are comparable."""

    def place(record: Record) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("engines", "count", "workload", "seed"))

    newest = {place(record): record["trace"] for record in records}
    return [record for record in records if newest[place(record)] == record["trace"]]
