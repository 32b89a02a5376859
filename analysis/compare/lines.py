"""The lines of a comparison: a figure of two runs, their ratio, and which run is better.

A is the baseline, B the run of interest. A run is called better only if the figures differ by more
than `EQUAL_WITHIN`, and if the 95 % interval of the ratio excludes equality. A figure of a single
sample, such as the longest pause, has no interval and so no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from forebay.analysis.compare.figures import Figures, RunFigures
from forebay.analysis.statistics.intervals import ConfidenceInterval, share_ratio_interval
from forebay.analysis.statistics.quantiles import EQUAL_WITHIN, SHARES
from forebay.analysis.statistics.units import FORMATS, ratio
from forebay.replay.results.server_metrics import ENERGIES, GAUGES

Unit = Literal["s", "per_s", "share", "ratio", "count", "money", "j", "w"]
Better = Literal["a", "b", "equal", "unclear"]
Direction = Literal["lower", "higher", ""]

WHOLE_RUN = "run"
LATENCY_LABELS = {
    "ttft": "TTFT",
    "ttft_failures": "TTFT, failures = ∞,",
    "e2e": "E2E",
    "tpot": "TPOT",
    "itl": "ITL",
    "stall": "worst stall",
    "queue": "proxy queue",
}


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A figure that lines show. Without a direction, neither run is better in it."""

    key: str
    label: str
    unit: Unit
    direction: Direction = ""


def _latency(key: str, label: str) -> list[FigureKind]:
    """Return the kinds of a latency's percentiles. The longest with failures is no figure."""
    names = SHARES if key == "ttft_failures" else (*SHARES, "max")
    return [FigureKind(f"{key}_{name}", f"{label} {name}", "s", "lower") for name in names]


THROUGHPUT = (
    FigureKind("requests_per_s", "answered requests", "per_s"),
    FigureKind("output_tokens_per_s", "output tokens", "per_s"),
    FigureKind("prompt_tokens_per_s", "prompt tokens", "per_s"),
    FigureKind("total_tokens_per_s", "all tokens", "per_s"),
)
SERVICE = (
    FigureKind("goodput", "goodput", "per_s", "higher"),
    FigureKind("attainment", "attainment", "share", "higher"),
    FigureKind("hit_ratio", "prefix hit ratio", "share", "higher"),
    *THROUGHPUT,
)
OF_RUNS = (
    *SERVICE,
    *_latency("session_e2e", "session E2E"),
    FigureKind("intended", "requests due", "count"),
    FigureKind("answered", "answered in full", "count", "higher"),
    FigureKind("rejected", "rejected", "count"),
    FigureKind("failed", "failed", "count", "lower"),
    FigureKind("imbalance", "busiest / idlest GPU", "ratio", "lower"),
    *(FigureKind(key, gauge.label, gauge.unit) for key, gauge in GAUGES.items()),
    *(FigureKind(key, label, "j", "lower") for key, label in ENERGIES.items()),
)
OF_BUCKETS = (*(kind for line in LATENCY_LABELS.items() for kind in _latency(*line)), *SERVICE)
COSTS = (
    FigureKind("cost_per_million", "cost of a million tokens", "money", "lower"),
    FigureKind("cost_per_million_in_time", "the same, in time", "money", "lower"),
)
ALWAYS = ("ttft_p99", "imbalance")  # lines that stand even if neither run has the figure


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both runs in base units, or None if not measurable.

    `ratio` and `interval` are A over B, as in JSON. Tables print `change`, which is B over A.
    """

    section: str
    key: str
    label: str
    unit: Unit
    a: float | None
    b: float | None
    texts: list[str]  # texts of A and B
    ratio: float | None
    change: float | None
    factor: str  # the larger of both divided by the smaller, such as 1.9×
    better: Better | None
    interval: ConfidenceInterval | None
    change_interval: ConfidenceInterval | None

    def factor_limits(self) -> str:
        """Return the 95 % interval of the factor in words, "" without an interval."""
        interval = self.interval if (self.ratio or 0.0) >= 1 else self.change_interval
        if interval is None:
            return ""
        if interval.high == math.inf and interval.clear:
            return f" (at least {ratio(interval.low)}, with 95 % confidence)"
        return f" (95 % interval {ratio(interval.low)} to {ratio(interval.high)})"

    def least_change(self) -> str:
        """Name the least change that these runs show, if the interval holds equality."""
        if self.interval is None or self.ratio is None or self.interval.clear:
            return ""
        least = self.interval.least_change(self.ratio)
        if least == math.inf:
            return " Runs as short as these show no change."
        return f" These runs can show only a change of {100.0 * least:.0f} % or more."


@dataclass(frozen=True, slots=True)
class TableRow:
    """A figure of all runs: its line in the first comparison that has it, and its values."""

    line: ComparisonRow
    values: list[float | None]
    texts: list[str]
    heading: str


def line_of(
    section: str,
    kind: FigureKind,
    a: float | None,
    b: float | None,
    interval: ConfidenceInterval | None = None,
) -> ComparisonRow:
    """Return a line with its ratio A/B and the better run, None without an interval."""
    better = _better(a, b, kind.direction)
    if better in ("a", "b"):
        better = None if interval is None else better if interval.clear else "unclear"
    a_over_b = _ratio(a, b)
    change = None if a_over_b is None else _inverse(a_over_b)
    return ComparisonRow(
        section=section,
        key=kind.key,
        label=kind.label,
        unit=kind.unit,
        a=a,
        b=b,
        texts=FORMATS[kind.unit]([a, b]),
        ratio=a_over_b,
        change=change,
        factor="" if a_over_b is None or change is None else ratio(max(a_over_b, change)),
        better=better,
        interval=interval,
        change_interval=interval
        and ConfidenceInterval(_inverse(interval.high), _inverse(interval.low)),
    )


def lines_of(
    bucket: str | None,
    kinds: Sequence[FigureKind],
    a: RunFigures,
    b: RunFigures,
    intervals: Mapping[str, ConfidenceInterval | None],
) -> list[ComparisonRow]:
    """Return the lines of a bucket, or of all requests. Figures that neither run has are left out.

    The label of a figure that a run defines otherwise is marked.
    """
    section = WHOLE_RUN if bucket is None else bucket
    otherwise = {*a.differs, *b.differs}
    lines = []
    for kind in kinds:
        of_a, of_b = (figure_of(side, bucket, kind.key) for side in (a, b))
        if (of_a, of_b) == (None, None) and kind.key not in ALWAYS:
            continue
        if latency_of(kind.key) in otherwise:
            kind = replace(kind, label=f"{kind.label} *")
        lines.append(line_of(section, kind, of_a, of_b, intervals.get(kind.key)))
    return lines


def figure_of(side: RunFigures, bucket: str | None, key: str) -> float | None:
    """Return a figure of a run by the key of its line, such as `goodput` or `ttft_p99`."""
    figures = side.of[bucket]
    if key in figures.rates:
        return figures.rates[key]
    if key == "imbalance":
        return side.imbalance
    name, _, share = key.rpartition("_")
    if name in figures.latency:
        percentiles = figures.latency[name]
        return percentiles.max if share == "max" else percentiles.values[share]
    value: float | None = getattr(figures, "goodput_per_s" if key == "goodput" else key)
    return value


def latency_of(key: str) -> str:
    """Return the latency of a percentile's key, such as `ttft` of `ttft_failures_p50`."""
    return key.rpartition("_")[0].partition("_")[0]


def table_rows(lines_of_pairs: Sequence[Sequence[ComparisonRow]], count: int) -> list[TableRow]:
    """Return each figure with its values in all runs, section by section.

    Args:
        lines_of_pairs: the lines of each comparison with the first run.
        count: the number of runs.
    """
    rows: dict[tuple[str, str], tuple[ComparisonRow, list[float | None]]] = {}
    # A single run is compared with itself, so both values of a line are the same.
    for number, lines in enumerate(lines_of_pairs, start=min(1, count - 1)):
        for line in lines:
            _, values = rows.setdefault((line.section, line.key), (line, [None] * count))
            values[0], values[number] = line.a, line.b
    headings = {section: section for section, _ in rows} | {WHOLE_RUN: "all requests"}
    ordered = [
        (line, values)
        for section in headings
        for line, values in rows.values()
        if line.section == section
    ]
    # All percentiles of a latency have one unit, so that the eye can compare them.
    table: list[TableRow] = []
    for _, group in groupby(ordered, key=_of_one_unit):
        figures = list(group)
        texts = FORMATS[figures[0][0].unit]([value for _, values in figures for value in values])
        table += [
            TableRow(line, values, texts[at * count : (at + 1) * count], headings[line.section])
            for at, (line, values) in enumerate(figures)
        ]
    return table


def _of_one_unit(row: tuple[ComparisonRow, list[float | None]]) -> tuple[str, str]:
    """Return the section and the latency of a row, or its own key."""
    line, _ = row
    return line.section, line.key.rpartition("_")[0] if line.unit == "s" else line.key


def share_intervals(a: Figures, b: Figures) -> dict[str, ConfidenceInterval | None]:
    """Return the intervals of goodput and attainment."""
    met = share_ratio_interval(a.attainment, a.intended, b.attainment, b.intended)
    if met is None or not (a.observed_s and b.observed_s):
        return {"attainment": met}
    # Goodput is attainment times the requests due per second.
    due = (a.intended / a.observed_s) / (b.intended / b.observed_s)
    return {"attainment": met, "goodput": ConfidenceInterval(met.low * due, met.high * due)}


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _ratio(a: float | None, b: float | None) -> float | None:
    if a is None or b is None or (math.isinf(a) and math.isinf(b)):
        return None
    if b == 0:
        return None if a == 0 else math.inf
    return a / b


def _better(a: float | None, b: float | None, direction: Direction) -> Better | None:
    if not direction or a is None or b is None:
        return None
    if a == b or math.isclose(a, b, rel_tol=EQUAL_WITHIN):
        return "equal"
    return "a" if (a < b) == (direction == "lower") else "b"
