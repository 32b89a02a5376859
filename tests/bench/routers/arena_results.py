"""Sum up the records of many runs: figures by router with intervals over seeds. Pure.

Only valid records count. Percentiles are of the answered requests of all seeds together; their 95 %
intervals come from drawing whole seeds with replacement (requests of one run are not independent,
runs are), so with few seeds they are wide, and with one there is none. Two routers are compared on
the seeds and traces that both have, drawn together. Versions of Forebay are never mixed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from arena_plan import IDENTITY, Record, latest
from arena_samples import middle_s, pooled, quantile_s
from numpy.typing import NDArray

from forebay.analysis.statistics.quantile_intervals import ConfidenceInterval

RESAMPLES = 1_000
OURS = "forebay"
SEED = 20_240_229  # of the resamples
Group = tuple[str, int, str, str]  # engines, count, model, endpoint
Matrix = NDArray[np.float64]


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
        return sorted(
            (one for one in self.records if one.get("verdict") == "valid"),
            key=lambda one: one["seed"],
        )

    @property
    def error(self) -> str | None:
        """Why it has no figures at all, where it could not be started."""
        told = [one["error"] for one in self.records if "error" in one]
        return told[-1] if told and len(told) == len(self.records) else None

    @property
    def invalid(self) -> list[str]:
        return [one["why"] for one in self.records if one.get("verdict") == "invalid"]

    def ttft(self, bucket: str, share: float) -> Estimate | None:
        """A percentile of the answered, seconds."""
        return _quantile(self.valid, bucket, share)

    def mean(self, name: str) -> Estimate | None:
        """The mean over seeds of a figure."""
        values = [one["figures"][name] for one in self.valid]
        known = [float(one) for one in values if one is not None]
        return _mean(known) if known else None

    def reasons(self, kind: str) -> Counter[str]:
        """Rejected or failed requests by reason, all seeds together."""
        counts: Counter[str] = Counter()
        for one in self.valid:
            counts.update(one["figures"][kind])
        return counts


def groups(records: Iterable[Record]) -> dict[Group, list[Entry]]:
    """Entries by what stood behind the routers, in order of first appearance."""
    sorted_: dict[Group, dict[tuple[str, str], list[Record]]] = {}
    for one in _same_traces(latest(_one_program(list(records)))):
        group = (one["engines"], one["count"], one["model"], one["endpoint"])
        sorted_.setdefault(group, {}).setdefault((one["workload"], one["router"]), []).append(one)
    return {
        group: [Entry(workload, router, of) for (workload, router), of in entries.items()]
        for group, entries in sorted_.items()
    }


def _one_program(records: Sequence[Record]) -> list[Record]:
    """Without runs of ours on a workload by other sources than the newest that count.

    The newest count from their second valid run on; a router that we did not write is what it is.
    """
    runs: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    for one in records:
        if one["router"] == OURS:
            runs.setdefault(_cell(one), {}).setdefault(one["version"], []).append(one)
    kept = {}
    for cell, of in runs.items():
        enough = [
            version for version, them in of.items()
            if sum(one.get("verdict") == "valid" for one in them) > 1
        ]  # fmt: skip
        kept[cell] = max(enough or of, key=lambda version: max(one["date"] for one in of[version]))
    return [one for one in records if kept.get(_cell(one), one["version"]) == one["version"]]


def _cell(one: Record) -> tuple[Any, ...]:
    return tuple(one[name] for name in IDENTITY if name != "seed")


def _same_traces(records: Sequence[Record]) -> list[Record]:
    """Without those of a trace that has been made anew since: only equal traces are comparable."""
    newest: dict[tuple[Any, ...], str] = {}
    for one in records:
        newest[one["engines"], one["count"], one["workload"], one["seed"]] = one["trace"]
    return [
        one for one in records
        if newest[one["engines"], one["count"], one["workload"], one["seed"]] == one["trace"]
    ]  # fmt: skip


def _quantile(records: Sequence[Record], bucket: str, share: float) -> Estimate | None:
    with_it = [one for one in records if bucket in one["figures"]["ttft"]]
    counts, _ = pooled(one["figures"]["ttft"][bucket] for one in with_it)
    value = quantile_s(counts, share)
    if value is None:
        return None
    if len(with_it) < 2:
        return Estimate(value, None)
    drawn = _weighted_quantile(with_it, bucket, share, _weights(len(with_it)))
    return Estimate(value, _interval(drawn))


def _weighted_quantile(
    records: Sequence[Record], bucket: str, share: float, weights: Matrix
) -> Matrix:
    """The quantile, record i counting `weights[row, i]` times, in seconds; NaN without samples."""
    columns = [dict(_pairs(one["figures"]["ttft"].get(bucket))) for one in records]
    numbers = sorted(set().union(*columns))
    if not numbers:
        return np.full(len(weights), np.nan)
    counts = np.array([[of.get(number, 0) for number in numbers] for of in columns], dtype=float)
    below = np.cumsum(weights @ counts, axis=1)
    totals = below[:, -1]
    ranks = np.maximum(1.0, np.ceil(share * totals - 1e-9))
    places = np.minimum((below < ranks[:, None]).sum(axis=1), len(numbers) - 1)
    values = np.array([middle_s(number) for number in numbers])[places]
    values[totals == 0] = np.nan
    return np.asarray(values, dtype=np.float64)


def _pairs(binned: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    bins = binned["bins"] if binned is not None else []
    return list(zip(bins[::2], bins[1::2], strict=True))


def _weights(count: int) -> Matrix:
    """Counts of each of `count` seeds in each resample; the same draws for equal counts."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    return generator.multinomial(count, [1 / count] * count, size=RESAMPLES).astype(np.float64)


def _mean(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(values[0], None)
    drawn = _weights(len(values)) @ np.array(values) / len(values)
    return Estimate(fmean(values), _interval(drawn))


def _interval(drawn: Matrix) -> ConfidenceInterval | None:
    known = np.sort(drawn[~np.isnan(drawn)])
    if not len(known):
        return None
    low, high = known[int(0.025 * len(known))], known[min(len(known) - 1, int(0.975 * len(known)))]
    return ConfidenceInterval(float(low), float(high))
