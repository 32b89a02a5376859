"""Write a simulation to a run folder, so that `compare` and `report` read it like a replay."""

import asyncio
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forebay.proxy.core.model import Reject
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import NOT_SIMULATED
from forebay.replay.plan.source import TraceSource
from forebay.replay.plan.tasks import TaskNames
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.row import Row, log_row, row_with
from forebay.replay.send.http.measure import DEFINITIONS
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Simulated
from forebay.replay.sim.sweep import SweepCase
from forebay.traces.ground.buckets import LengthBucket, bucket_of
from forebay.traces.ground.hlog import HlogWriter, IntervalLog
from forebay.traces.ground.schema import TraceRequest

LINES = 3_600  # most lines of each tag in the .hlog: writing one takes 0.4 ms


def keep(
    folder: Path, case: SweepCase, simulated: Simulated, summary: dict[str, Any], *, force: bool
) -> None:
    """Write the four files of a run (InputError: the folder cannot take it)."""
    with RunFolder(folder, force=force) as run:
        log = IntervalLog(HlogWriter(run.hlog, 0.0, ["forebay simulate: virtual time"]))
        buckets = simulated.scenario.buckets()
        names = TaskNames()
        rows = [
            row_of(outcome, buckets, names.name(outcome.request)) for outcome in simulated.outcomes
        ]
        ended = sorted(rows, key=lambda row: row.done_s or 0.0)
        end_s = (ended[-1].done_s or 0.0) if ended else 0.0
        # A line for each second and tag, as in a replay. A week gets as many lines as an hour.
        every_s = max(1, math.ceil(end_s / LINES))
        line_ends_s = every_s
        for row in ended:
            done_s = row.done_s or 0.0
            if done_s > line_ends_s:
                log.flush(line_ends_s)
                line_ends_s = every_s * math.ceil(done_s / every_s)
                log.flush(line_ends_s - every_s)  # skips the time in which no request ended
            log_row(log, row)
        for row in rows:
            run.table.add(row)
        asyncio.run(run.table.write_rows())
        log.close(end_s)
        run.commit(_record(case, simulated, summary), summary)


def row_of(outcome: SimOutcome, buckets: Sequence[LengthBucket], task: str | None) -> Row:
    """Make the row of one simulated request, which is sent the moment it is due."""
    request, reject = outcome.request, outcome.reject
    bucket = bucket_of(request.input_tokens, buckets) or "other"
    due, first = request.arrival_s, outcome.first_token_s
    queued_s = reject.queued_s if reject else (outcome.sent_s or due) - due
    # A simulated request is sent when it is due, and the proxy's wait is the only delay before it.
    values = {
        "intended_s": due,
        "sent_s": due,
        "first_s": first,
        "done_s": due + queued_s,
        "pacing_lag_s": 0.0,
        "cap_wait_s": 0.0,
        "ttft_response_s": _since(due, first),
        "ttft_service_s": _since(due, first),
        "queue_ms": queued_s * 1e3,
        "status": 200,
        "outcome": "ok",
        "backend": outcome.backend,
        "tokens_estimated": False,
        **_end(outcome),
        **(_rejection(reject) if reject else {}),
    }
    return row_with(request, bucket, task, values)


def _end(outcome: SimOutcome) -> dict[str, float | int | None]:
    """Make the columns of a request that was answered to the end, empty for others."""
    first, last = outcome.first_token_s, outcome.finished_s
    if first is None or last is None:
        return {}
    request = outcome.request
    e2e_s, output = last - request.arrival_s, request.output_tokens
    return {
        "prompt_tokens": request.input_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": output,
        "last_s": last,
        "done_s": last,
        "e2e_response_s": e2e_s,
        "e2e_service_s": e2e_s,
        "tpot_s": (last - first) / (output - 1) if output > 1 else None,
        "stall_s": outcome.stall_s if output > 1 else None,
    }


def _rejection(reject: Reject) -> dict[str, float | str | None]:
    return {
        "status": 429,
        "outcome": "rejected",
        "reason": reject.reason,
        "retry_after_s": reject.retry_after_s,
        "reject_latency_s": reject.queued_s,
    }


def _since(start_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - start_s


def _record(case: SweepCase, simulated: Simulated, summary: dict[str, Any]) -> dict[str, Any]:
    scenario, workload = case.scenario, case.workload
    return {
        "run_id": "simulated",
        "started_at": datetime.now(UTC).isoformat(),
        "ended": "complete",
        "simulated": True,
        "trace": _trace(workload.trace),
        "seed": workload.seed,
        "arrivals": workload.arrivals.kind,
        "turns": "wait" if simulated.waited else "trace",
        "rate_per_s": workload.rate,
        "speed": workload.speed,
        "load": workload.load,
        "duration_s": workload.duration,
        "time_scale": 1.0,
        "schedule": {"requests": summary["requests"], "window_s": summary["window_s"]},
        "model": scenario.engine.served_name,
        "gpus": scenario.gpus,
        "gpu_mix": list(scenario.gpu_mix),
        "policy": scenario.policy,
        "engine": _engine_options(scenario.engine),
        "proxy": scenario.proxy.model_dump(mode="json", exclude={"upstream_api_key"}),
        "slos": [asdict(slo) for slo in case.slos],
        "buckets": [asdict(bucket) for bucket in scenario.buckets()],
        "versions": {"python": platform.python_version(), "forebay": version("forebay")},
        "cpu_s": simulated.cpu_s,
        "definitions": DEFINITIONS,
    }


def _engine_options(engine: EngineConfig) -> dict[str, str]:
    options = asdict(engine).items()
    return {name: str(value) for name, value in options if name not in NOT_SIMULATED}


def _trace(trace: Path | Sequence[TraceRequest]) -> dict[str, str | None]:
    """Name the trace, as a replay does. A trace that was read from a pipe has no hash."""
    if isinstance(trace, Path) and not trace.is_file():
        return {"path": str(trace), "sha256": None}
    source = TraceSource(trace)
    return {"path": source.name, "sha256": source.sha256()}
