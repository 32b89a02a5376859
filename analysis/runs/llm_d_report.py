"""Make an llm-d Benchmark Report v0.2 of a run.

The schema is `benchmark_report/schema_v0_2.py` of github.com/llm-d/llm-d-benchmark. It allows
no other keys. Times are seconds from when a request was due, of completed requests. The stack is
left out: a run does not know the accelerators behind its targets.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import Floats

VERSION = "0.2"
# Names of percentiles in the schema; p0p1 is the 0.1th.
PERCENTILES: Mapping[str, float] = {
    "p0p1": 0.1,
    "p1": 1.0,
    "p5": 5.0,
    "p10": 10.0,
    "p25": 25.0,
    "p50": 50.0,
    "p75": 75.0,
    "p90": 90.0,
    "p95": 95.0,
    "p99": 99.0,
    "p99p9": 99.9,
}


def report(run: RunData) -> dict[str, Any]:
    """Return the report. Keys without a value are left out."""
    numbers = run.numbers
    ok = run.words["outcome"] == "ok"
    output = numbers["output_tokens"][ok]
    e2e_s = numbers["e2e_response_s"][ok]
    duration_s = run.number("duration_s") or 0.0
    # The schema has a count of its own for requests that were never sent.
    never_sent = int((run.words["reason"] == "never_sent").sum())
    counted = {"input": numbers["input_tokens"][ok], "output": output}
    totals = {name: float(np.nansum(values)) for name, values in counted.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token_s = np.where(output > 0, e2e_s / output, np.nan)
    # Figures of the answered requests, in the groups of the schema.
    performance = {
        "requests": {
            "total": run.requests - never_sent,
            "failures": run.requests - never_sent - int(ok.sum()),
            "incomplete": never_sent,
            "input_length": _statistics(counted["input"], "count"),
            "output_length": _statistics(output, "count"),
        },
        "latency": {
            "time_to_first_token": _statistics(numbers["ttft_response_s"][ok], "s"),
            "normalized_time_per_output_token": _statistics(per_token_s, "s/token"),
            "time_per_output_token": _statistics(numbers["tpot_s"][ok], "s/token"),
            "request_latency": _statistics(e2e_s, "s"),
        },
        "throughput": {
            "input_token_rate": _mean(totals["input"], duration_s, "tokens/s"),
            "output_token_rate": _mean(totals["output"], duration_s, "tokens/s"),
            "total_token_rate": _mean(sum(totals.values()), duration_s, "tokens/s"),
            "requests_rate": _mean(float(ok.sum()), duration_s, "queries/s"),
        },
    }
    document: dict[str, Any] = _known(
        {
            "version": VERSION,
            "run": {"uid": run.info.get("run_id"), "time": _time(run, duration_s)},
            "scenario": {"load": _load(run)},
            "results": {"request_performance": {"aggregate": performance}},
        }
    )
    return document


def _load(run: RunData) -> dict[str, Any] | None:
    lengths = run.numbers["input_tokens"]
    if not len(lengths):
        return None
    versions = run.info.get("versions")
    arrivals = str(run.info.get("arrivals", ""))
    closed = arrivals.partition(":")[2] if arrivals.startswith("closed:") else ""
    return {
        "metadata": {"description": f"replay of a trace, arrivals {arrivals}"},
        "standardized": {
            "tool": "forebay",
            "tool_version": str((versions or {}).get("forebay") or "unknown"),
            "source": "sampled",
            "input_seq_len": {
                "distribution": "other",
                "value": float(lengths.mean()),
                "std_dev": float(lengths.std()),
                "min": int(lengths.min()),
                "max": int(lengths.max()),
            },
            "rate_qps": None if closed else run.number("offered_rate_per_s") or None,
            "concurrency": int(closed) if closed else None,
        },
        "native": {"config": dict(run.info)},
    }


def _time(run: RunData, duration_s: float) -> dict[str, Any] | None:
    try:
        start = datetime.fromisoformat(run.info["started_at"])
    except (KeyError, TypeError, ValueError):
        return None
    wall_s = duration_s / float(run.info.get("time_scale") or 1.0)
    end = start + timedelta(seconds=wall_s)
    return {
        "start": start.isoformat(),
        "end": end.isoformat(),
        "duration": f"PT{wall_s:.6f}S",
    }


def _statistics(values: Floats, units: str) -> dict[str, Any] | None:
    numbers = values[~np.isnan(values)]
    if not len(numbers):
        return None
    return {
        "units": units,
        "mean": float(numbers.mean()),
        "stddev": float(numbers.std()),
        "min": float(numbers.min()),
        **{name: float(np.percentile(numbers, at)) for name, at in PERCENTILES.items()},
        "max": float(numbers.max()),
    }


def _mean(count: float, duration_s: float, units: str) -> dict[str, Any] | None:
    return {"units": units, "mean": count / duration_s} if duration_s else None


def _known(value: Any) -> Any:
    """Leave out the keys without a value, except in the run's own record."""
    if not isinstance(value, dict):
        return value
    fields = {k: v if k == "native" else _known(v) for k, v in value.items() if v is not None}
    return {key: field for key, field in fields.items() if field != {}}
