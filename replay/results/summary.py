"""Add up the rows of a run and make its `summary.json` at the end.

Pure: rows and histograms in, one dict out. Every percentile is from a HdrHistogram. Undefined
values are null, never 0. `analysis` compares runs by these keys alone. A percentile is there from
the first sample on. Code that prints a percentile must check `is_firm` first.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.replay.plan.slo import Slo, meets, session_limit_s
from forebay.replay.plan.tasks import TaskTimes
from forebay.replay.results.row import Row
from forebay.replay.results.verdict import (
    INTERRUPTED,
    MOST_UNCOUNTED,
    Lateness,
    Lengths,
    judge_answers,
    lag_limit_s,
)
from forebay.traces.ground.hlog import Total, add_into, new_histogram, to_us

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
LEAST_BEYOND = 10  # samples that must exceed a percentile before it is shown to people
# {key of the summary: name of the metric in the tags of the log}
METRICS = {
    "ttft_ms": "ttft_response",
    "ttft_service_ms": "ttft_service",
    "tpot_ms": "tpot",
    "itl_ms": "itl",
    "icl_ms": "icl",
    "e2e_ms": "e2e_response",
    "e2e_service_ms": "e2e_service",
    "stall_ms": "stall",
    "queue_ms": "queue_wait",
}
INFINITE = "inf"  # JSON has no infinity


def distribution_ms(histogram: Any, failures: int = 0) -> dict[str, float | str | int | None]:
    """Return count, percentiles and maximum, with `failures` more samples that are infinite."""
    import numpy

    count = int(histogram.total_count)
    total = count + failures
    below = numpy.cumsum(numpy.frombuffer(histogram.counts, dtype=numpy.int64))
    figures: dict[str, float | str | int | None] = {"count": total}
    for percentile in PERCENTILES:
        rank = rank_of(percentile, total)
        name = f"p{percentile:g}"
        if not total:
            figures[name] = None
        elif rank > count:
            figures[name] = INFINITE
        else:
            value = histogram.get_value_from_index(int(numpy.searchsorted(below, rank)))
            highest = histogram.get_highest_equivalent_value(value)
            figures[name] = min(highest, histogram.max_value) / 1e3
    figures["max"] = INFINITE if failures else histogram.max_value / 1e3 if count else None
    return figures


def rank_of(percentile: float, count: int) -> int:
    """Return the nearest rank, from 1, among `count` samples."""
    return max(1, math.ceil(percentile / 100 * count - 1e-9))


def is_firm(name: str, count: int) -> bool:
    """True if enough of `count` samples exceed the percentile `name`, such as p99.9.

    With fewer samples, one or two requests decide its value. True for other names, such as max.
    """
    if not name.startswith("p"):
        return True
    return count - rank_of(float(name[1:]), count) >= LEAST_BEYOND


def firm(figures: Mapping[str, Any], name: str) -> Any:
    """Return a value of a distribution for display, or None if it is not firm."""
    return figures[name] if is_firm(name, figures["count"]) else None


def highest_firm(figures: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return the percentile `name` with its value, or the highest lower percentile that is firm.

    If no percentile is firm, return the maximum.
    """
    for percentile in reversed(PERCENTILES):
        lower = f"p{percentile:g}"
        if percentile <= float(name[1:]) and is_firm(lower, figures["count"]):
            return lower, figures[lower]
    return "max", figures["max"]


def throughput(
    completed: int, prompt: float | None, output: float | None, seconds: float
) -> dict[str, Any]:
    """Return completed requests and their tokens, divided by the seconds to the last answer.

    Tokens are None if they were not counted.
    """
    total = None if prompt is None or output is None else prompt + output
    counts = {"requests": completed, "prompt_tokens": prompt, "output_tokens": output,
              "total_tokens": total}  # fmt: skip
    return {
        f"{name}_per_s": None if count is None else _ratio(count, seconds)
        for name, count in counts.items()
    }


def task_figures(seconds: Iterable[float]) -> dict[str, Any]:
    """Return the number of tasks, and the distribution of the finite times among them."""
    times = list(seconds)
    ended_ms = sorted(time_s * 1e3 for time_s in times if time_s < math.inf)
    count = len(ended_ms)
    figures: dict[str, Any] = {"count": count}
    for percentile in PERCENTILES:
        value = ended_ms[rank_of(percentile, count) - 1] if count else None
        figures[f"p{percentile:g}"] = value
    figures["max"] = ended_ms[-1] if count else None
    figures["mean"] = math.fsum(ended_ms) / count if count else None
    return {"sessions": len(times), "session_e2e_ms": {"all": figures}}


class RunTotals:
    """The running totals of one run."""

    def __init__(self, buckets: Sequence[str], slos: Sequence[Slo]) -> None:
        # Totals that the progress line reads while the run lasts.
        self.buckets = tuple(buckets)
        self.requests = 0
        self.completed = 0
        self.rejected: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.last_done_s = 0.0
        self.lateness = Lateness(lag_limit_s(slos))
        self.lengths = Lengths()
        self._slos = tuple(slos)
        self._intended: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()
        self._good: Counter[str] = Counter()
        self._missing: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._done_output_tokens = 0  # completed requests only
        self._cached_known = False
        # The trace's count of the prompts whose tokens `_prompt_tokens` counts.
        self.counted_input_tokens = 0
        self._by_backend: Counter[str] = Counter()
        self._estimated = 0
        self._without_output = 0
        self._rejects: Any = new_histogram()
        self._worst_reject_s = 0.0
        self._with_retry_after = 0
        self._tasks = TaskTimes()
        self._session_limit_s = session_limit_s(slos)
        self._good_of_task: dict[str, Counter[str]] = {}  # by bucket; counted if the task is
        self._unanswered: Counter[tuple[str, str, int | None]] = Counter()
        self._said: dict[tuple[str, str, int | None], str] = {}

    def add(self, row: Row) -> None:
        self.requests += 1
        self._intended[row.bucket] += 1
        answered_s = row.last_s if row.outcome == "ok" else None
        self._tasks.add(row.task, row.intended_s, answered_s)
        if row.done_s is not None:
            self.last_done_s = max(self.last_done_s, row.done_s)
        if row.intended_s is not None and row.pacing_lag_s is not None:
            self.lateness.add(row.intended_s, row.pacing_lag_s, row.cap_wait_s or 0.0)
        if row.prompt_tokens is not None:
            self._prompt_tokens += row.prompt_tokens
            self.counted_input_tokens += row.input_tokens
            self._by_backend[row.backend or "unknown"] += row.prompt_tokens
            if row.cached_tokens is not None:
                self._cached_known = True
                self._cached_tokens += row.cached_tokens
        if row.outcome == "ok":
            self._completed(row)
        else:
            self._missed(row)

    def _missed(self, row: Row) -> None:
        self._missing[row.bucket] += 1
        kind = row.outcome, row.reason or "unknown", row.status
        self._unanswered[kind] += 1
        if row.said is not None:
            self._said.setdefault(kind, row.said)
        if row.outcome == "rejected":
            self.rejected[row.reason or "unknown"] += 1
            if row.reject_latency_s is not None:
                self._rejects.record_value(to_us(row.reject_latency_s))
                self._worst_reject_s = max(self._worst_reject_s, row.reject_latency_s)
            self._with_retry_after += row.retry_after_s is not None
        else:
            self.failed[row.reason or "unknown"] += 1
            self._unsent[row.bucket] += row.reason == "never_sent"

    def _completed(self, row: Row) -> None:
        self.completed += 1
        self._done_output_tokens += row.output_tokens or 0
        self._estimated += row.tokens_estimated or False
        self._without_output += row.first_s is None
        self.lengths.add(row)
        values = {
            "ttft": row.ttft_response_s,
            "e2e": row.e2e_response_s,
            "tpot": row.tpot_s,
            "stall": row.stall_s,
        }
        if meets(self._slos, row.bucket, values):
            good = self._good
            if row.task is not None and self._session_limit_s < math.inf:
                good = self._good_of_task.setdefault(row.task, Counter())
            good[row.bucket] += 1

    def _due(self, ended: str) -> Counter[str]:
        """Return the requests that count, by bucket: the sent ones, if a run was stopped."""
        return self._intended - (self._unsent if ended == INTERRUPTED else Counter())

    def _warnings(self, reason: str, *, exact: bool) -> list[str]:
        """Return the warnings, without the reason of the verdict."""
        return [text for text in self.lengths.warnings(exact=exact) if text != reason]

    def _good_by_bucket(self, tasks_s: Mapping[str, float]) -> Counter[str]:
        """Return the requests within all targets. Requests of a task count if it ended in time."""
        by_bucket = self._good.copy()
        for task, in_time in self._good_of_task.items():
            if tasks_s[task] <= self._session_limit_s:
                by_bucket += in_time
        return by_bucket

    def summary(
        self,
        totals: Mapping[str, Total],
        window_s: float,
        *,
        closed: bool,
        scale: float,
        ended: str = "complete",
        exact: bool = True,
    ) -> dict[str, Any]:
        """Make the summary.

        Args:
            totals: histograms by `metric.bucket`.
            window_s: seconds of arrivals. 0: until the last answer.
            closed: True for a closed loop, in which requests are due when a slot is free.
            scale: seconds of the run in one wall second.
            ended: complete, interrupted or drain timeout.
            exact: answers were to have the lengths of the trace.
        """
        # A run that lost its requests is judged before its lateness.
        window_s = window_s or self.last_done_s
        lost = judge_answers(self.requests, self.completed, self.rejected, self.failed, ended)
        lost = lost or (self.lengths.judge() if exact else None)
        judged = lost or self.lateness.judge(closed=closed)
        tasks_s = self._tasks.seconds()
        by_bucket = self._good_by_bucket(tasks_s)
        good = by_bucket.total()
        seen = self._seen()
        cached = self._cached_tokens if self._cached_known else None
        due = self._due(ended)
        figures: dict[str, Any] = {
            "requests": self.requests,
            "completed": self.completed,
            "rejected": dict(sorted(self.rejected.items())),
            "failed": dict(sorted(self.failed.items())),
            "unanswered": self._first_words(),
            "duration_s": self.last_done_s,
            "window_s": window_s,
            "offered_rate_per_s": _ratio(self.requests - self.failed["never_sent"], window_s),
            **throughput(
                self.completed,
                self._known(self.lengths.prompt_tokens, self.lengths.uncounted_prompts),
                self._known(self._done_output_tokens, self.lengths.uncounted),
                self.last_done_s,
            ),
            "goodput_per_s": _ratio(good, window_s),
            "goodput_by_bucket_per_s": {name: _ratio(by_bucket[name], window_s) for name in seen},
            "attainment": _ratio(good, due.total()),
            "attainment_by_bucket": {name: _ratio(by_bucket[name], due[name]) for name in seen},
            "requests_by_bucket": {name: self._intended[name] for name in seen},
            "slos": [str(slo) for slo in self._slos],
            "hit_ratio": None if cached is None else _ratio(cached, self._prompt_tokens),
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": cached,
            "prompt_tokens_per_backend": dict(sorted(self._by_backend.items())),
            "verdict": judged.word,
            "verdict_reason": judged.reason,
            "verdict_at_s": judged.at_s,
            "warnings": self._warnings(judged.reason, exact=exact),
            "late_arrivals": self.lateness.late,
            "schedule_lag_ms": distribution_ms(self._merged(totals, "sched_lag")),
            "reject_ms": {
                **distribution_ms(self._rejects),
                "max_wall": self._worst_reject_s / scale * 1e3 if self.rejected else None,
                "with_retry_after": self._with_retry_after,
            },
            "itl_estimated": self._estimated,
            "completed_without_output": self._without_output,
            "overflow": sum(total.overflow for total in totals.values()),
        }
        # The distributions, from the histograms.
        for key, metric in METRICS.items():
            figures[key] = self._distributions(totals, metric)
        figures |= task_figures(tasks_s.values())
        figures["ttft_ms_failures_as_inf"] = self._distributions(totals, "ttft_response", True)
        return figures

    def _known(self, tokens: int, uncounted: int) -> int | None:
        return None if uncounted > MOST_UNCOUNTED * self.completed else tokens

    def _first_words(self) -> list[dict[str, Any]]:
        """Return the kinds of unanswered requests, the most frequent first, with first words."""
        names = ("outcome", "reason", "status")
        return [
            {**dict(zip(names, kind, strict=True)), "requests": count, "said": self._said.get(kind)}
            for kind, count in self._unanswered.most_common()
        ]

    def _seen(self) -> list[str]:
        extra = sorted(name for name in self._intended if name not in self.buckets)
        return [*self.buckets, *extra]

    def _merged(self, totals: Mapping[str, Total], metric: str) -> Any:
        merged = new_histogram()
        for name in self._seen():
            if (total := totals.get(f"{metric}.{name}")) is not None:
                add_into(merged, total.histogram)
        return merged

    def _distributions(
        self, totals: Mapping[str, Total], metric: str, failures: bool = False
    ) -> dict[str, Any]:
        missing = self._missing if failures else Counter[str]()
        figures = {"all": distribution_ms(self._merged(totals, metric), missing.total())}
        for name in self._seen():
            total = totals.get(f"{metric}.{name}")
            histogram = total.histogram if total is not None else new_histogram()
            figures[name] = distribution_ms(histogram, missing[name])
        return figures


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
