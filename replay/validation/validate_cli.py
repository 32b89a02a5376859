"""`forebay engine validate`: play a replay on the simulated engine, and print how true that is."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.traces.command_line.messages import print_json
from forebay.traces.command_line.options import AsJson, takes_options

HELP = """Compare the simulated engine with a real run.

RUN is a folder of `forebay replay` against one server. Its requests are played through the
simulated engine in virtual time. Several runs of one trace count by their medians. vLLM's flags
describe the server.

RESULTS is the JSON of `vllm bench serve --save-detailed`, or CSV or JSON lines with sent_s,
input_tokens, output_tokens, ttft_s and e2e_s (or _ms). Without --trace no two prompts share
anything.

Example:  forebay engine validate runs/a --model llama-3-8b --gpu h200 --within 0.2
"""


@takes_options
def validate_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|RESULTS...", help="Run folders of one trace, or a file."),
    ],
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
    as_json: AsJson = False,
    *,
    flags: EngineFlags,
) -> None:
    from dataclasses import asdict

    from forebay.replay.validation.fit_run import compared, hit_ratio, predict
    from forebay.replay.validation.fit_run_cli import (
        check_model,
        comparison_table,
        hits_text,
    )
    from forebay.replay.validation.measured import read_measured

    # Simulate the measured requests.
    config = EngineConfig(model, gpu, calibration=calibration, **flags.values())
    measured = read_measured(runs, trace)
    check_model(runs, config)
    simulated = predict(measured, config)
    # Compare measured and simulated times, and judge the time that is furthest off.
    lines = compared(measured, simulated)
    hits = {"measured": hit_ratio(measured), "simulated": hit_ratio(simulated)}
    worst = max(lines, key=lambda line: abs(line.error))
    if as_json:
        print_json({"lines": [asdict(line) for line in lines], "hit_ratio": hits})
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(comparison_table("measured run", lines))
        console.print(
            f"{hits_text(measured, simulated)}\nFurthest off: {worst.name} by {worst.error:+.1%}.",
        )
        if failed := sum(not request.finished for request in measured):
            console.print(f"{failed} failed requests were played and are not compared.")
    if within is not None and abs(worst.error) > within:
        raise typer.Exit(1)
