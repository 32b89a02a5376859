"""The word `forebay kv`: parse, call, print."""

import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.kv.verify import CacheCheck

HELP = """How many tokens of KV cache fit beside a model on a GPU, how many requests of a length
that is, and where memory ends. Option names and defaults are those of `vllm serve`.

Example:

  forebay kv --model llama-3-8b --gpu h200 --length 8192,32768,131072

  forebay kv --model ./config.json --gpu a100 --tp 2 --kv-cache-dtype fp8

  forebay kv verify vllm.log --gpu h100
"""
VERIFY_HELP = """Compare the cache a real vLLM made, by its start-up log or its /metrics, with the
arithmetic. Flags, model and GPU memory are taken from the log where it tells them; options win.
Exit status 1: further off than --tolerance.

Example:

  forebay kv verify vllm.log --gpu h100

  forebay kv verify --metrics http://127.0.0.1:8000/metrics --model llama-3-8b --gpu h200
"""

app = new_app(help=HELP)

ModelName = Annotated[
    str | None, typer.Option(help="llama-3-8b, phi-3-mini, qwen2.5-14b, or a config.json.")
]
GpuName = Annotated[str | None, typer.Option(help="h200, h100, a100, b200, l40s, rtx-4090 ...")]
Memory = Annotated[
    float | None, typer.Option(help="Memory as the CUDA runtime reports it; any GPU.")
]
Weights = Annotated[float | None, typer.Option(help="All weights, GiB, where better known.")]
Parallel = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallelism, GPUs.")]
Dtype = Annotated[str | None, typer.Option(help="auto (16 bits) or fp8.")]
Utilization = Annotated[float | None, typer.Option(help="Share of GPU memory.  [default: 0.9]")]
Batched = Annotated[
    int | None, typer.Option(min=1, help="Token budget of a step.  [default: vLLM's for the GPU]")
]
Sequences = Annotated[
    int | None, typer.Option(min=1, help="Requests in a step.  [default: vLLM's for the GPU]")
]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a block.  [default: 16]")]
MaxLen = Annotated[int | None, typer.Option(min=1, help="Context.  [default: the model's]")]
Draft = Annotated[int | None, typer.Option(min=0, help="KV layers of a draft head (EAGLE: 1).")]
Padded = Annotated[bool, typer.Option("--pad-latent", help="MLA rows padded as vLLM 0.7 does.")]
NonTorch = Annotated[float | None, typer.Option(help="GiB outside torch, where known.")]
Graphs = Annotated[float | None, typer.Option(help="GiB that vLLM sets aside for CUDA graphs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


@app.callback(invoke_without_command=True)
def kv(
    context: typer.Context,
    model: ModelName = None,
    gpu: GpuName = None,
    gpu_memory_gib: Memory = None,
    weights_gib: Weights = None,
    tp: Parallel = None,
    kv_cache_dtype: Dtype = None,
    gpu_memory_utilization: Utilization = None,
    max_num_batched_tokens: Batched = None,
    max_num_seqs: Sequences = None,
    block_size: BlockSize = None,
    max_model_len: MaxLen = None,
    length: Annotated[
        str | None, typer.Option(help="Tokens of a request.  [default: 8192,32768,131072]")
    ] = None,
    draft_layers: Draft = None,
    pad_latent: Padded = False,
    non_torch_gib: NonTorch = None,
    cuda_graph_gib: Graphs = None,
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from forebay.analysis.kv import plan as planning
    from forebay.analysis.kv.table import as_json as plan_as_json
    from forebay.analysis.kv.table import print_plan

    if model is None:
        raise InputError("--model: give a name such as llama-3-8b, or a config.json")
    chosen = _given(
        tp=tp,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_model_len=max_model_len,
        draft_layers=draft_layers,
        pad_latent=pad_latent or None,
        non_torch_gib=non_torch_gib,
        cuda_graph_gib=cuda_graph_gib,
    )
    shape = planning.choose_model(model, _positive("--weights-gib", weights_gib))
    made = planning.make_plan(
        shape, planning.choose_gpu(gpu, gpu_memory_gib), planning.Choices(**chosen)
    )
    lengths = planning.parse_lengths(length, made.max_model_len)
    planning.check_fits(made, max_model_len)
    if as_json:
        _print_json(plan_as_json(made, lengths))
        return
    from rich.console import Console

    print_plan(made, lengths, Console(highlight=False))


@app.command(help=VERIFY_HELP)
def verify(
    log: Annotated[
        Path | None, typer.Argument(metavar="LOG", help="Start-up log, or a /metrics page.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="URL of a server's /metrics.")] = None,
    model: ModelName = None,
    gpu: GpuName = None,
    gpu_memory_gib: Memory = None,
    weights_gib: Weights = None,
    tp: Parallel = None,
    kv_cache_dtype: Dtype = None,
    gpu_memory_utilization: Utilization = None,
    max_num_batched_tokens: Batched = None,
    max_num_seqs: Sequences = None,
    block_size: BlockSize = None,
    max_model_len: MaxLen = None,
    draft_layers: Draft = None,
    pad_latent: Padded = False,
    non_torch_gib: NonTorch = None,
    cuda_graph_gib: Graphs = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Per cent that is near enough.")] = 6.0,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.kv.verify import read_source, verify_log

    text, where = read_source(log, metrics)
    verdict = verify_log(
        text,
        where,
        _given(
            tp=tp,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_model_len=max_model_len,
            draft_layers=draft_layers,
            pad_latent=pad_latent or None,
            non_torch_gib=non_torch_gib,
            cuda_graph_gib=cuda_graph_gib,
        ),
        model=model,
        weights_gib=_positive("--weights-gib", weights_gib),
        gpu=gpu,
        gpu_memory_gib=gpu_memory_gib,
    )
    near = verdict.within(tolerance / 100)
    if as_json:
        _print_json({**verdict.as_json(), "tolerance": tolerance / 100, "within": near})
    else:
        _print_verdict(verdict, tolerance, near)
    if not near:
        raise typer.Exit(1)


def _print_verdict(verdict: "CacheCheck", tolerance: float, near: bool) -> None:
    from rich.console import Console

    from forebay.analysis.kv.verify_table import print_verdict

    print_verdict(verdict, tolerance, near, Console(highlight=False))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _positive(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < inf:
        raise InputError(f"{flag} {value}: give GiB, more than 0")
    return value


def _print_json(data: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
