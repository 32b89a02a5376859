"""Compare runs with the first: the lines of each pair, and what makes a comparison doubtful.

A load generator that was a little late makes a run doubtful only if that decides which run is
better: if latencies from when requests were sent, instead of due, give another winner.

A is the baseline, B the run of interest. For the headline latency of each bucket, attainment and
goodput a run is better only if the 95 % interval excludes equality. Nothing is printed here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forebay.analysis.compare.figures import Figures, Price, RunFigures, run_figures
from forebay.analysis.compare.lines import (
    COSTS,
    LATENCY_LABELS,
    OF_BUCKETS,
    OF_RUNS,
    WHOLE_RUN,
    Better,
    FigureKind,
    TableRow,
    line_of,
    lines_of,
    share_intervals,
    table_rows,
)
from forebay.analysis.compare.lines import ComparisonRow as ComparisonRow
from forebay.analysis.runs.provenance import (
    RecordedVerdict,
    differences,
    footnote,
    is_little_late,
    verdict,
    warnings,
)
from forebay.analysis.runs.run import LATENCIES, RunData, from_sending
from forebay.analysis.statistics.intervals import ratio_interval
from forebay.analysis.statistics.quantiles import MIN_BEYOND, SHARES, Floats, Percentiles
from forebay.analysis.statistics.units import listed
from forebay.replay.plan.slo import Slo

JSON_FIELDS = ("section", "key", "unit", "a", "b", "ratio", "better")  # fields of a line
HEADLINE_ORDER = ("p99", "p90", "p50")  # the first with enough samples in both runs
LEAST_SHARE = 0.99  # least share of paired requests in either run: with fewer the rest could decide
SAME_TIME_S = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of two runs, with ratios, verdicts and warnings.

    Attributes:
        headline_keys: the latency that stands for each bucket, such as ttft_p99. E2E where no TTFT
            is known, None with too few samples.
        paired: buckets whose requests are the same in both runs.
        unlike: settings that differ, so that the loads do.
        doubts: reasons why the figures may not describe the servers alone.
        footnotes: delays of a client that change no conclusion.
    """

    a: RunFigures
    b: RunFigures
    slos: tuple[Slo, ...]
    min_beyond: int
    buckets: tuple[str, ...]
    headline_keys: dict[str, str | None]
    lines: tuple[ComparisonRow, ...]
    paired: tuple[str, ...]
    verdicts: tuple[RecordedVerdict, RecordedVerdict]
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    footnotes: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    def line(self, section: str, key: str | None) -> ComparisonRow | None:
        return next(
            (line for line in self.lines if (line.section, line.key) == (section, key)), None
        )

    def headline_line(self, bucket: str) -> ComparisonRow | None:
        """The latency that stands for a bucket, or None with too few samples."""
        return self.line(bucket, self.headline_keys[bucket])

    def outcome(self) -> dict[tuple[str, str], Better | None]:
        """Which run is better by each figure of the headline."""
        lines = [self.headline_line(bucket) for bucket in self.buckets]
        lines.append(self.line(WHOLE_RUN, "attainment"))
        return {(line.section, line.key): line.better for line in lines if line}

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data. An infinite figure is the string "inf"."""
        a, b = (
            {"name": side.name, "path": str(side.run.path), "verdict": str(judged)}
            for side, judged in zip((self.a, self.b), self.verdicts, strict=True)
        )
        return {
            "a": a,
            "b": b,
            "slo": [str(slo) for slo in self.slos],
            "warnings": list(self.warnings),
            "min_beyond": self.min_beyond,
            "paired": list(self.paired),
            "figures": [
                {name: _plain(getattr(line, name)) for name in JSON_FIELDS}
                | {
                    "interval_95": [_plain(line.interval.low), _plain(line.interval.high)]
                    if line.interval
                    else None,
                }
                for line in self.lines
            ],
        }


def _plain(value: float | str | None) -> float | str | None:
    return "inf" if value == math.inf else value


def compare(
    a: RunData,
    b: RunData,
    slos: Sequence[Slo] = (),
    min_beyond: int = MIN_BEYOND,
    price: Price | None = None,
) -> Comparison:
    """Compare run B with run A. `slos` judge both again, else each run's own goodput is used."""
    return compare_all((a, b), slos, min_beyond, price)[0]


def compare_all(
    runs: Sequence[RunData],
    slos: Sequence[Slo] = (),
    min_beyond: int = MIN_BEYOND,
    price: Price | None = None,
) -> list[Comparison]:
    """Compare each run with the first. A single run is compared with itself."""
    costs = [price.per_million(run, slos) if price else {} for run in runs]
    first, *others = run_figures(runs, slos, min_beyond, costs)
    compared = [_compare(first, other, slos, min_beyond) for other in others or [first]]
    return [_with_doubts(comparison) for comparison in compared]


def sides_of(comparisons: Sequence[Comparison]) -> list[RunFigures]:
    """Return the runs of comparisons with the same first run."""
    first = comparisons[0]
    return [first.a] if first.a is first.b else [first.a, *(each.b for each in comparisons)]


def rows_of(comparisons: Sequence[Comparison]) -> list[TableRow]:
    """Return each figure with its values in all runs, section by section."""
    return table_rows([each.lines for each in comparisons], len(sides_of(comparisons)))


def definition_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence for each figure that a run defines otherwise than a run folder does."""
    return [
        f"* {LATENCY_LABELS.get(key, key).removeprefix('worst ')} of {side.name} "
        f"({side.run.info.get('made_by')}): {words}."
        for side in sides_of(comparisons)
        for key, words in side.differs.items()
    ]


def _compare(a: RunFigures, b: RunFigures, slos: Sequence[Slo], min_beyond: int) -> Comparison:
    """Compare two runs. `_with_doubts` adds the doubts about their clients."""
    buckets = tuple(dict.fromkeys([*a.buckets, *b.buckets]))
    # First the lines of the whole runs, then the lines of each bucket.
    lines = [
        line_of(WHOLE_RUN, kind, a.costs[kind.key], b.costs[kind.key]) for kind in COSTS if a.costs
    ]
    lines += lines_of(None, OF_RUNS, a, b, share_intervals(a.of[None], b.of[None]))
    headline_keys: dict[str, str | None] = {}
    pairs = []
    for bucket in buckets:
        of_a, of_b = a.of[bucket], b.of[bucket]
        # Each bucket has one latency and one percentile that both runs can give.
        latency = latency_of(of_a, of_b)
        percentile = _headline_percentile(of_a.latency[latency], of_b.latency[latency])
        headline_keys[bucket] = key = percentile and f"{latency}_{percentile}"
        intervals = share_intervals(of_a, of_b)
        slow = _paired(a, b, bucket, LATENCIES[latency])
        if slow is not None:
            pairs.append(bucket)
        timed = all(side.run.info.get("timed", True) for side in (a, b))
        if percentile and key and a.run is not b.run and timed:
            in_a, in_b = slow or [_in_order(side, bucket, LATENCIES[latency]) for side in (a, b)]
            share = SHARES[percentile]
            intervals[key] = ratio_interval(in_a, in_b, share, paired=slow is not None)
        lines += lines_of(bucket, _kinds(of_a, of_b), a, b, intervals)
    return Comparison(
        a=a,
        b=b,
        slos=tuple(slos),
        min_beyond=min_beyond,
        buckets=buckets,
        headline_keys=headline_keys,
        lines=tuple(lines),
        paired=tuple(pairs),
        verdicts=(verdict(a.run), verdict(b.run)),
    )


def _paired(a: RunFigures, b: RunFigures, bucket: str, column: str) -> tuple[Floats, Floats] | None:
    """Return a latency of the same requests in both runs, in order of time, or None.

    Requests are paired by id, where both runs were sent the same ones at the same times. Both then
    have their slow times together, and their common part falls out of the interval. With other
    times the order of one run means nothing in the other, so nothing is paired.

    None also for a run and itself, as a report of one run compares it.
    """
    if a.run is b.run:
        return None
    of_a, of_b = _places(a, bucket, column), _places(b, bucket, column)
    both = [name for name in of_a if name in of_b]
    if not both or len(both) < LEAST_SHARE * max(len(of_a), len(of_b)):
        return None
    at_a, at_b = (np.array([places[name] for name in both]) for places in (of_a, of_b))
    due_a, due_b = a.run.numbers["intended_s"][at_a], b.run.numbers["intended_s"][at_b]
    if np.isnan(due_a).any() or not np.allclose(due_a, due_b, rtol=0.0, atol=SAME_TIME_S):
        return None
    order = due_a.argsort(kind="stable")
    return a.run.numbers[column][at_a[order]], b.run.numbers[column][at_b[order]]


def _places(side: RunFigures, bucket: str, column: str) -> dict[str, int]:
    """Return the row of each answered id. Empty if a request has none, or two share one."""
    ids = side.run.words["id"]
    rows = np.flatnonzero(side.of[bucket].ok & ~np.isnan(side.run.numbers[column])).tolist()
    places = {ids[row]: row for row in rows if ids[row]}
    return places if len(places) == len(rows) else {}


def _headline_percentile(a: Percentiles, b: Percentiles) -> str | None:
    shown = (name for name in HEADLINE_ORDER if None not in (a.values[name], b.values[name]))
    return next(shown, None)


def latency_of(*sides: Figures) -> str:
    """TTFT, or E2E where no run has one, such as histograms of another program."""
    there = [side.latency["ttft"].count for side in sides]
    return "ttft" if any(there) or not sides[0].latency["e2e"].count else "e2e"


def _kinds(a: Figures, b: Figures) -> list[FigureKind]:
    """The figures of a bucket. Without failures, TTFT with failures is the same as TTFT."""
    failed = a.unanswered or b.unanswered
    return [kind for kind in OF_BUCKETS if failed or not kind.key.startswith("ttft_failures")]


def _in_order(side: RunFigures, bucket: str, column: str) -> Floats:
    rows, numbers = side.of[bucket].ok, side.run.numbers
    order = numbers["intended_s"][rows].argsort(kind="stable")
    return numbers[column][rows][order]


def _with_doubts(comparison: Comparison) -> Comparison:
    """Add the warnings, the doubts about the runs, and footnotes."""
    a, b = runs = comparison.a.run, comparison.b.run
    # A client that was a little late makes a run doubtful only if that decides.
    late = [is_little_late(run) for run in runs]
    matters = any(late) and _late_sending_matters(comparison)
    doubtful_a, doubtful_b = (
        matters if was_late else not judged.valid
        for was_late, judged in zip(late, comparison.verdicts, strict=True)
    )
    # Then the sentences: doubts, or a footnote for a late client that changed no conclusion.
    limited: dict[str, list[str]] = {}
    footnotes = []
    for run, judged, doubtful in zip(
        runs, comparison.verdicts, (doubtful_a, doubtful_b), strict=True
    ):
        if doubtful:
            why = f" ({judged.cause})" if judged.cause else ""
            limited.setdefault(judged.meaning, []).append(f"{run.name}{why}")
        elif not judged.valid:
            footnotes.append(footnote(run))
    doubts = [f"{meaning} in {listed(names)}" for meaning, names in limited.items()]
    judged_anew = bool(comparison.slos)
    if unlike := differences(a, b, judged_anew):
        doubts.append(f"the runs differ in {listed(unlike)}")
    return replace(
        comparison,
        warnings=tuple(warnings(a, b, (doubtful_a, doubtful_b), judged_anew)),
        doubts=tuple(doubts),
        footnotes=tuple(footnotes),
        unlike=tuple(unlike),
    )


def _late_sending_matters(comparison: Comparison) -> bool:
    """True if another run is better by latencies from when requests were sent."""
    runs, min_beyond = (comparison.a.run, comparison.b.run), comparison.min_beyond
    targets = comparison.slos or runs[0].slos()
    a, b = run_figures([from_sending(run) for run in runs], targets, min_beyond)
    sent = _compare(a, b, targets, min_beyond).outcome()
    return any(sent.get(key) != better for key, better in comparison.outcome().items())
