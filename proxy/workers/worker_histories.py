"""Add up the workers' answers to `/history`."""

from collections.abc import Mapping, Sequence
from typing import Any

ADDED = ("requests", "rejected", "left", "failed", "prompt_tokens")
LARGEST = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s")
"""Quantiles cannot be added: the largest of a worker stands."""


def added_up(histories: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return one history with the last minute and the events of all workers, by worker."""
    first = next(iter(histories.values()))
    minutes = [history["minute"] for history in histories.values()]
    events = [
        {**event, "worker": i} for i, history in histories.items() for event in history["events"]
    ]
    return {
        "every_s": first["every_s"],
        "kept_s": first["kept_s"],
        "samples": [],
        "minute": {
            "seconds": max(minute["seconds"] for minute in minutes),
            **{
                kind: _sums([minute[kind] for minute in minutes])
                for kind in ("buckets", "tenants", "models")
            },
        },
        "events": sorted(events, key=lambda event: event["age_s"]),
    }


def _sums(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one line for each name, those with most requests first."""
    lines: dict[str, dict[str, Any]] = {}
    for line in (line for part in parts for line in part):
        total = lines.get(line["name"])
        if total is None:
            lines[line["name"]] = dict(line)
            continue
        for key in ADDED:
            total[key] += line[key]
        for key in LARGEST:
            times = [row[key] for row in (total, line) if row[key] is not None]
            total[key] = max(times, default=None)
    return sorted(lines.values(), key=lambda line: (-line["requests"], line["name"]))
