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

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.calibration.fit import CANDIDATES, Fit, fit_times
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.calibration.points import LEAST_DECODED
from forebay.replay.engine.calibration.prompt_hashes import PromptHashes
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_constants import Calibration, CalibrationFile
from forebay.replay.engine.timing.step_time import StepTimeModel
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

SLOPE_STEP = 0.02
"""Step of ln(constant) for slopes: coarse, because predictions jump a little when a request moves
to another step."""
LEAST_GAIN = 1e-3
QUANTILES = (0.5, 0.9, 0.99)
MOST_ADDED = 256
"""Tokens that a chat template may add to a prompt; more, and the run is of another trace."""
MOST_FAILED = 0.05
"""Largest share of failed requests: what a failed request cost the server is only estimated."""
_COLUMNS = ("id", "backend", "sent_s", "outcome", "reason", "status", "prompt_tokens",
            "cached_tokens", "output_tokens", "ttft_service_s", "e2e_service_s",
            "tpot_s")  # fmt: skip
_NOT_SERVED = ("connect", "tls", "never_sent")


@dataclass(frozen=True, slots=True)
class Timed:
    """One request and its times in seconds; `tpot_s` is None below LEAST_DECODED tokens.

    A request that failed is not `finished`: it is played, because it took the server's time, and
    its own times are not compared.
    """

    row: TraceRequest
    sent_s: float
    ttft_s: float
    e2e_s: float
    tpot_s: float | None
    cached_tokens: int
    finished: bool = True


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
    trace. Requests after the end of a run that was shorter than its trace are left out, and so are
    requests that the server did not accept.

    Raises InputError for a run of another trace, of several servers, or with many failures.
    """
    tables = [_rows(folder) for folder in folders]
    for folder, table in zip(folders, tables, strict=True):
        _check_trace(folder, table, trace)
    timed = (_timed(row, [table[row.id] for table in tables if row.id in table]) for row in trace)
    return tuple(one for one in timed if one is not None)


def _timed(row: TraceRequest, found: Sequence[Mapping[str, Any]]) -> Timed | None:
    """Return a request with its median times, or None if no server worked on it."""
    done = [one for one in found if _answered(one)]
    if not done:
        return _failed(row, found)
    tpots = [one["tpot_s"] for one in done if one["tpot_s"]]
    output = done[0]["output_tokens"]
    return Timed(
        replace(row, input_tokens=done[0]["prompt_tokens"], output_tokens=output),
        done[0]["sent_s"],
        median(one["ttft_service_s"] for one in done),
        median(one["e2e_service_s"] for one in done),
        median(tpots) if tpots and output >= LEAST_DECODED else None,
        round(median(one["cached_tokens"] or 0 for one in done)),
    )


def _failed(row: TraceRequest, found: Sequence[Mapping[str, Any]]) -> Timed | None:
    """Return a request that failed with the tokens that it got, or None if none was served."""
    for one in found:
        if _occupied(one):
            prompt, output = one["prompt_tokens"] or row.input_tokens, one["output_tokens"] or 1
            played = replace(row, input_tokens=prompt, output_tokens=output)
            return Timed(played, one["sent_s"], 0.0, 0.0, None, 0, finished=False)
    return None


def _answered(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "ok" and bool(row["ttft_service_s"])


def _occupied(row: Mapping[str, Any]) -> bool:
    """Return True if the server may have worked on this request, which failed."""
    return (
        row["outcome"] != "rejected"
        and row["sent_s"] is not None
        and row["reason"] not in _NOT_SERVED
        and row["status"] in (None, 200)
    )


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(
            str(folder / "requests.parquet"), columns=list(_COLUMNS)
        ).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: not a run folder: requests.parquet cannot be read") from error
    failed = [row["id"] for row in rows if row["outcome"] != "rejected" and not _answered(row)]
    if len(failed) > MOST_FAILED * len(rows):
        raise InputError(
            f"{folder}: {len(failed)} of {len(rows)} requests failed, {failed[0]} first; "
            "their effect on the others is not known"
        )
    answered = [row for row in rows if _answered(row)]
    if not answered:
        raise InputError(f"{folder}: no request was answered")
    if len({row["backend"] for row in answered}) > 1:
        raise InputError(f"{folder}: several servers; replay against one")
    return {row["id"]: row for row in rows}


def _check_trace(
    folder: Path, table: Mapping[str, Mapping[str, Any]], trace: Sequence[TraceRequest]
) -> None:
    known = {row.id for row in trace}
    if not table.keys() <= known:
        raise InputError(f"{folder}: has requests that are not in the trace")
    added: int | None = None  # by a chat template: the same for every request
    end_s = max(row.arrival_s for row in trace if row.id in table)
    for row in trace:
        if row.id not in table:
            if row.arrival_s > end_s:  # the run was shorter than its trace
                continue
            raise InputError(
                f"{folder}: has no request {row.id}; --trace must be the replayed trace"
            )
        if not _answered(table[row.id]):
            continue
        counted = table[row.id]["prompt_tokens"] or 0
        more = counted - row.input_tokens
        added = more if added is None else added
        if more != added or not 0 <= more <= MOST_ADDED:
            raise InputError(
                f"{folder}: request {row.id} has {counted:,} prompt tokens, in the trace it has "
                f"{row.input_tokens:,}; --trace must be the replayed trace, and the server must "
                "count tokens as it does (a chat template may add the same number to each)"
            )


def predict(
    measured: Sequence[Timed], config: EngineConfig, constants: Calibration | None = None
) -> tuple[Timed, ...]:
    """Predict the times of `measured` from their arrivals and sizes alone.

    Args:
        constants: replace those that `config` names.
    """
    core = new_core(config)
    if constants is not None:
        core.timing = StepTimeModel(
            config.rank_spec, core.gpu, constants, async_scheduling=config.asynchronous
        )
    hashed = PromptHashes([one.row for one in measured], core.limits.block_size)
    requests = [
        EngineRequest(
            one.row.id,
            one.row.input_tokens,
            one.row.output_tokens,
            hashed.of(one.row),
            arrival_s=one.sent_s,
        )
        for one in measured
    ]
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
        done = [one for one in of if one.finished]
        return [one.ttft_s for one in done] + [one.tpot_s for one in done if one.tpot_s]

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
        mine, models = _sorted_times(measured, name), _sorted_times(predicted, name)
        for quantile in QUANTILES if mine else ():
            at = max(0, -int(-quantile * len(mine) // 1) - 1)
            lines.append(
                FitLine(name, quantile, len(mine), mine[at], models[at], models[at] / mine[at] - 1)
            )
    return tuple(lines)


def _sorted_times(of: Sequence[Timed], name: str) -> list[float]:
    return sorted(v for one in of if one.finished and (v := getattr(one, f"{name}_s")))


def hit_ratio(of: Sequence[Timed]) -> float:
    """Return the share of prompt tokens that were cached."""
    done = [one for one in of if one.finished]
    return sum(one.cached_tokens for one in done) / sum(one.row.input_tokens for one in done)
