"""Make a run of rows that were read from a file: one row for each request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.analysis.runs.run import NUMBERS, WORDS, RunData, folder_name
from forebay.replay.plan.slo import default_slos, meets
from forebay.traces.buckets import DEFAULT_BUCKETS

NO_VERDICT = "the file does not say how late requests were sent"
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
    path: Path, name: str | None, origin: FileOrigin, rows: Sequence[FileRow]
) -> RunData:
    """Make a run that starts at 0 when its first request was due. There must be rows."""
    first_s = min(float(row["intended_s"] or 0.0) for row in rows)
    for row in rows:
        for key in ("intended_s", "sent_s"):
            row[key] = float(row[key] or 0.0) - first_s
    numbers = {
        key: np.array([row.get(key) for row in rows], dtype=np.float64) for key in NUMBERS
    }  # None becomes NaN
    words = {
        key: np.array([str(row.get(key) or "") for row in rows], dtype=object) for key in WORDS
    }
    summary = row_summary(rows)
    if origin.notes:
        summary["warnings"] = [f"{origin.made_by}: {note}" for note in origin.notes]
    return RunData(
        path, name or folder_name(path), summary, origin_info(origin, first_s), numbers, words
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


def row_summary(rows: Sequence[FileRow]) -> dict[str, Any]:
    """Judge the rows by the default targets, as a replay without --slo does."""
    slos = default_slos([bucket.name for bucket in DEFAULT_BUCKETS])
    due = [float(row["intended_s"] or 0.0) for row in rows]
    window_s = (max(due) - min(due)) * len(rows) / max(1, len(rows) - 1)
    good: dict[str, int] = {}
    total: dict[str, int] = {}
    # Each request is judged by the targets of its bucket.
    for row in rows:
        bucket = str(row["bucket"])
        values: dict[str, Any] = {
            "ttft": row.get("ttft_response_s"), "e2e": row.get("e2e_response_s"),
            "tpot": row.get("tpot_s"), "stall": row.get("stall_s"),
        }  # fmt: skip
        total[bucket] = total.get(bucket, 0) + 1
        good[bucket] = good.get(bucket, 0) + (
            row["outcome"] == "ok" and meets(slos, bucket, values)
        )
    met = sum(good.values())
    ends = (at + float(row.get("e2e_response_s") or 0.0) for at, row in zip(due, rows, strict=True))
    return {
        "verdict": "unknown",
        "verdict_reason": NO_VERDICT,
        "requests": len(rows),
        "window_s": window_s,
        "duration_s": max(ends, default=math.nan),
        "attainment": met / len(rows),
        "goodput_per_s": met / window_s if window_s else None,
        "attainment_by_bucket": {name: good[name] / count for name, count in total.items()},
        "goodput_by_bucket_per_s": {
            name: good[name] / window_s if window_s else None for name in total
        },
        "requests_by_bucket": total,
        "slos": [str(slo) for slo in slos],
    }
