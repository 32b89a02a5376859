"""The command `forebay kv`: parse, call, print."""

from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from forebay.analysis.kv.plan import (
    Choices,
    check_fits,
    choose_gpu,
    choose_model,
    make_plan,
    parse_lengths,
)
from forebay.replay.engine.placement import check_block_size
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import AsJson, given_options, takes_options
from forebay.traces.ground.errors import InputError

HELP = """KV-cache arithmetic: how many tokens of cache fit beside a model on a GPU, how many
requests of a length they hold, and the longest request. Option names and defaults are those of
`vllm serve`.

Example:

  forebay kv --model llama-3-8b --gpu h200 --lengths 8192,32768,131072

  forebay kv --model ./config.json --gpu a100 --tp 2 --kv-cache-dtype fp8

  forebay kv verify vllm.log --gpu h100
"""
VERIFY_HELP = """Compare the computed KV cache with that of a real vLLM, from its start-up log or
/metrics. Flags, model and GPU memory come from the log where it has them; options take precedence.
Exit status 1: the difference exceeds --tolerance.

Example:

  forebay kv verify vllm.log --gpu h100

  forebay kv verify --metrics http://127.0.0.1:8000/metrics --model llama-3-8b --gpu h200
"""

app = new_app(help=HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The model and the GPU (InputError: weights that are no positive number)."""

    model: Annotated[
        str | None,
        typer.Option(help="A name such as Qwen3-8B (a wrong one lists all) or a config.json."),
    ] = None
    gpu: Annotated[
        str | None, typer.Option(help="h200, h100, a100, b200, l40s, rtx-4090 and more")
    ] = None
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="GPU memory as the CUDA runtime reports it; for any GPU.")
    ] = None
    weights_gib: Annotated[
        float | None, typer.Option(help="GiB of all weights, if known better than computed.")
    ] = None

    def __post_init__(self) -> None:
        if self.weights_gib is not None and not 0 < self.weights_gib < inf:
            raise InputError(f"--weights-gib {self.weights_gib}: give GiB, more than 0")


@app.callback(invoke_without_command=True)
@takes_options
def kv(
    context: typer.Context,
    hardware: Hardware,
    choices: Choices,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of a request; default: 8192,32768,131072.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from forebay.analysis.kv.table import as_json as plan_as_json
    from forebay.analysis.kv.table import print_plan

    check_block_size(choices.block_size)
    if hardware.model is None:
        raise InputError("--model: give a name such as llama-3-8b, or a config.json")
    shape = choose_model(
        hardware.model,
        hardware.weights_gib,
        quantization=choices.quantization,
        vllm_version=choices.vllm_version,
    )
    gpu = choose_gpu(hardware.gpu, hardware.gpu_memory_gib)
    plan = make_plan(shape, gpu, choices)
    parsed_lengths = parse_lengths(lengths, plan.max_model_len)
    check_fits(plan, choices.max_model_len)
    if as_json:
        print_json(plan_as_json(plan, parsed_lengths))
        return
    from rich.console import Console

    print_plan(plan, parsed_lengths, Console(highlight=False))


@app.command(help=VERIFY_HELP)
@takes_options
def verify(
    context: typer.Context,
    hardware: Hardware,
    choices: Choices,
    log: Annotated[
        Path | None, typer.Argument(metavar="LOG", help="Start-up log, or a saved /metrics page.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="URL of a server's /metrics.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest accepted difference in per cent.")
    ] = 6.0,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.kv.verify import read_source, verify_log

    check_block_size(choices.block_size)
    typed = given_options(context, choices)
    text, where = read_source(log, metrics)
    check = verify_log(text, where, typed, **asdict(hardware))
    near = check.within(tolerance / 100)
    if as_json:
        print_json({**check.as_json(), "tolerance": tolerance / 100, "within": near})
    else:
        from rich.console import Console

        from forebay.analysis.kv.table import print_check

        print_check(check, tolerance, near, Console(highlight=False))
    if not near:
        raise typer.Exit(1)
