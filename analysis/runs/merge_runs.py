"""Merge run folders into one, exactly: rows are joined and histograms added up.

Runs that were sent at the same time, from several machines, stay in parallel, so their rates add
up. Runs that were sent in turn, such as seeds, are put end to end, so their rates are averaged.
Everything but seed, salt and schedule must agree.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import orjson

from forebay.analysis.runs.load import load_run, load_runs
from forebay.analysis.runs.provenance import LATENCY_TARGETS, MUST_AGREE, PLACES, WARM
from forebay.analysis.runs.run import NUMBERS, WORDS, RunData, at_path
from forebay.replay.results.folder import ANSWERS, HLOG, SUMMARY, TABLE, RunFolder
from forebay.replay.results.merge import merge_parts
from forebay.replay.results.recorder import interval_s
from forebay.replay.results.row import Row, log_row
from forebay.replay.results.summary import RunTotals
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import HlogWriter, IntervalLog

MAY_DIFFER = ("seed", WARM)
AGREE = (*(label for label in MUST_AGREE if label not in MAY_DIFFER), "targets")
SIMULATED = ("gpus", "gpu_mix", "policy", "engine", "proxy", "load")  # keys of a simulation's
TOGETHER = 0.05  # share of the shorter run: nearer starts count as equal
WHOLE = ("input_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "status")
ENDS = ("interrupted", "drain timeout", "complete")  # the worst first


@dataclass(frozen=True, slots=True)
class MergedRuns:
    """The merged run. `at_once`: its parts were sent at the same time."""

    summary: Mapping[str, Any]
    at_once: bool


def merge_runs(paths: Sequence[Path], out: Path, *, force: bool = False) -> MergedRuns:
    """Write the merged folder. Raises InputError if the runs do not belong together."""
    runs = load_runs(paths)
    if all(run.path.is_dir() for run in runs):
        return _merge(runs, out, force=force)
    try:
        files = TemporaryDirectory()
    except OSError as fault:
        raise InputError(f"no room for temporary files ({fault}); set TMPDIR") from None
    with files as scratch:
        return _merge(_as_folders(runs, Path(scratch)), out, force=force)


def _as_folders(runs: Sequence[RunData], scratch: Path) -> list[RunData]:
    """Write the runs that were read from files to folders under `scratch`."""
    folders = []
    for number, run in enumerate(runs):
        if run.path.is_dir():
            folders.append(run)
            continue
        folder = scratch / str(number)
        _write_folder(replace(run, info={**run.info, "run_id": _id(run)}), folder)
        folders.append(load_run(folder, run.name))
    return folders


def _write_folder(run: RunData, folder: Path) -> None:
    """Write rows, histograms, run.json and summary.json of `run`. Raises InputError."""
    started = float(run.info.get("started_unix_s") or 0.0)
    with RunFolder(folder) as output:
        log = IntervalLog(HlogWriter(output.hlog, started, [f"read from {run.path.name}"]))
        totals = RunTotals(run.buckets(), run.slos())
        for row in _made_rows(run):
            output.table.add(row)
            totals.add(row)
            log_row(log, row)
        asyncio.run(output.table.write_rows())
        end_s = run.number("duration_s") or 0.0
        log.close(end_s)
        summary = totals.summary(log.totals, run.window_s(), closed=False, scale=1.0)
        judgement = {key: run.summary.get(key) for key in ("verdict", "verdict_reason", "warnings")}
        output.commit(dict(run.info), {**summary, **judgement, "ended": "complete"})


def _made_rows(run: RunData) -> list[Row]:
    columns: dict[str, list[Any]] = {
        key: [_plain(key, value) for value in run.numbers[key].tolist()] for key in NUMBERS
    }
    columns |= {key: [word or None for word in run.words[key].tolist()] for key in WORDS}
    columns["id"] = [word or str(number) for number, word in enumerate(columns["id"])]
    columns["input_tokens"] = [value or 0 for value in columns["input_tokens"]]
    ends = run.numbers["intended_s"] + np.nan_to_num(run.numbers["e2e_response_s"])
    columns["done_s"] = ends.tolist()
    unset = dict.fromkeys(Row.__slots__)
    return [
        Row(**{**unset, **dict(zip(columns, values, strict=True))})
        for values in zip(*columns.values(), strict=True)
    ]


def _plain(key: str, value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if key in WHOLE else value


def _merge(runs: Sequence[RunData], out: Path, *, force: bool) -> MergedRuns:
    _check(runs)
    at_once = _at_once(runs)
    scale = _number(runs[0].info, "time_scale", 1.0)
    # Parts sent together keep their times. Parts sent in turn are put end to end.
    starts_s = _starts(runs, at_once, interval_s(scale))
    totals = RunTotals(_each(runs, "requests_by_bucket"), runs[0].slos())
    ends = {str(run.summary.get("ended", "complete")) for run in runs}
    ended = next((end for end in ENDS if end in ends), "complete")
    answers = all((run.path / ANSWERS).is_file() for run in runs)
    with RunFolder(out, force=force, answers=answers) as folder:
        comments = [f"forebay runs merge: {', '.join(run.name for run in runs)}"]
        started = min(_number(run.info, "started_unix_s", 0.0) for run in runs)
        measured = asyncio.run(
            merge_parts(
                [run.path for run in runs], ended, started, interval_s(scale), folder, totals,
                comments, starts_s,
            )
        )  # fmt: skip
        # Rates of parts sent together add up, so their windows do not.
        closed = str(runs[0].info.get("arrivals")).startswith("closed")
        windows = [run.window_s() for run in runs]
        window_s = max(windows) if at_once else math.fsum(windows)
        summary = totals.summary(
            measured.histograms, window_s, closed=closed, scale=scale, ended=ended
        )
        summary["ended"] = ended
        summary["warnings"] = _each(runs, "warnings")
        folder.commit(_record(runs, ended, at_once), summary)
    return MergedRuns(summary, at_once)


def _each(runs: Sequence[RunData], key: str) -> list[str]:
    """Return the different texts that the runs list under a key of their summaries."""
    return list(dict.fromkeys(str(text) for run in runs for text in run.summary.get(key) or ()))


def _check(runs: Sequence[RunData]) -> None:
    """Raise InputError unless the runs differ and have one target and one load."""
    if len(runs) < 2:
        raise InputError("give two or more run folders")
    first = runs[0]
    ids: dict[str, RunData] = {}
    for run in runs:
        if not (run.path.is_dir() and (run.path / HLOG).is_file()):
            raise InputError(f"{run.path}: no run folder of `forebay replay`; it has no {HLOG}")
        if run.number("window_s") is None:
            raise InputError(f"{run.path / SUMMARY}: has no window_s; repeat the run")
        _check_columns(run.path / TABLE)
        identity = _id(run)
        if identity in ids:
            raise InputError(f"{run.name}: the same run as {ids[identity].name}; give each once")
        ids[identity] = run
        for label in (*AGREE, *SIMULATED):
            here, there = _setting(run, label), _setting(first, label)
            if here != there:
                raise InputError(
                    f"{run.name}: {label} differs from {first.name}: {_shown(here)} and "
                    f"{_shown(there)}; merge only runs of one target and one load"
                )


def _id(run: RunData) -> str:
    """Return the values that tell runs apart. Simulations of one seed are equal."""
    name = str(run.info.get("run_id") or run.path.resolve())
    return f"{name}-{run.info.get('seed')}" if name == "simulated" else name


def _check_columns(file: Path) -> None:
    import pyarrow.parquet

    reader: Any = pyarrow.parquet.ParquetFile(file)
    with reader:
        if reader.schema_arrow.names != list(Row.__slots__):
            raise InputError(f"{file}: its columns are those of another version; repeat the run")


def _setting(run: RunData, label: str) -> object:
    if label in SIMULATED:
        return run.info.get(label)
    tree = run.summary if label == LATENCY_TARGETS else run.info
    value = at_path(tree, PLACES[label])
    return value / _senders(run) if label == "rate" and isinstance(value, int | float) else value


def _senders(run: RunData) -> int:
    """Return the number of machines that sent the run at once, each at the same rate."""
    return int(cast(int, at_path(run.info, ("merged", "senders")) or 1))


def _shown(value: object) -> str:
    """Return a setting as a few words."""
    if isinstance(value, dict):
        return "other settings"
    if isinstance(value, list):
        return ", ".join(str(at_path(item, ("url",)) or item) for item in value)
    return str(value)


def _at_once(runs: Sequence[RunData]) -> bool:
    """True if the runs were sent at once, not one after the other.

    Raises InputError if they overlap only in part: then no rate would be right.
    """
    # The start of each run and its length, in wall seconds.
    spans = sorted(
        (
            _number(run.info, "started_unix_s", 0.0),
            run.window_s() / _number(run.info, "time_scale", 1.0),
            run.name,
        )
        for run in runs
    )
    if all(start == 0.0 for start, _, _ in spans):  # simulations have no wall-clock start
        return False
    shortest_s = min(length for _, length, _ in spans)
    if spans[-1][0] - spans[0][0] <= TOGETHER * shortest_s:
        return True
    for (start, length, name), (later, _, other) in pairwise(spans):
        if start + length > later:
            raise InputError(
                f"{name} and {other} overlap in part: merge runs that were sent at once, or one "
                "after the other"
            )
    return False


def _starts(runs: Sequence[RunData], at_once: bool, interval: float) -> list[float]:
    """Return the second of the merged run at which each begins, at a line of the log."""
    starts, end_s = [], 0.0
    for run in runs:
        starts.append(0.0 if at_once else end_s)
        length_s = max(run.number("window_s") or 0.0, run.number("duration_s") or 0.0)
        end_s += interval * math.ceil(length_s / interval + 1)
    return starts


def _record(runs: Sequence[RunData], ended: str, at_once: bool) -> dict[str, Any]:
    """Return run.json: the first run's, and the differences between them."""
    info = dict(runs[0].info)
    senders = sum(map(_senders, runs)) if at_once else _senders(runs[0])
    rate = _setting(runs[0], "rate")
    if isinstance(rate, int | float):
        info["rate_per_s"] = rate * senders
    seeds = {run.info.get("seed") for run in runs}
    info.update(
        run_id="+".join(_id(run) for run in runs),
        ended=ended,
        seed=info.get("seed") if len(seeds) == 1 else None,
        merged={
            "at_once": at_once,
            "senders": senders,
            "runs": [part for run in runs for part in _parts(run)],
        },
    )
    return dict(orjson.loads(orjson.dumps(info)))


def _parts(run: RunData) -> list[Mapping[str, Any]]:
    """Describe the run, or the runs that it was merged from."""
    merged = at_path(run.info, ("merged", "runs"))
    if isinstance(merged, list):
        return merged
    return [
        {
            "name": run.name,
            **{key: run.info.get(key) for key in ("run_id", "started_at", "seed", "salt")},
            "schedule_sha256": at_path(run.info, ("schedule", "sha256")),
        }
    ]


def _number(info: Mapping[str, Any], key: str, default: float) -> float:
    value = info.get(key)
    return float(value) if isinstance(value, int | float) and value else default
