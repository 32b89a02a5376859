"""The command `forebay kv`: parse, call, print."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.analysis.kv.options import KvArguments
from forebay.proxy.command import new_app
from forebay.replay.engine.vllm_versions import NEWEST
from forebay.traces.command_line.messages import print_json
from forebay.traces.command_line.options import AsJson, takes_options
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.kv.verify import CacheCheck

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


@app.callback(invoke_without_command=True)
@takes_options
def kv(
    context: typer.Context,
    arguments: KvArguments,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of a request; default: 8192,32768,131072.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from forebay.analysis.kv import plan as planning
    from forebay.analysis.kv.table import as_json as plan_as_json
    from forebay.analysis.kv.table import print_plan

    if arguments.model is None:
        raise InputError("--model: give a name such as llama-3-8b, or a config.json")
    shape = planning.choose_model(
        arguments.model,
        arguments.checked_weights_gib(),
        quantization=arguments.quantization,
        vllm_version=arguments.vllm_version or NEWEST,
    )
    gpu = planning.choose_gpu(arguments.gpu, arguments.gpu_memory_gib)
    plan = planning.make_plan(shape, gpu, planning.Choices(**arguments.choices()))
    parsed_lengths = planning.parse_lengths(lengths, plan.max_model_len)
    planning.check_fits(plan, arguments.max_model_len)
    if as_json:
        print_json(plan_as_json(plan, parsed_lengths))
        return
    from rich.console import Console

    print_plan(plan, parsed_lengths, Console(highlight=False))


@app.command(help=VERIFY_HELP)
@takes_options
def verify(
    arguments: KvArguments,
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

    choices = arguments.choices()
    text, where = read_source(log, metrics)
    check = verify_log(
        text,
        where,
        choices,
        model=arguments.model,
        weights_gib=arguments.checked_weights_gib(),
        gpu=arguments.gpu,
        gpu_memory_gib=arguments.gpu_memory_gib,
    )
    near = check.within(tolerance / 100)
    if as_json:
        print_json({**check.as_json(), "tolerance": tolerance / 100, "within": near})
    else:
        _print_check(check, tolerance, near)
    if not near:
        raise typer.Exit(1)


def _print_check(check: "CacheCheck", tolerance: float, near: bool) -> None:
    from rich.console import Console

    from forebay.analysis.kv.verify_table import print_check

    print_check(check, tolerance, near, Console(highlight=False))
