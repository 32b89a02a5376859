"""Hold one run in memory: its summary, how it was made, and the columns of its requests.

A key that an older run lacks is None. Every summary has the number of requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.statistics.quantiles import Floats
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.slo import Slo, parse_slos
from forebay.replay.plan.tasks import TaskTimes, seconds_of_each
from forebay.replay.results.summary import is_firm
from forebay.traces.ground.errors import InputError

NUMBERS = (
    "input_tokens",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "intended_s",
    "sent_s",
    "ttft_response_s",
    "ttft_service_s",
    "e2e_response_s",
    "tpot_s",
    "stall_s",
    "queue_ms",
    "status",
    "retry_after_s",
    "reject_latency_s",
)
LATENCIES = {
    "ttft": "ttft_response_s",
    "e2e": "e2e_response_s",
    "tpot": "tpot_s",
    "stall": "stall_s",
}
WORDS = ("bucket", "outcome", "reason", "backend", "tenant", "id", "request_id", "task")
NEEDED = frozenset({"bucket", "intended_s", "ttft_response_s", "outcome"})
OUTCOMES = frozenset({"ok", "rejected", "failed"})
NO_BUCKET = "other"  # requests longer than every bucket
MAX_NAME = 40  # characters of a run's name in a table

Words = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of one run. `numbers` have NaN for null, `words` have "" for null."""

    path: Path
    name: str
    summary: Mapping[str, Any]
    info: Mapping[str, Any]
    numbers: Mapping[str, Floats]
    words: Mapping[str, Words]

    @property
    def requests(self) -> int:
        return len(self.words["outcome"])

    def buckets(self) -> list[str]:
        """The buckets that received a request, shortest prompts first."""
        names = sorted(set(self.words["bucket"].tolist()))
        return sorted(names, key=lambda name: (name == NO_BUCKET, self._median_tokens(name), name))

    def planned_buckets(self) -> list[str]:
        """All buckets of run.json, even without requests. Older runs have no list."""
        buckets = self.info.get("buckets")
        entries = buckets if isinstance(buckets, list) else ()
        names = [at_path(bucket, ("name",)) for bucket in entries]
        return [printable(name) for name in names if isinstance(name, str)]

    def rows(self, bucket: str | None = None, outcome: str | None = None) -> NDArray[np.bool_]:
        """A mask of the requests of a bucket and outcome. None matches any."""
        mask = np.ones(self.requests, dtype=np.bool_)
        if bucket is not None:
            mask &= self.words["bucket"] == bucket
        if outcome is not None:
            mask &= self.words["outcome"] == outcome
        return mask

    def number(self, *keys: str) -> float | None:
        """A number of summary.json by its path, or None if absent."""
        value = at_path(self.summary, keys)
        if value is None or value == "inf":
            return math.inf if value else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{self.path / 'summary.json'}: {'.'.join(keys)} is {value!r}, not a number; "
                "repeat the run"
            )
        return float(value)

    def shown(self, *keys: str) -> float | None:
        """`number` for display: None for a percentile with too few samples beyond it."""
        count = self.number(*keys[:-1], "count")
        return self.number(*keys) if count is None or is_firm(keys[-1], int(count)) else None

    def task_times(self) -> dict[str, float]:
        """The seconds of each task of the run, infinite without an answer to its end."""
        times = TaskTimes()
        if not any(self.words["task"]):
            return {}
        due_s, answered = self.numbers["intended_s"], self.rows(outcome="ok")
        end_s = np.where(answered, due_s + self.numbers["e2e_response_s"], np.nan)
        for task, due, end in zip(self._tasks(), due_s.tolist(), end_s.tolist(), strict=True):
            times.add(task, None if math.isnan(due) else due, None if math.isnan(end) else end)
        return times.seconds()

    def task_seconds(self) -> Floats:
        """For each request the time of its task: inf without one, NaN without a task."""
        return np.array(seconds_of_each(self._tasks(), self.task_times()))

    def slos(self) -> tuple[Slo, ...]:
        """The targets of the run's own goodput."""
        recorded = self.summary.get("slos")
        texts = [str(text) for text in recorded] if isinstance(recorded, list) else []
        buckets = [text.rpartition(".")[0] for text in texts]
        return parse_slos(",".join(texts), buckets) if texts else ()

    def busy_s(self) -> float:
        """The seconds that throughput is divided by: from the start to the last answer, or 0."""
        return self.number("duration_s") or self.number("window_s") or 0.0

    def window_s(self) -> float:
        """The seconds that goodput is divided by: the time in which requests were due, or 0."""
        durations_s = (self.number(key) or 0.0 for key in ("window_s", "duration_s"))
        return next((seconds for seconds in durations_s if seconds > 0), 0.0)

    def _tasks(self) -> list[str | None]:
        """The task of each request. Runs of other tools, and older runs, have no tasks."""
        return [text or None for text in self.words["task"]]

    def _median_tokens(self, bucket: str) -> float:
        tokens = self.numbers["input_tokens"][self.rows(bucket)]
        tokens = tokens[~np.isnan(tokens)]
        return float(np.median(tokens)) if len(tokens) else math.inf


def from_sending(run: RunData) -> RunData:
    """Return the run with latencies from when requests were sent, not from when they were due.

    Requests without a known sending time keep their latencies.
    """
    due, sent = run.numbers["ttft_response_s"], run.numbers["ttft_service_s"]
    late_s = np.nan_to_num(due - sent)
    shifted = {name: run.numbers[name] - late_s for name in ("ttft_response_s", "e2e_response_s")}
    return replace(run, numbers={**run.numbers, **shifted})


def at_path(tree: Any, keys: Sequence[str]) -> Any:
    """The value under nested keys, or None if a key is missing."""
    for key in keys:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def folder_name(path: Path) -> str:
    name = printable(path.resolve().name) or "run"
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
