"""The options that `forebay kv` and `forebay kv verify` share."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

import typer

from forebay.replay.engine.flags import PlacementFlags
from forebay.replay.engine.placement import check_block_size
from forebay.replay.engine.vllm_versions import NEWEST
from forebay.traces.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvArguments(PlacementFlags):
    """Model, GPU and engine flags as typed. None takes the log's value or vLLM's default."""

    model: Annotated[
        str | None, typer.Option(help="llama-3-8b, phi-3-mini, qwen2.5-14b, or a config.json.")
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
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of GPU memory that vLLM uses; default: 0.9.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Token budget of a step; default: vLLM's for the GPU."),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests in a step; default: vLLM's for the GPU.")
    ] = None
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block; default: 16.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context, tokens; default: the model's.")
    ] = None
    draft_layers: Annotated[
        int | None, typer.Option(min=0, help="KV layers of a draft head (EAGLE: 1).")
    ] = None
    pad_latent: Annotated[
        bool, typer.Option("--pad-latent", help="Pad MLA rows as vLLM 0.7 does.")
    ] = False
    non_torch_gib: Annotated[
        float | None, typer.Option(help="GiB allocated outside torch, if known.")
    ] = None
    cuda_graph_gib: Annotated[
        float | None, typer.Option(help="GiB that vLLM reserves for CUDA graphs.")
    ] = None
    vllm_version: Annotated[
        str | None,
        typer.Option(
            help="vLLM version whose rules hold; default: the log's, or 0.11 if a log names none; "
            f"without a log {NEWEST}."
        ),
    ] = None

    def choices(self) -> dict[str, Any]:
        """The given fields of `plan.Choices`. Raises InputError for a block that vLLM rejects."""
        if self.block_size is not None:
            check_block_size(self.block_size)
        values = {
            **self.placement(),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "draft_layers": self.draft_layers,
            "pad_latent": self.pad_latent or None,
            "non_torch_gib": self.non_torch_gib,
            "cuda_graph_gib": self.cuda_graph_gib,
            "vllm_version": self.vllm_version,
        }
        return {name: value for name, value in values.items() if value is not None}

    def checked_weights_gib(self) -> float | None:
        """`weights_gib`. Raises InputError unless it is a positive number."""
        if self.weights_gib is not None and not 0 < self.weights_gib < inf:
            raise InputError(f"--weights-gib {self.weights_gib}: give GiB, more than 0")
        return self.weights_gib
