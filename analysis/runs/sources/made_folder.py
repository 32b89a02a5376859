"""Write a run that was read from a file to a run folder, so that it can be merged."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np

from forebay.analysis.runs.run import NUMBERS, WORDS, RunData
from forebay.replay.plan.slo import parse_slos
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.row import Row, log_row
from forebay.replay.results.summary import RunTotals
from forebay.traces.ground.hlog import HlogWriter, IntervalLog

WHOLE = ("input_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "status")


def write_folder(run: RunData, folder: Path) -> None:
    """Write rows, histograms, run.json and summary.json of `run`. Raises InputError."""
    started = float(run.info.get("started_unix_s") or 0.0)
    texts = [str(slo) for slo in run.summary.get("slos") or ()]
    names = [text.rpartition(".")[0] for text in texts]
    slos = parse_slos(",".join(texts), names) if texts else ()
    with RunFolder(folder) as output:
        log = IntervalLog(HlogWriter(output.hlog, started, [f"read from {run.path.name}"]))
        totals = RunTotals(run.buckets(), slos)
        for row in _rows(run):
            output.table.add(row)
            totals.add(row)
            log_row(log, row)
        asyncio.run(output.table.write_rows())
        end_s = run.number("duration_s") or 0.0
        log.close(end_s)
        window_s = run.number("window_s") or end_s
        summary = totals.summary(log.totals, window_s, closed=False, scale=1.0)
        judgement = {key: run.summary.get(key) for key in ("verdict", "verdict_reason", "warnings")}
        output.commit(dict(run.info), {**summary, **judgement, "ended": "complete"})


def _rows(run: RunData) -> list[Row]:
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
