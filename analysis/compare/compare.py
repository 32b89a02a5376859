"""Compare two runs: each figure of both, their ratio, and which is better, if that is clear.

A load generator that was a little late makes a run doubtful only if that decides which run is
better: if latencies from when requests were sent, instead of due, give another winner.

A is the baseline, B the run of interest. A run is called better only if the figures differ by more
than `EQUAL_WITHIN`. For the headline TTFT percentile of each bucket, attainment and goodput, the
95 % interval must also exclude equality. Nothing is printed here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from forebay.analysis.compare.cost import Price
from forebay.analysis.compare.figures import (
    LATENCIES,
    Figures,
    figures,
    imbalance,
    observation_s,
    recorded_slos,
)
from forebay.analysis.compare.pairs import paired
from forebay.analysis.runs.provenance import RecordedVerdict, is_little_late, verdict, warnings
from forebay.analysis.runs.run import RunData, at_path, from_sending
from forebay.analysis.statistics.quantile_intervals import ConfidenceInterval, ratio_interval
from forebay.analysis.statistics.quantiles import EQUAL_WITHIN, MIN_BEYOND, SHARES
from forebay.analysis.statistics.share_intervals import share_ratio_interval
from forebay.replay.plan.slo import Slo

Unit = Literal["s", "per_s", "share", "ratio", "count", "money"]
Better = Literal["a", "b", "equal", "unclear"]
Direction = Literal["lower", "higher", ""]

WHOLE_RUN = "run"
HEADLINE_ORDER = ("p99", "p90", "p50")  # the first with enough samples in both runs

TAIL = ("p50", "p90", "p95", "p99", "p99.9", "max")
# key of a latency, its name, the percentiles shown
LATENCY_LINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ttft", "TTFT", TAIL),
    ("ttft_failures", "TTFT, failures = ∞,", TAIL[:-1]),
    ("e2e", "E2E", TAIL),
    ("tpot", "TPOT", TAIL),
    ("itl", "ITL", TAIL),
    ("stall", "worst stall", TAIL),
    ("queue", "proxy queue", TAIL),
)
SESSION_LINES = (("session_e2e", "session E2E", TAIL),)  # only for the whole run
COUNTS: tuple[tuple[str, str, Direction], ...] = (
    ("intended", "requests due", ""), ("answered", "answered in full", "higher"),
    ("rejected", "rejected", ""), ("failed", "failed", "lower"),
)  # fmt: skip
THROUGHPUT = {
    "requests_per_s": "answered requests",
    "output_tokens_per_s": "output tokens",
    "prompt_tokens_per_s": "prompt tokens",
    "total_tokens_per_s": "all tokens",
}


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
    ratio: float | None
    better: Better | None
    interval: ConfidenceInterval | None = None

    @property
    def change(self) -> float | None:
        return None if self.ratio is None else _inverse(self.ratio)

    @property
    def change_interval(self) -> ConfidenceInterval | None:
        if self.interval is None:
            return None
        return ConfidenceInterval(_inverse(self.interval.high), _inverse(self.interval.low))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of two runs, with ratios, verdicts and warnings."""

    a: RunData
    b: RunData
    verdicts: tuple[RecordedVerdict, RecordedVerdict]
    slos: tuple[Slo, ...]
    buckets: tuple[str, ...]
    figures: dict[str | None, tuple[Figures, Figures]]
    headline_percentile: dict[str, str | None]
    headline_latency: dict[str, str]  # ttft, or e2e where no TTFT is known
    lines: tuple[ComparisonRow, ...]
    warnings: tuple[str, ...]
    doubtful: tuple[bool, bool]  # the client may have changed the outcome
    min_beyond: int
    paired: tuple[str, ...] = ()  # buckets whose requests are the same in both runs

    def line(self, section: str, key: str) -> ComparisonRow | None:
        for line in self.lines:
            if (line.section, line.key) == (section, key):
                return line
        return None

    def headline_line(self, bucket: str) -> ComparisonRow | None:
        """The latency that stands for a bucket, or None with too few samples."""
        return self.line(
            bucket, f"{self.headline_latency[bucket]}_{self.headline_percentile[bucket]}"
        )

    def outcome(self) -> dict[tuple[str, str], Better | None]:
        """Which run is better by each figure of the headline."""
        keys = [
            (bucket, f"{self.headline_latency[bucket]}_{self.headline_percentile[bucket]}")
            for bucket in self.buckets
        ]
        keys.append((WHOLE_RUN, "attainment"))
        lines = [self.line(*key) for key in keys]
        return {key: line.better for key, line in zip(keys, lines, strict=True) if line}

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data. An infinite figure is the string "inf"."""
        return {
            "a": {"name": self.a.name, "path": str(self.a.path), "verdict": str(self.verdicts[0])},
            "b": {"name": self.b.name, "path": str(self.b.path), "verdict": str(self.verdicts[1])},
            "slo": [str(slo) for slo in self.slos],
            "warnings": list(self.warnings),
            "min_beyond": self.min_beyond,
            "paired": list(self.paired),
            "figures": [
                {
                    "section": line.section,
                    "key": line.key,
                    "unit": line.unit,
                    "a": _plain(line.a),
                    "b": _plain(line.b),
                    "ratio": _plain(line.ratio),
                    "better": line.better,
                    "interval_95": [_plain(line.interval.low), _plain(line.interval.high)]
                    if line.interval
                    else None,
                }
                for line in self.lines
            ],
        }


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _plain(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value


def compare(
    a: RunData,
    b: RunData,
    slos: Sequence[Slo] = (),
    min_beyond: int = MIN_BEYOND,
    price: Price | None = None,
) -> Comparison:
    """Compare run B with run A. `slos` judge both again, else each run's own goodput is used."""
    comparison = _compare(a, b, slos, min_beyond)
    if price is not None:
        comparison = replace(comparison, lines=(*_costs(comparison, price), *comparison.lines))
    late = is_little_late(a), is_little_late(b)
    matters = False
    if any(late):
        targets = slos or recorded_slos(a)
        as_sent = _compare(from_sending(a), from_sending(b), targets, min_beyond)
        sent = as_sent.outcome()
        matters = any(sent.get(key) != better for key, better in comparison.outcome().items())
    of_a, of_b = comparison.verdicts
    doubtful = matters if late[0] else not of_a.valid, matters if late[1] else not of_b.valid
    sentences = tuple(warnings(a, b, doubtful, bool(slos)))
    return replace(comparison, doubtful=doubtful, warnings=sentences)


def _compare(a: RunData, b: RunData, slos: Sequence[Slo], min_beyond: int) -> Comparison:
    # Figures of the whole runs and of each bucket. Without a second run, both are the same.
    buckets = tuple(dict.fromkeys(a.buckets() + b.buckets()))
    by_bucket: dict[str | None, tuple[Figures, Figures]] = {}
    for bucket in (None, *buckets):
        of_a = figures(a, bucket, slos, min_beyond)
        by_bucket[bucket] = of_a, of_a if a is b else figures(b, bucket, slos, min_beyond)
    # Each bucket has one latency and one percentile that both runs can give.
    chosen = {bucket: _headline_latency(*by_bucket[bucket]) for bucket in buckets}
    headline = {
        bucket: _headline_percentile(*by_bucket[bucket], chosen[bucket]) for bucket in buckets
    }
    # Then the lines: first of the whole runs, then of each bucket.
    seconds = (observation_s(a), observation_s(b))
    lines = _run_lines(*by_bucket[None], seconds)
    lines.append(line_of(WHOLE_RUN, "imbalance", "busiest / idlest GPU", "ratio",
                         imbalance(a), imbalance(b), "lower"))  # fmt: skip
    for bucket in buckets:
        interval = _interval(a, b, bucket, headline[bucket], chosen[bucket])
        lines += _bucket_lines(
            bucket, *by_bucket[bucket], f"{chosen[bucket]}_{headline[bucket]}", interval
        )
        lines += _shares(bucket, *by_bucket[bucket], seconds)
    return Comparison(
        a=a,
        b=b,
        verdicts=(verdict(a), verdict(b)),
        slos=tuple(slos),
        buckets=buckets,
        figures=by_bucket,
        headline_percentile=headline,
        headline_latency=chosen,
        lines=tuple(_marked(line, (a, b)) for line in lines),
        warnings=(),
        doubtful=(False, False),
        min_beyond=min_beyond,
        paired=tuple(
            bucket for bucket in buckets if paired(a, b, bucket, LATENCIES[chosen[bucket]])
        ),
    )


def _headline_latency(a: Figures, b: Figures) -> str:
    """TTFT, or E2E where neither run has one, such as histograms of another program."""
    there = [side.latency["ttft"].count for side in (a, b)]
    return "ttft" if any(there) or not a.latency["e2e"].count else "e2e"


def _marked(line: ComparisonRow, runs: tuple[RunData, RunData]) -> ComparisonRow:
    """Mark the label of a figure that a run defines otherwise. `definition_notes` explains it."""
    latency = line.key.rpartition("_")[0].partition("_")[0]
    if not any(latency in (at_path(run.info, ("differs",)) or ()) for run in runs):
        return line
    return replace(line, label=f"{line.label} *")


def definition_notes(runs: Sequence[RunData]) -> list[str]:
    """A sentence for each figure that a run defines otherwise than a run folder does."""
    names = {key: label.removeprefix("worst ") for key, label, _ in LATENCY_LINES}
    return [
        f"* {names.get(key, key)} of {run.name} ({run.info.get('made_by')}): {words}."
        for run in _different(runs)
        for key, words in (at_path(run.info, ("differs",)) or {}).items()
    ]


def _different(runs: Sequence[RunData]) -> list[RunData]:
    return [run for at, run in enumerate(runs) if all(run is not earlier for earlier in runs[:at])]


def _headline_percentile(a: Figures, b: Figures, latency: str) -> str | None:
    for name in HEADLINE_ORDER:
        if None not in (a.latency[latency].values[name], b.latency[latency].values[name]):
            return name
    return None


def _interval(
    a: RunData, b: RunData, bucket: str, percentile: str | None, latency: str
) -> ConfidenceInterval | None:
    if percentile is None or a is b:
        return None
    if (pairs := paired(a, b, bucket, LATENCIES[latency])) is not None:
        return ratio_interval(*pairs, SHARES[percentile], paired=True)
    of_a, of_b = (_in_order(run, bucket, LATENCIES[latency]) for run in (a, b))
    return ratio_interval(of_a, of_b, SHARES[percentile])


def _in_order(run: RunData, bucket: str, column: str) -> Any:
    rows = run.rows(bucket, "ok")
    order = run.numbers["intended_s"][rows].argsort(kind="stable")
    return run.numbers[column][rows][order]


def line_of(
    section: str,
    key: str,
    label: str,
    unit: Unit,
    a: float | None,
    b: float | None,
    direction: Direction,
    interval: ConfidenceInterval | None = None,
) -> ComparisonRow:
    """A row with its ratio A/B and the better run. With `direction` empty, neither is better."""
    ratio = _ratio(a, b)
    better = _better(a, b, direction)
    if better in ("a", "b") and interval is not None and not interval.clear:
        better = "unclear"
    return ComparisonRow(section, key, label, unit, a, b, ratio, better, interval)


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


def _run_lines(
    a: Figures, b: Figures, seconds: tuple[float | None, float | None]
) -> list[ComparisonRow]:
    lines = _shares(WHOLE_RUN, a, b, seconds)
    lines += _latency_lines(WHOLE_RUN, SESSION_LINES, a, b)
    return lines + [
        line_of(WHOLE_RUN, key, label, "count", getattr(a, key), getattr(b, key), direction)
        for key, label, direction in COUNTS
    ]


def _costs(comparison: Comparison, price: Price) -> list[ComparisonRow]:
    a, b = (price.per_million(run, comparison.slos) for run in (comparison.a, comparison.b))
    labels = {
        "cost_per_million": "cost of a million tokens",
        "cost_per_million_in_time": "the same, in time",
    }
    return [
        line_of(WHOLE_RUN, key, label, "money", a[key], b[key], "lower")
        for key, label in labels.items()
    ]


def _shares(
    section: str, a: Figures, b: Figures, seconds: tuple[float | None, float | None]
) -> list[ComparisonRow]:
    met = share_ratio_interval(a.attainment, a.intended, b.attainment, b.intended)
    good = None
    if met is not None and seconds[0] and seconds[1]:
        # Goodput is attainment times the requests due per second.
        due = (a.intended / seconds[0]) / (b.intended / seconds[1])
        good = ConfidenceInterval(met.low * due, met.high * due)
    lines = [
        line_of(section, "goodput", "goodput", "per_s", a.goodput_per_s, b.goodput_per_s, "higher",
                good),
        line_of(section, "attainment", "attainment", "share", a.attainment, b.attainment, "higher",
                met),
        line_of(section, "hit_ratio", "prefix hit ratio", "share", a.hit_ratio, b.hit_ratio,
                "higher"),
        *(line_of(section, key, label, "per_s", a.rates[key], b.rates[key], "")
          for key, label in THROUGHPUT.items()),
    ]  # fmt: skip
    return [line for line in lines if (line.a, line.b) != (None, None)]


def _bucket_lines(
    bucket: str, a: Figures, b: Figures, headline: str, interval: ConfidenceInterval | None
) -> list[ComparisonRow]:
    # Without failures, TTFT with failures is the same as TTFT.
    all_answered = a.answered == a.intended and b.answered == b.intended
    latencies = [
        line for line in LATENCY_LINES if not (all_answered and line[0] == "ttft_failures")
    ]
    return _latency_lines(bucket, latencies, a, b, headline, interval)


def _latency_lines(
    section: str,
    latencies: Sequence[tuple[str, str, tuple[str, ...]]],
    a: Figures,
    b: Figures,
    headline: str = "",
    interval: ConfidenceInterval | None = None,
) -> list[ComparisonRow]:
    lines = []
    for key, label, names in latencies:
        for name in names:
            of_a, of_b = (
                percentiles.max if name == "max" else percentiles.values[name]
                for percentiles in (a.latency[key], b.latency[key])
            )
            if (of_a, of_b) == (None, None) and (key, name) != ("ttft", "p99"):
                continue
            sure = interval if f"{key}_{name}" == headline else None
            lines.append(
                line_of(section, f"{key}_{name}", f"{label} {name}", "s", of_a, of_b, "lower", sure)
            )
    return lines
