"""`forebay engine calibrate RUN --trace TRACE`: fit whole replays and print the errors left."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.calibration.fit_run import (
    RunFit,
    Timed,
    compared,
    fit_run,
    hit_ratio,
    read_runs,
)
from forebay.replay.engine.calibration.output import (
    constants_table,
    fit_data,
    new_table,
    print_json,
    write_calibration,
)
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import read_calibration
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
    """Fit, print, write; raises InputError for runs of another trace."""
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
        ratios = {"measured": hit_ratio(done.measured), "model": hit_ratio(done.predicted)}
        print_json({**fit_data(done.file, done.fit), "hit_ratio": ratios})
    else:
        _print(done)
    if out is not None:
        write_calibration(done.file, out)


def comparison_table(title: str, measured: Sequence[Timed], predicted: Sequence[Timed]) -> Table:
    """Return a table of measured and predicted quantiles."""
    numbers = ("requests", "measured", "model", "error")
    table = new_table(title, *numbers, right=numbers)
    for line in compared(measured, predicted):
        table.add_row(
            f"{line.measure} p{line.quantile * 100:g}",
            str(line.requests),
            f"{line.measured_s:#.4g} s",
            f"{line.model_s:#.4g} s",
            f"{line.error:+.1%}",
        )
    return table


def _print(done: RunFit) -> None:
    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.file.source}"))
    console.print(comparison_table("fitted trace", done.measured, done.predicted))
    console.print(constants_table(done.file.constants, done.prior, done.fit))
    console.print(
        Text(
            f"Prefix hits: measured {hit_ratio(done.measured):.4f}, "
            f"model {hit_ratio(done.predicted):.4f}. {done.file.checked}."
        )
    )
