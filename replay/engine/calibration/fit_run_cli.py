"""`forebay engine calibrate RUN --trace TRACE`: fit whole replays and print how near they come."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.calibration.calibrate_cli import constants_table, write_calibration
from forebay.replay.engine.calibration.constants import read_calibration
from forebay.replay.engine.calibration.fit_run import (
    RunFit,
    compared,
    fit_run,
    hit_ratio,
    read_runs,
)
from forebay.replay.engine.config import EngineConfig
from forebay.traces.formats import open_trace


def calibrate_runs(
    runs: Sequence[Path],
    trace: Path,
    config: EngineConfig,
    prior: Path | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Fit, print, write; raises InputError for runs that are not of the trace."""
    rows = list(open_trace(trace))
    measured = read_runs(runs, rows)
    names = ", ".join(run.name for run in runs)
    done = fit_run(
        measured,
        config,
        read_calibration(prior).constants if prior else kernel_table(),
        used=f"all {len(measured)} requests of {trace.name} as replayed in {names}"
        + (" (medians)" if len(runs) > 1 else ""),
        today=datetime.now(UTC).date(),
    )
    if as_json:
        import orjson

        data = {
            **done.file.as_json(),
            "relative_errors": done.fit.relative_errors,
            "at_bound": list(done.fit.at_bound),
            "kept_from_prior": done.fit.unresolved,
            "hit_ratio": {
                "measured": hit_ratio(done.measured),
                "model": hit_ratio(done.predicted),
            },
        }
        sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print(done)
    if out is not None:
        write_calibration(done.file, out)


def _print(done: RunFit) -> None:
    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.file.source}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("fitted trace", "requests", "measured", "model", "error"):
        table.add_column(heading, justify="left" if heading == "fitted trace" else "right")
    for line in compared(done.measured, done.predicted):
        table.add_row(
            f"{line.measure} p{line.quantile * 100:g}",
            str(line.requests),
            f"{line.measured_s:#.4g} s",
            f"{line.model_s:#.4g} s",
            f"{line.error:+.1%}",
        )
    console.print(table)
    console.print(constants_table(done.file.constants, done.prior, done.fit))
    console.print(
        Text(
            f"Prefix hits: measured {hit_ratio(done.measured):.4f}, "
            f"model {hit_ratio(done.predicted):.4f}. {done.file.checked}."
        )
    )
