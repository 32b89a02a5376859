"""One run: engines with empty caches, one router in front, one trace; a small record of it.

The record says what was asked for, what came of it, and whether it is valid: a run in which the
load generator was late, the simulated engines fell behind their own clock, or the machine had no
core left measured something else than the router. A router that does not start gives a record with
`error` and no figures.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ports import free_ports
from routers.contenders import Contender, environment
from routers.engines import Fleet
from routers.peers import Missing, Setting
from routers.processes import (
    ask,
    cores_awake,
    counters,
    running,
    tree_cpu_s,
    used_ticks,
    wait_answers,
)
from routers.results import summarise
from routers.traffic import Traffic

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.run import RunData
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import parse_slos
from forebay.replay.results.verdict import lag_limit_s
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import run_on_fast_loop
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError

DRAIN_S = 150.0  # seconds of the run after the last arrival; who is not done by then has failed
LAG = "forebay_engine_step_lag_seconds"
VALID, INVALID = "valid", "invalid"
LATE_SHARE = 0.01  # as of the replay's own verdict: one in a hundred may be late
BUSY_SHARE = 0.97  # of all cores over the whole run


@dataclass(frozen=True, slots=True)
class Run:
    """One run: `traffic` for `seed`, sent to `contender` in front of `fleet`."""

    contender: Contender
    traffic: Traffic
    seed: int
    fleet: Fleet
    endpoint: str


def measure(run: Run, keep: Path | None) -> dict[str, Any]:
    """Carry out `run`; its figures, or why there are none.

    Args:
        keep: where the run folder goes (as of `forebay replay`); None throws it away.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forebay-routers-") as name:
        folder = Path(name)
        try:
            found = _measured(run, folder, keep or folder / "run")
        except (Missing, InputError, OSError) as error:
            found = {"error": f"{type(error).__name__}: {error}".replace(name, ".")[:400]}
    return {**found, "wall_s": round(time.monotonic() - began, 1)}


def _measured(run: Run, folder: Path, out: Path) -> dict[str, Any]:
    fleet, contender = run.fleet, run.contender
    slos = parse_slos(run.traffic.slo, [bucket.name for bucket in DEFAULT_BUCKETS])
    with ExitStack() as stack:
        ports = stack.enter_context(fleet.fresh(folder))
        for one in ports:  # so that no router has an engine's very first request
            ask(one, fleet.model)
        port, side_port = free_ports(2)
        at = Setting(
            port, side_port, tuple(ports), folder, fleet.time_scale, fleet.model, fleet.chunk
        )  # fmt: skip
        targets, pid = at.urls, None
        if contender.peer is not None:
            log = folder / "router.log"
            process = stack.enter_context(running(contender.command(at), log, environment()))
            wait_answers(process, port, fleet.model, log)
            targets, pid = [f"http://127.0.0.1:{port}"], process.pid
        options = ReplayOptions(
            trace=run.traffic.requests,
            targets=targets,
            out=out,
            model=fleet.model,
            ask_models=False,  # sglang-router calls every model "unknown"
            seed=run.seed,
            endpoint=run.endpoint,
            time_scale=fleet.time_scale,
            slos=slos,
            salt=f"{run.traffic.name}-{run.seed}",
            max_model_len=run.traffic.context,
            too_long="truncate",
            quiet=True,
            force=True,
            drain_timeout_s=DRAIN_S,
        )
        idlers = stack.enter_context(cores_awake())
        before = [counters(one) for one in ports]
        ticks, cpu_s = used_ticks(idlers), tree_cpu_s(pid) if pid else 0.0
        start = time.monotonic()
        summary = run_on_fast_loop(partial(replay, options))
        took_s = time.monotonic() - start
        router_s = tree_cpu_s(pid) - cpu_s if pid else 0.0
        busy, total = (b - a for a, b in zip(ticks, used_ticks(idlers), strict=True))
        after = [counters(one) for one in ports]
        if summary.interrupted:
            raise KeyboardInterrupt
        shown = contender.shown_command(at)
    deltas = [{name: b[name] - a.get(name, 0.0) for name in b} for a, b in zip(before, after)]  # noqa: B905
    busy_share = busy / max(1, total)
    signs = Signs(
        summary.values["verdict"],
        summary.values["verdict_reason"],
        late_steps(deltas, lag_limit_s(slos)),
        busy_share,
    )
    verdict, why = judge(signs)
    return {
        "verdict": verdict,
        "why": why,
        "figures": _figures(summary, load_run(out), deltas),
        "machine_busy": round(busy_share, 3),
        "cores_awake": len(idlers),
        "late_steps": round(signs.late_steps, 4),
        "router_cores": round(router_s / took_s, 3),
        "run_wall_s": round(took_s, 1),
        "command": shown,
    }


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of a bottleneck.

    Attributes:
        replay: the replay's verdict and its reason.
        late_steps: share of engine steps later than can decide a target.
        busy: share of all cores used, by anything, while the run went on.
    """

    replay: str
    reason: str
    late_steps: float
    busy: float


def judge(signs: Signs) -> tuple[str, str]:
    """`valid` or `invalid`, and why."""
    if signs.replay != "valid":
        return INVALID, f"load generator ({signs.replay}): {signs.reason}"
    if signs.late_steps > LATE_SHARE:
        return INVALID, (
            f"engines: {signs.late_steps:.1%} of their steps ended late by their own clock; lower "
            "the time scale"
        )
    if signs.busy > BUSY_SHARE:
        return INVALID, f"machine: {signs.busy:.0%} of all cores were busy"
    return VALID, signs.reason


def late_steps(deltas: Sequence[Mapping[str, float]], limit_s: float) -> float:
    """Share of the engines' steps that were later than the bucket bound next above `limit_s`."""
    bounds = sorted(
        float(name.partition("le=")[2]) for name in deltas[0] if name.startswith(f"{LAG}_bucket")
    )
    bound = next(one for one in bounds if one >= limit_s)
    steps = sum(delta[f"{LAG}_count"] for delta in deltas)
    in_time = sum(delta[f"{LAG}_bucket le={bound:g}"] for delta in deltas)
    return (steps - in_time) / steps if steps else 0.0


def _figures(
    summary: Summary, run: RunData, deltas: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    values = summary.values
    prompt = [delta["vllm:prompt_tokens_total"] for delta in deltas]
    cached = [delta.get("vllm:prefix_cache_hits_total", 0.0) for delta in deltas]
    ttft_s = run.numbers["ttft_response_s"]
    return {
        "requests": values["requests"],
        "completed": values["completed"],
        "offered_per_s": _rounded(values["offered_rate_per_s"]),
        "window_s": _rounded(values["window_s"]),
        "goodput_per_s": _rounded(values["goodput_per_s"]),
        "attainment": _rounded(values["attainment"]),
        "attainment_by_bucket": {
            name: _rounded(share) for name, share in values["attainment_by_bucket"].items()
        },
        "hit_ratio": _rounded(sum(cached) / sum(prompt)) if sum(prompt) else None,
        "prompt_tokens": [round(one) for one in prompt],
        "rejected": values["rejected"],
        "failed": values["failed"],
        "ttft": {
            bucket: summarise(ttft_s[run.rows(bucket, "ok")], int(run.rows(bucket).sum()))
            for bucket in run.buckets()
        },
        "ended": summary.ended,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
