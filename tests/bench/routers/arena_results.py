"""Sum up the records of many runs: figures by router with intervals over seeds. Pure.

Only valid records count. Percentiles are of the answered requests of all seeds together; their 95 %
intervals come from drawing whole seeds with replacement (requests of one run are not independent,
runs are), so with few seeds they are wide, and with one there is none. Two routers are compared on
the seeds and traces that both have, drawn together. Versions of Forebay are never mixed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np
from arena_plan import IDENTITY, Record, latest
from arena_samples import middle_s, pooled, quantile_s
from numpy.typing import NDArray

from forebay.analysis.statistics.quantile_intervals import ConfidenceInterval

RESAMPLES = 1_000
OURS = ("forebay", "forebay in pieces")
ANSWERED_LESS = 0.01  # a peer that answered a smaller share than ours by more is not "best"
SEED = 20_240_229  # of the resamples
SEEDS_SHARE = 0.5  # of the most seeds that a peer has in common with us: one with fewer says little
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

    def buckets(self) -> list[str]:
        return list(dict.fromkeys(
            name for one in self.valid for name in one["figures"]["ttft"]
        ))  # fmt: skip

    def ttft(self, bucket: str, share: float) -> Estimate | None:
        """A percentile of the answered, seconds."""
        return _quantile(self.valid, bucket, share)

    def worst_stall_s(self, bucket: str) -> float | None:
        stalls = [one["figures"]["worst_stall_ms"].get(bucket) for one in self.valid]
        known = [one for one in stalls if one is not None]
        return max(known) / 1e3 if known else None

    def mean(self, name: str) -> Estimate | None:
        """The mean over seeds of a figure."""
        values = [one["figures"][name] for one in self.valid]
        known = [float(one) for one in values if one is not None]
        return _mean(known) if known else None

    def imbalance(self) -> float | None:
        """Prompt tokens of the busiest engine over those of the idlest; the seeds' median."""
        ratios = [
            max(tokens) / min(tokens) if min(tokens) > 0 else math.inf
            for tokens in (one["figures"]["prompt_tokens"] for one in self.valid)
            if max(tokens) > 0
        ]
        return median(ratios) if ratios else None

    def reasons(self, kind: str) -> Counter[str]:
        """Rejected or failed requests by reason, all seeds together."""
        counts: Counter[str] = Counter()
        for one in self.valid:
            counts.update(one["figures"][kind])
        return counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against the best peer in one figure; `gain` above 1 means ours is better.

    `answered` and `they_answered` are the shares of requests that the figure is of.
    """

    workload: str
    figure: str
    router: str
    ours: float
    best: str
    theirs: float
    gain: Estimate
    seeds: int
    answered: float
    they_answered: float


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
        if one["router"] in OURS:
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


def comparisons(entries: Sequence[Entry]) -> list[Comparison]:
    """Each of ours against the best peer of each workload, in the tails and in goodput."""
    found = []
    for workload in dict.fromkeys(one.workload for one in entries):
        of = {one.router: one for one in entries if one.workload == workload and one.valid}
        peers = {name: one for name, one in of.items() if name not in OURS}
        for ours in (of[name] for name in OURS if name in of and peers):
            for bucket in ours.buckets():
                found.append(_best(ours, peers, f"{bucket} TTFT p99", _tail(bucket), bucket))
            found.append(_best(ours, peers, "goodput", _goodput, None))
    return [one for one in found if one is not None]


Measure = Callable[[Sequence[Record], Matrix], Matrix]
"""A figure of some seeds' records, once for each row of weights."""


def _tail(bucket: str) -> Measure:
    def measure(records: Sequence[Record], weights: Matrix) -> Matrix:
        return _weighted_quantile(records, bucket, 0.99, weights)

    return measure


def _goodput(records: Sequence[Record], weights: Matrix) -> Matrix:
    values = np.array([one["figures"]["goodput_per_s"] or 0.0 for one in records])
    return np.asarray(weights @ values / weights.sum(axis=1), dtype=np.float64)


def _best(
    ours: Entry, peers: Mapping[str, Entry], figure: str, measure: Measure, bucket: str | None
) -> Comparison | None:
    """In a latency of `bucket`, where less is better, or without one in something of everything."""
    lower = bucket is not None
    rows = []
    for name, peer in peers.items():
        mine, theirs = _paired(ours.valid, peer.valid)
        if not mine:
            continue
        if lower and any(
            _answered(theirs, of) < _answered(mine, of) - ANSWERED_LESS for of in (bucket, None)
        ):
            continue  # fast because it refused others, of this kind or of another
        whole = np.ones((1, len(mine)))
        a, b = float(measure(mine, whole)[0]), float(measure(theirs, whole)[0])
        if not math.isnan(a) and not math.isnan(b):
            rows.append((_gain(a, b, lower), name, a, b, mine, theirs))
    most = max((len(row[-1]) for row in rows), default=0)
    # Peers have run with different seeds, some of which are kind to everybody.
    rows = [row for row in rows if len(row[-1]) >= SEEDS_SHARE * most]
    if not rows:
        return None
    gain, name, a, b, mine, theirs = min(rows, key=lambda row: row[:2])
    weights = _weights(len(mine))
    with np.errstate(divide="ignore", invalid="ignore"):
        above, below = measure(theirs, weights), measure(mine, weights)
        ratios = above / below if lower else below / above
    interval = _interval(ratios) if len(mine) > 1 else None
    return Comparison(
        ours.workload, figure, ours.router, a, name, b, Estimate(gain, interval), len(mine),
        _answered(mine, bucket), _answered(theirs, bucket),
    )  # fmt: skip


def _gain(ours: float, theirs: float, lower: bool) -> float:
    """The factor by which our figure is better."""
    above, below = (theirs, ours) if lower else (ours, theirs)
    return above / below if below else math.inf


def _paired(ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    by_seed = {one["seed"]: one for one in theirs}
    both = [
        (one, by_seed[one["seed"]]) for one in ours
        if one["seed"] in by_seed and by_seed[one["seed"]]["trace"] == one["trace"]
    ]  # fmt: skip
    return [mine for mine, _ in both], [other for _, other in both]


def _answered(records: Sequence[Record], bucket: str | None) -> float:
    """The share of requests that were answered; of one bucket's or of all."""
    of = [one["figures"]["ttft"] for one in records]
    parts = [part for ttft in of for name, part in ttft.items() if bucket in (None, name)]
    asked = sum(part["requests"] for part in parts)
    return sum(part["answered"] for part in parts) / asked if asked else 0.0


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
