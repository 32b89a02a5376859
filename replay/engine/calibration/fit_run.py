"""Fit the step-time constants to whole replays: every request, also those that met others.

The trace is played through the engine in virtual time with the arrivals of the run, so queueing,
batching and prefix hits are the simulator's; the constants are those whose first-token times and
times per token come nearest to the measured ones. Lone requests cannot show what a sequence more
in a step costs; these can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.constants import Calibration, CalibrationFile
from forebay.replay.engine.calibration.fit import CANDIDATES, Fit, fit_times
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.calibration.points import LEAST_DECODED
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import Request
from forebay.replay.engine.server.tokenizer import hashes_of_ids
from forebay.replay.engine.step_time import StepTimeModel
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

SLOPE_STEP = 0.02
"""Of ln(constant): a request more or less in one step makes predictions jump a little."""
LEAST_GAIN = 1e-3
RUN_CANDIDATES = {**CANDIDATES, "prefill_half_tokens": 1.0}
"""A whole run has chunks at every depth of context, so it also shows how attention speeds up."""
QUANTILES = (0.5, 0.9, 0.99)
_COLUMNS = ("id", "backend", "sent_s", "outcome", "prompt_tokens", "cached_tokens",
            "output_tokens", "ttft_service_s", "e2e_service_s", "tpot_s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    """One request and its times in seconds; `tpot_s` is None below LEAST_DECODED tokens."""

    row: TraceRequest
    sent_s: float
    ttft_s: float
    e2e_s: float
    tpot_s: float | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RunFit:
    """A finished fit; `predicted` stands beside `measured`, request by request."""

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    measured: tuple[Timed, ...]
    predicted: tuple[Timed, ...]


def read_runs(folders: Sequence[Path], trace: Sequence[TraceRequest]) -> tuple[Timed, ...]:
    """The requests of replays of one trace: medians over the runs, request by request.

    Raises InputError for a run that is not of `trace`, of several servers, or with failures.
    """
    tables = [_rows(folder) for folder in folders]
    for folder, table in zip(folders, tables, strict=True):
        _check_trace(folder, table, trace)
    timed = []
    for row in trace:
        found = [table[row.id] for table in tables]
        tpots = [one["tpot_s"] for one in found if one["tpot_s"]]
        output = found[0]["output_tokens"]
        timed.append(
            Timed(
                replace(row, output_tokens=output),
                found[0]["sent_s"],
                median(one["ttft_service_s"] for one in found),
                median(one["e2e_service_s"] for one in found),
                median(tpots) if tpots and output >= LEAST_DECODED else None,
                round(median(one["cached_tokens"] or 0 for one in found)),
            )
        )
    return tuple(timed)


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(
            str(folder / "requests.parquet"), columns=list(_COLUMNS)
        ).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: no run folder: requests.parquet cannot be read") from error
    if bad := [row["id"] for row in rows if row["outcome"] != "ok" or not row["ttft_service_s"]]:
        raise InputError(
            f"{folder}: {len(bad)} of {len(rows)} requests failed, {bad[0]} first; "
            "what they cost the others is not known"
        )
    if len({row["backend"] for row in rows}) > 1:
        raise InputError(f"{folder}: several servers; replay against one")
    return {row["id"]: row for row in rows}


def _check_trace(
    folder: Path, table: Mapping[str, Mapping[str, Any]], trace: Sequence[TraceRequest]
) -> None:
    for row in trace:
        one = table.get(row.id)
        if one is None or one["prompt_tokens"] != row.input_tokens:
            raise InputError(
                f"{folder}: request {row.id} is not there with {row.input_tokens:,} prompt "
                "tokens; --trace must be the trace that was replayed, and the server must "
                "count tokens as it does"
            )
    if len(table) > len(trace):
        raise InputError(f"{folder}: has requests that are not in the trace")


def predict(
    measured: Sequence[Timed], config: EngineConfig, constants: Calibration | None = None
) -> tuple[Timed, ...]:
    """`measured` as the simulated engine would have timed it; only arrivals and sizes are used.

    Args:
        constants: instead of those that `config` names.
    """
    core = EngineCore(config)
    if constants is not None:
        core.timing = StepTimeModel(core.model, core.gpu, constants)
    requests = [_request(one, core.limits.block_size) for one in measured]
    play(core, requests)
    return tuple(
        replace(
            one,
            ttft_s=done.first_token_s - done.arrival_s,
            e2e_s=done.last_token_s - done.arrival_s,
            tpot_s=(done.last_token_s - done.first_token_s) / (done.output_tokens - 1)
            if one.tpot_s
            else None,
            cached_tokens=done.cached_tokens,
        )
        for one, done in zip(measured, requests, strict=True)
    )


def _request(one: Timed, block_size: int) -> Request:
    row = one.row
    hashes = (
        hashes_of_ids(row.blocks, row.block_tokens, row.input_tokens, block_size)
        if row.blocks
        else None
    )
    return Request(row.id, row.input_tokens, row.output_tokens, hashes, arrival_s=one.sent_s)


def fit_run(
    measured: Sequence[Timed],
    config: EngineConfig,
    prior: Calibration,
    *,
    used: str,
    today: date,
    candidates: Mapping[str, float] = RUN_CANDIDATES,
) -> RunFit:
    """Constants under which `config` serves `measured` as it was served."""

    def times(of: Sequence[Timed]) -> list[float]:
        return [one.ttft_s for one in of] + [one.tpot_s for one in of if one.tpot_s]

    found = fit_times(
        lambda constants: times(predict(measured, config, constants)),
        times(measured),
        prior,
        candidates,
        step=SLOPE_STEP,
        least_gain=LEAST_GAIN,
    )
    predicted = predict(measured, config, found.constants)
    file = CalibrationFile(
        config.model_spec.name,
        config.gpu_spec.name,
        today.isoformat(),
        used,
        "not checked: every request was fitted; predict the replay of another trace",
        found.constants,
        found.fitted,
        tuple(asdict(line) for line in compared(measured, predicted)),
    )
    return RunFit(file, found, prior, tuple(measured), predicted)


@dataclass(frozen=True, slots=True)
class Line:
    """One quantile of one measure, seconds."""

    measure: str
    quantile: float
    requests: int
    measured_s: float
    model_s: float
    error: float


def compared(measured: Sequence[Timed], predicted: Sequence[Timed]) -> tuple[Line, ...]:
    """Quantiles (nearest rank) of TTFT, TPOT and E2E, measured and predicted."""
    lines = []
    for name in ("ttft", "tpot", "e2e"):
        mine = sorted(v for one in measured if (v := getattr(one, f"{name}_s")))
        models = sorted(v for one in predicted if (v := getattr(one, f"{name}_s")))
        for quantile in QUANTILES if mine else ():
            at = max(0, -int(-quantile * len(mine) // 1) - 1)
            lines.append(
                Line(name, quantile, len(mine), mine[at], models[at], models[at] / mine[at] - 1)
            )
    return tuple(lines)


def hit_ratio(of: Sequence[Timed]) -> float:
    """Cached prompt tokens by prompt tokens."""
    return sum(one.cached_tokens for one in of) / sum(one.row.input_tokens for one in of)
