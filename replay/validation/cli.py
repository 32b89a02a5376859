"""`forebay engine`: a simulated server, and its subcommand `fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.server.cli import app
from forebay.traces.ground.command_line.options import AsJson, Force, takes_options

__all__ = ["app"]

HELP = """Fit the step-time constants of a model on a GPU to measurements, and compare them.

POINTS is a CSV or JSON lines file with the columns kind (ttft, itl, tpot, stall, offline),
prompt_tokens and seconds. Optional columns are cached_tokens, batch_size, output_tokens,
max_num_batched_tokens, held_out and note.

RUN is a folder of `forebay replay` against one server. The simulated engine plays its requests in
virtual time. Several runs of one trace count by their medians.

LOG is the capture of `forebay proxy`: an hour of ordinary traffic, or at least 200 streamed
answers. Its usage ledger, or its log in JSON, will do: prompts are then guessed from what the
servers had cached. Constants that the traffic cannot know keep their values, and the reason is
printed.

TABLES is the folder aiconfigurator_core of NVIDIA's op tables: the kernels of a dense model in 16
bits, without the CPU and the API server.

RESULTS is a file of another load test, as of `vllm bench serve --save-detailed` or guidellm, or
CSV or JSON lines with sent_s, input_tokens, output_tokens, ttft_s and e2e_s (or _ms). Without
--trace no two prompts share anything.

vLLM's flags describe the server of RUN, LOG or RESULTS. A fit that no GPU can reach is printed and
rejected. With --hold-out 1 nothing is fitted: how true are the constants that the engine has?

Example:  forebay engine fit points.csv --model phi-3-mini --gpu h200-nvl -o cal.json

Example:  forebay engine fit runs/a runs/b --model config.json --gpu gpu.json -o cal.json

Example:  forebay engine fit traffic.jsonl --model llama-3-8b --gpu l40s

Example:  forebay engine fit runs/c --hold-out 1 --within 0.2 --model llama-3-8b --gpu h200
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The options of `forebay engine fit` in addition to vLLM's flags."""

    model: Annotated[str, typer.Option(help="Measured model: a name or a config.json.")]
    gpu: Annotated[
        str,
        typer.Option(
            help="Measured GPU: a name, or a JSON file of name, peak_flops, bandwidth (bytes/s), "
            "memory_gib, multiprocessors."
        ),
    ]
    trace: Annotated[
        Path | None,
        typer.Option(
            help="The trace that the requests are of.  [default: as RUN's run.json names it]"
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Constants to begin with, kept where none is fitted.  [default: those shipped; "
            "for POINTS an H200's]"
        ),
    ] = None
    hold_out: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the last requests or points to compare and not to fit."
        ),
    ] = 0.0
    within: Annotated[
        float | None,
        typer.Option(
            min=0, help="Exit with status 1 if a compared time is off by more than this share."
        ),
    ] = None
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None
    force: Force = False
    as_json: AsJson = False


@app.command("fit", help=HELP)
@takes_options
def fit_command(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="POINTS|LOG|TABLES|RESULTS|RUN...",
            help="A file, tables, or run folders of a trace.",
        ),
    ],
    options: FitOptions,
    flags: EngineFlags,
) -> None:
    from forebay.replay.validation.fitting import fit_sources  # the server starts without it

    if not fit_sources(sources, options, flags):
        raise typer.Exit(1)
