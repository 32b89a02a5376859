"""Fit the step-time constants to whole replays: to every request, also those served together.

The trace is played through the engine in virtual time with the arrivals of the run, so queueing,
batching and prefix hits are the simulator's. The fit chooses the constants whose first-token times
and times per token come nearest to the measured ones. Requests that were served together show what
one more sequence in a step costs; requests that were alone cannot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.fit import CANDIDATES, Fit, fit_times
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.calibration.points import LEAST_DECODED
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.step_constants import Calibration, CalibrationFile
from forebay.replay.engine.step_time import StepTimeModel
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

SLOPE_STEP = 0.02
"""Step of ln(constant) for slopes: coarse, because predictions jump a little when a request moves
to another step."""
LEAST_GAIN = 1e-3
QUANTILES = (0.5, 0.9, 0.99)
MOST_ADDED = 256
"""Tokens that a chat template may add to a prompt; more, and the run is of another trace."""
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
    """A finished fit; `measured` and `predicted` list the same requests in the same order."""

    file: CalibrationFile
    fit: Fit
    prior: Calibration
    measured: tuple[Timed, ...]
    predicted: tuple[Timed, ...]


def read_runs(folders: Sequence[Path], trace: Sequence[TraceRequest]) -> tuple[Timed, ...]:
    """Read the requests of replays of one trace; each time is the median over the runs.

    A request has the prompt tokens that the server counted: a chat template adds to those of the
    trace.

    Raises InputError for a run of another trace, of several servers, or with failures.
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
                replace(row, input_tokens=found[0]["prompt_tokens"], output_tokens=output),
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
        raise InputError(f"{folder}: not a run folder: requests.parquet cannot be read") from error
    if bad := [row["id"] for row in rows if row["outcome"] != "ok" or not row["ttft_service_s"]]:
        raise InputError(
            f"{folder}: {len(bad)} of {len(rows)} requests failed, {bad[0]} first; "
            "their effect on the others is not known"
        )
    if len({row["backend"] for row in rows}) > 1:
        raise InputError(f"{folder}: several servers; replay against one")
    return {row["id"]: row for row in rows}


def _check_trace(
    folder: Path, table: Mapping[str, Mapping[str, Any]], trace: Sequence[TraceRequest]
) -> None:
    added: int | None = None  # by a chat template: the same for every request
    for row in trace:
        if row.id not in table:
            raise InputError(
                f"{folder}: has no request {row.id}; --trace must be the replayed trace"
            )
        counted = table[row.id]["prompt_tokens"] or 0
        more = counted - row.input_tokens
        added = more if added is None else added
        if more != added or not 0 <= more <= MOST_ADDED:
            raise InputError(
                f"{folder}: request {row.id} has {counted:,} prompt tokens, in the trace it has "
                f"{row.input_tokens:,}; --trace must be the replayed trace, and the server must "
                "count tokens as it does (a chat template may add the same number to each)"
            )
    if len(table) > len(trace):
        raise InputError(f"{folder}: has requests that are not in the trace")


def predict(
    measured: Sequence[Timed], config: EngineConfig, constants: Calibration | None = None
) -> tuple[Timed, ...]:
    """Predict the times of `measured` from their arrivals and sizes alone.

    Args:
        constants: replace those that `config` names.
    """
    core = EngineCore(config)
    if constants is not None:
        core.timing = StepTimeModel(
            core.model, core.gpu, constants, async_scheduling=config.asynchronous
        )
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


def _request(one: Timed, block_size: int) -> EngineRequest:
    row = one.row
    hashes = (
        hashes_of_ids(row.blocks, row.block_tokens, row.input_tokens, block_size)
        if row.blocks
        else None
    )
    return EngineRequest(row.id, row.input_tokens, row.output_tokens, hashes, arrival_s=one.sent_s)


def fit_run(
    measured: Sequence[Timed],
    config: EngineConfig,
    prior: Calibration,
    *,
    used: str,
    today: date,
    candidates: Mapping[str, float] = CANDIDATES,
) -> RunFit:
    """Fit constants so that an engine with `config` serves `measured` in the measured times."""

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
class FitLine:
    """One quantile of one measure, in seconds."""

    measure: str
    quantile: float
    requests: int
    measured_s: float
    model_s: float
    error: float


def compared(measured: Sequence[Timed], predicted: Sequence[Timed]) -> tuple[FitLine, ...]:
    """Compare measured and predicted quantiles (nearest rank) of TTFT, TPOT and E2E."""
    lines = []
    for name in ("ttft", "tpot", "e2e"):
        mine = sorted(v for one in measured if (v := getattr(one, f"{name}_s")))
        models = sorted(v for one in predicted if (v := getattr(one, f"{name}_s")))
        for quantile in QUANTILES if mine else ():
            at = max(0, -int(-quantile * len(mine) // 1) - 1)
            lines.append(
                FitLine(name, quantile, len(mine), mine[at], models[at], models[at] / mine[at] - 1)
            )
    return tuple(lines)


def hit_ratio(of: Sequence[Timed]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(one.cached_tokens for one in of) / sum(one.row.input_tokens for one in of)
