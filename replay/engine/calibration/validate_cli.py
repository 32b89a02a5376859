"""`forebay engine validate`: play a replay on the simulated engine, and print how true that is."""

import json
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.traces.command_line.options import takes_options
from forebay.traces.errors import InputError

HELP = """Compare the simulated engine with a real run.

RUN is a folder of `forebay replay` against one server. Its requests are played through the
simulated engine in virtual time, with the arrivals and lengths of the run. Printed are measured
and simulated times, and the share of prompt tokens that were cached. Several runs of one trace
count by their medians. vLLM's flags are those of RUN's server. A run may be shorter than its trace.
A request that failed is played, and its times are not compared.

Example:  forebay engine validate runs/a --model llama-3-8b --gpu h200 --within 0.2
"""


@takes_options
def validate_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    model: Annotated[str, typer.Option(help="Model of the server: a name or a config.json.")],
    gpu: Annotated[str, typer.Option(help="GPU of the server: a name, or a JSON file.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="The trace that RUN replayed.  [default: as RUN's run.json names it]"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Step-time constants, as `calibrate -o` writes them.  [default: those shipped]"
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with status 1 if a time is off by more than this share."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
    *,
    flags: EngineFlags,
) -> None:
    from dataclasses import asdict

    from forebay.replay.engine.calibration.fit_run import compared, hit_ratio, predict, read_runs
    from forebay.replay.engine.calibration.fit_run_cli import comparison_table
    from forebay.replay.engine.calibration.output import print_json
    from forebay.traces.formats import open_trace

    config = EngineConfig(model, gpu, calibration=calibration, **flags.values())
    measured = read_runs(runs, list(open_trace(trace or _trace_of(runs[0]))))
    simulated = predict(measured, config)
    lines = compared(measured, simulated)
    hits = {"measured": hit_ratio(measured), "simulated": hit_ratio(simulated)}
    worst = max(lines, key=lambda line: abs(line.error))
    if as_json:
        print_json({"lines": [asdict(line) for line in lines], "hit_ratio": hits})
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(comparison_table("measured run", measured, simulated))
        console.print(
            f"Prompt tokens cached: measured {hits['measured']:.1%}, "
            f"simulated {hits['simulated']:.1%}.\n"
            f"Furthest off: {worst.measure} p{worst.quantile * 100:g} by {worst.error:+.1%}.",
        )
        if failed := sum(not one.finished for one in measured):
            console.print(f"{failed} failed requests were played and are not compared.")
    if within is not None and abs(worst.error) > within:
        raise typer.Exit(1)


def _trace_of(run: Path) -> Path:
    """Return the trace that a run says it replayed; raises InputError."""
    path = run / "run.json"
    if not path.is_file():
        raise InputError(f"{run}: no such run; give a folder that `forebay replay --out` wrote")
    try:
        found = Path(json.loads(path.read_text(encoding="utf-8"))["trace"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path}: names no trace; give it as --trace") from None
    if not found.is_file():
        raise InputError(f"{path}: its trace {found} is not there; give it as --trace")
    return found
