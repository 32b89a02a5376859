"""Collect the texts of the report's cards and tables. The template `report.html` places them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from forebay.analysis.compare.compare import Comparison
from forebay.analysis.compare.figures import BackendRow, RunFigures, UnansweredRow
from forebay.analysis.compare.lines import WHOLE_RUN, ComparisonRow, TableRow
from forebay.analysis.runs.provenance import setting, settings, verdict
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import rank_of, samples_beyond
from forebay.analysis.statistics.units import FORMATS, durations

RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LONGEST = "longest"
PARTS = {
    "late": "client late",
    "queue": "queue of the proxy",
    "first": "server to first token",
    "rest": "rest of the answer",
}
LONGEST_BAR_EM = 16.0


@dataclass(frozen=True, slots=True)
class Card:
    """One of the most important figures: a value for each run, and the change between two runs."""

    label: str
    texts: list[str]
    change: str
    better: str | None


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The settings and the command that repeat a run, and its run.json."""

    name: str
    seed: str
    texts: Mapping[str, str]
    record: str


@dataclass(frozen=True, slots=True)
class SpentTime:
    """One request: its rank, its id, and seconds by the keys of PARTS, which add up to its E2E."""

    rank: str
    request_id: str
    parts: dict[str, float]


def cards(comparison: Comparison, rows: Sequence[TableRow]) -> list[Card]:
    """Choose the cards from `rows`. The first comparison chooses the percentiles."""
    labels: dict[tuple[str, str], str] = {}
    for bucket, key in comparison.headline_keys.items():
        if key is not None:
            latency, _, percentile = key.partition("_")
            labels[bucket, key] = f"{latency.upper()} {percentile}, {bucket}"
    labels[WHOLE_RUN, "goodput"] = "Goodput"
    labels[WHOLE_RUN, "attainment"] = "Requests within target"
    for bucket in comparison.buckets:
        labels[bucket, "stall_max"] = f"Longest stall, {bucket}"
    labels[WHOLE_RUN, "hit_ratio"] = "Prefix hit ratio"
    labels[WHOLE_RUN, "imbalance"] = "Imbalance between backends"
    by_key = {(row.line.section, row.line.key): row for row in rows}
    shown = {label: by_key[place] for place, label in labels.items() if place in by_key}
    return [
        Card(
            label,
            FORMATS[row.line.unit](row.values),
            _change(row.line) if len(row.values) == 2 else "",
            row.line.better,
        )
        for label, row in shown.items()
        if row.line.a is not None
    ]


def _change(line: ComparisonRow) -> str:
    """Return the change from the first run to the second in words, "" if it is not known."""
    if line.better is None or line.ratio is None:
        return ""
    if line.better == "equal":
        return "equal within 5 %"
    if line.ratio in (0.0, float("inf")):
        return "better" if line.better == "b" else "worse"
    more, less = ("longer", "shorter") if line.unit == "s" else ("higher", "lower")
    words = f"{line.factor} {less if line.ratio > 1 else more}"
    return f"{words}, not significant" if line.better == "unclear" else words


def rejections(runs: Sequence[RunFigures]) -> list[tuple[int, UnansweredRow, float, list[str]]]:
    """Return the number of the run, a kind of unanswered requests, its share, and three times.

    They are wall-clock times to the error answer, the median and the longest, and Retry-After.
    """
    rows = [(number, row) for number, side in enumerate(runs) for row in side.rejections]
    times_s: list[float | None] = []
    for number, row in rows:
        scale = time_scale(runs[number].run)
        real_s = (row.answer_p50_s, row.answer_max_s)
        times_s += [None if time_s is None else time_s / scale for time_s in real_s]
    # Each column has one unit.
    answered = iter(durations(times_s))
    retry = iter(durations([row.retry_after_s for _, row in rows]))
    shares = [row.count / runs[number].of[None].intended for number, row in rows]
    return [
        (number, row, share, [next(answered), next(answered), next(retry)])
        for (number, row), share in zip(rows, shares, strict=True)
    ]


def time_scale(run: RunData) -> float:
    """Seconds of the run per wall-clock second, 1 if run.json has no scale."""
    value = setting(run, "time scale")
    usable = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if usable else 1.0


def balance(runs: Sequence[RunFigures]) -> list[tuple[int, BackendRow, float]]:
    """Return the number of the run, a backend, and its share of the run's prompt tokens."""
    rows = []
    for number, side in enumerate(runs):
        total = sum(row.prompt_tokens for row in side.backends) or 1.0
        rows += [(number, row, row.prompt_tokens / total) for row in side.backends]
    return rows


def origin(run: RunData) -> RunOrigin:
    """Collect the settings of a run, and its record."""
    texts = {"verdict": str(verdict(run)), **settings(run)}
    if isinstance(run.summary.get("schedule_lag_ms"), dict):
        lags = {name: run.shown("schedule_lag_ms", name) for name in ("p50", "p99", "max")}
        texts["schedule lag"] = ", ".join(
            f"{name} {lag_ms:g} ms" for name, lag_ms in lags.items() if lag_ms is not None
        )
    record = orjson.dumps(run.info, option=orjson.OPT_INDENT_2).decode()
    return RunOrigin(run.name, texts["seed"], texts, record)


def spent_times(side: RunFigures, bucket: str, min_beyond: int) -> list[SpentTime]:
    """Return the requests at the ranks that the count allows, and the longest request.

    The ranks are of the time to the first token, so these are real requests: their ids are there
    for `forebay explain`.
    Empty for a run of histograms, which does not know the times of one request.
    """
    run = side.run
    if run.info.get("joint") is False:
        return []
    ttft, e2e = run.numbers["ttft_response_s"], run.numbers["e2e_response_s"]
    usable = np.flatnonzero(side.of[bucket].ok & np.isfinite(ttft) & np.isfinite(e2e))
    order = usable[np.argsort(ttft[usable], kind="stable")]
    count = len(order)
    if not count:
        return []
    chosen = {
        name: order[rank_of(share, count) - 1]
        for name, share in RANKS.items()
        if samples_beyond(share, count) >= min_beyond
    }
    return [_spent(run, name, int(at)) for name, at in {**chosen, LONGEST: order[-1]}.items()]


def _spent(run: RunData, name: str, at: int) -> SpentTime:
    numbers = {key: float(run.numbers[key][at]) for key in run.numbers}
    ttft_s, e2e_s = numbers["ttft_response_s"], numbers["e2e_response_s"]
    late_s = max(0.0, float(np.nan_to_num(ttft_s - numbers["ttft_service_s"])))
    queue_s = min(float(np.nan_to_num(numbers["queue_ms"])) / 1e3, ttft_s - late_s)
    parts = {
        "late": late_s,
        "queue": queue_s,
        "first": ttft_s - late_s - queue_s,
        "rest": max(0.0, e2e_s - ttft_s),
    }
    return SpentTime(name, run.words["request_id"][at] or run.words["id"][at], parts)


def breakdown(
    runs: Sequence[RunFigures], buckets: Sequence[str], min_beyond: int
) -> list[tuple[str, int, SpentTime, float, list[str]]]:
    """Return the bucket, the number of the run, the request, and its parts in em and in words."""
    rows: list[tuple[str, int, SpentTime, float]] = []
    for bucket in buckets:
        requests = [
            (number, spent)
            for number, side in enumerate(runs)
            for spent in spent_times(side, bucket, min_beyond)
        ]
        longest_s = max((sum(spent.parts.values()) for _, spent in requests), default=0.0)
        em_per_s = LONGEST_BAR_EM / longest_s if longest_s else 0.0
        rows += [(bucket, number, spent, em_per_s) for number, spent in requests]
    # All cells have one unit.
    texts = iter(durations([part_s for *_, spent, _ in rows for part_s in spent.parts.values()]))
    return [(*row, [next(texts) for _ in PARTS]) for row in rows]
