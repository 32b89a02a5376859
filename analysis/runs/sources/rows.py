"""Read the rows of a file, one for each request, and make a run of them."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.analysis.runs.run import NUMBERS, WORDS, RunData, Words, folder_name
from forebay.analysis.statistics.quantiles import Floats
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.slo import default_slos
from forebay.traces.ground.buckets import DEFAULT_BUCKETS

NO_VERDICT = "the file does not say how late requests were sent"
UNIQUE = frozenset({"id", "request_id"})  # columns whose texts never repeat, so none is shared
FileRow = dict[str, float | str | None]


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """Where rows come from.

    Attributes:
        made_by: common name of the tool or file.
        differs: the file's own definition of a figure, by its key, such as ttft.
        notes: sentences on data that the file lacks.
        unix: times of the rows are seconds since 1970.
    """

    made_by: str
    differs: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unix: bool = False


def run_of_rows(
    path: Path,
    name: str | None,
    origin: FileOrigin,
    rows: Iterable[FileRow],
    notes: Sequence[str] = (),
) -> RunData:
    """Make a run that starts at 0 when its first request was due. There must be rows.

    `notes` may grow until the last row is read.

    No row is kept, as a log may have millions: only its columns, with equal words once.
    """
    numbers, words = _columns(rows)
    for key in ("intended_s", "sent_s"):
        np.nan_to_num(numbers[key], copy=False)
    first_s = float(numbers["intended_s"].min())
    for key in ("intended_s", "sent_s"):
        numbers[key] -= first_s
    summary = row_summary(numbers, words)
    if said := [*origin.notes, *notes]:
        summary["warnings"] = [f"{origin.made_by}: {note}" for note in said]
    return RunData(
        path, name or folder_name(path), summary, origin_info(origin, first_s), numbers, words
    )


def _columns(rows: Iterable[FileRow]) -> tuple[dict[str, Floats], dict[str, Words]]:
    """Return the columns of a run. None becomes NaN, or an empty word."""
    numbers = {key: array("d") for key in NUMBERS}
    words: dict[str, list[str]] = {key: [] for key in WORDS}
    same: dict[str, str] = {}
    for row in rows:
        for key, column in numbers.items():
            value = row.get(key)
            column.append(math.nan if value is None else float(value))
        for key, texts in words.items():
            text = str(row.get(key) or "")
            clean = same.get(text) or printable(text)
            texts.append(clean if key in UNIQUE else same.setdefault(text, clean))
    return (
        {key: np.frombuffer(column, dtype=np.float64) for key, column in numbers.items()},
        {key: np.array(texts, dtype=object) for key, texts in words.items()},
    )


def origin_info(origin: FileOrigin, first_s: float) -> dict[str, Any]:
    """Return a substitute for run.json."""
    info: dict[str, Any] = {
        "made_by": origin.made_by,
        "buckets": [{"name": bucket.name} for bucket in DEFAULT_BUCKETS],
        "differs": dict(origin.differs),
    }
    if origin.unix:
        info["started_unix_s"] = first_s
    return info


def row_summary(numbers: Mapping[str, Floats], words: Mapping[str, Words]) -> dict[str, Any]:
    """Judge the rows by the default targets, as a replay without --slo does."""
    slos = default_slos(DEFAULT_BUCKETS)
    due_s = numbers["intended_s"]
    count = len(due_s)
    window_s = float(due_s.max() - due_s.min()) * count / max(1, count - 1)
    # Each request is judged by the target of its bucket, which is one of TTFT.
    limits = {slo.bucket: slo.limit_s for slo in slos if slo.metric == "ttft"}
    ok = words["outcome"] == "ok"
    good: dict[str, int] = {}
    total: dict[str, int] = {}
    for bucket in dict.fromkeys(words["bucket"].tolist()):
        mine = words["bucket"] == bucket
        total[bucket] = int(mine.sum())
        mine &= ok
        if bucket in limits:
            mine &= numbers["ttft_response_s"] <= limits[bucket]  # a missing TTFT misses it
        good[bucket] = int(mine.sum())
    # The shares and rates, in the form of a replay's summary.json.
    met = sum(good.values())
    return {
        "verdict": "unknown",
        "verdict_reason": NO_VERDICT,
        "requests": count,
        "window_s": window_s,
        "duration_s": float((due_s + np.nan_to_num(numbers["e2e_response_s"])).max()),
        "attainment": met / count,
        "goodput_per_s": met / window_s if window_s else None,
        "attainment_by_bucket": {name: good[name] / number for name, number in total.items()},
        "goodput_by_bucket_per_s": {
            name: good[name] / window_s if window_s else None for name in total
        },
        "requests_by_bucket": total,
        "slos": [str(slo) for slo in slos],
    }
