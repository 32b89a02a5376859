"""Tensor parallelism, precision, experts, MLA and windows: sizes by hand, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import write_config

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.layers import Product
from forebay.replay.engine.hardware.specs import GIB, H100_SXM, H200_SXM, LLAMA_3_8B
from forebay.replay.engine.placement import rank_of
from forebay.replay.engine.timing.roofline import least
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork, window_pairs
from forebay.replay.sim.engine.served import can_skip
from forebay.traces.ground.errors import InputError


def test_one_gpu_computes_the_whole_model() -> None:
    assert rank_of(LLAMA_3_8B, 1) is LLAMA_3_8B


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (8, 1), (16, 1)])
def test_a_rank_has_its_share(ranks: int, kv_heads: int) -> None:
    rank = rank_of(LLAMA_3_8B, ranks)
    heads = 32 // ranks
    assert rank.linear_shapes == (
        (heads * 128 + 2 * kv_heads * 128, 4096),
        (4096, heads * 128),
        (2 * 14_336 // ranks, 4096),
        (4096, 14_336 // ranks),
    )
    assert rank.kv_bytes_per_token == 32 * 2 * kv_heads * 128 * 2


def test_the_pool_of_two_gpus_by_hand() -> None:
    """Half the weights and half the KV heads; NCCL's buffers on each GPU."""
    config = EngineConfig("llama-3-8b", "h100", tensor_parallel_size=2)
    activation = 38.5 * 1024 * 128_256
    pool = (0.9 * 79.18 - 0.55) * GIB - 8_030_261_248 - activation
    assert config.kv_budget.blocks == int(pool // (16 * 32 * 2 * 4 * 128 * 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size 3: llama-3-8b has 32 attention heads",
        ),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0: give 1 or more"),
        ({"model": "qwen2.5-14b", "tensor_parallel_size": 5}, "has 8 KV heads, which 5 GPUs"),
        ({"quantization": "int3"}, "--quantization int3: give fp8, awq, gptq"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: give one of auto"),
        (
            {"gpu": "a100", "kv_cache_dtype": "fp8"},
            "--kv-cache-dtype fp8: a100-80gb has no FP8 units .* give bfloat16 or fp8_e5m2",
        ),
    ],
)
def test_what_vllm_cannot_place_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineConfig(**options)


def test_checkpoints_that_cannot_be_placed(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = str(write_config(tmp_path, "Qwen/Qwen3-235B-A22B", quantization_config=block))
    with pytest.raises(InputError, match="1536 wide, which 8 GPUs cannot divide in blocks of 128; "
                                         "give 4"):  # fmt: skip
        EngineConfig(path, "h200", tensor_parallel_size=8)
    EngineConfig(path, "h200", tensor_parallel_size=4)
    with pytest.raises(InputError, match=r"--quantization awq: .* is a checkpoint in fp8; leave"):
        EngineConfig(path, "h200", tensor_parallel_size=4, quantization="awq")
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    path = str(write_config(tmp_path / "small", "Qwen/Qwen3-8B", quantization_config=nvfp4))
    with pytest.raises(InputError, match="--gpu mi300x: vLLM has no kernels for nvfp4"):
        EngineConfig(path, "mi300x")
    assert "multiplied in 16 bits" in str(EngineConfig(path, "h200").constants_remark())


def test_fp8_halves_weights_and_cache() -> None:
    wide, narrow = EngineConfig(), EngineConfig(quantization="fp8", kv_cache_dtype="fp8")
    matrices = 32 * sum(outputs * inputs for outputs, inputs in LLAMA_3_8B.linear_shapes)
    assert wide.model_spec.weight_bytes - narrow.model_spec.weight_bytes == matrices
    assert narrow.model_spec.kv_bytes_per_token * 2 == wide.model_spec.kv_bytes_per_token


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "awq"}])
def test_decoding_reads_fewer_bytes(options: dict[str, Any]) -> None:
    def decode_s(config: EngineConfig) -> float:
        model = StepTimeModel(config.rank_spec, config.gpu_spec, async_scheduling=True)
        return model.step_s(StepWork(1, 1, 1, decode_context=100))

    wide, narrow = EngineConfig(), EngineConfig(**options)
    saved = wide.model_spec.weight_bytes - narrow.model_spec.weight_bytes
    by_hand = saved / (H200_SXM.bandwidth * 0.87)
    assert decode_s(wide) - decode_s(narrow) == pytest.approx(by_hand, rel=0.02)


def test_fp8_prefill_is_faster_where_there_are_units() -> None:
    chunk = StepWork(8192, 1, 1, chunks=[(8192, 0)])

    def seconds(gpu: str, **options: Any) -> float:
        config = EngineConfig(gpu=gpu, max_model_len=8_192, **options)
        return StepTimeModel(config.rank_spec, config.gpu_spec).step_s(chunk)

    assert seconds("h200", quantization="fp8") < 0.75 * seconds("h200")
    assert seconds("a100", quantization="fp8") > 0.99 * seconds("a100")
    unpacked = EngineConfig(gpu="a100", quantization="fp8", max_model_len=8_192)
    assert "multiplied in 16 bits" in str(unpacked.constants_remark())


def test_all_reduces_cost_latency_and_bytes() -> None:
    """Two GPUs: half the work, and 65 sums, each of latency and 2 bytes a number and token."""
    rank = rank_of(LLAMA_3_8B, 2)
    linked = StepTimeModel(rank, H100_SXM)
    work = StepWork(4_096, 1, 0, chunks=[(4_096, 0)])
    far = StepTimeModel(rank_of(LLAMA_3_8B, 2), EngineConfig(gpu="l40s", max_model_len=99).gpu_spec)
    near_s = linked.step_s(work)
    bytes_s = 65 * 4_096 * 4096 * 2 / (0.62 * 450e9)
    alone = StepTimeModel(LLAMA_3_8B, H100_SXM).step_s(work)
    assert near_s == pytest.approx(alone / 2 + 65 * 5e-6 + bytes_s, rel=0.12)
    assert far.step_s(work) - 65 * 4_096 * 4096 * 2 / (0.62 * 31.5e9) > near_s / 2


def test_experts_read_what_tokens_reach(tmp_path: Path) -> None:
    model = find_model(str(write_config(tmp_path, "Qwen/Qwen3-235B-A22B")))
    one = Product(1, 1, 16, experts=128, chosen=8)
    assert one.touched(1) == pytest.approx(8)
    assert one.touched(16) == pytest.approx(8 + 120 * (1 - (1 + 8 * 15 / 128 / 3) ** -3))
    assert one.touched(16) < 128 * (1 - (120 / 128) ** 16)  # as if all were equally likely
    assert one.touched(8192) == pytest.approx(128, abs=0.1)
    # by hand: attention and router of 94 layers, 8 experts, head; 2 bytes each
    attention = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096
    active = 94 * (attention + 128 * 4096 + 8 * 3 * 4096 * 1536) + 151_936 * 4096
    floor = least(model, H200_SXM, [StepWork(1, 1, 1)])
    assert floor.bytes == 2 * active
    assert floor.flops == 2 * active
    assert active / 1e9 == pytest.approx(21.6, abs=0.1)  # "A22B", less the embedding


def test_latent_attention_caches_one_row(tmp_path: Path) -> None:
    config = EngineConfig(
        str(write_config(tmp_path, "deepseek-ai/DeepSeek-R1")), "h200", tensor_parallel_size=8,
        max_model_len=32_768,
    )  # fmt: skip
    rank = config.rank_spec
    assert rank.kv_bytes_per_token == 61 * 576 * 2  # on every GPU
    assert rank.pair_flops == 2 * 16 * (192 + 128)
    model = StepTimeModel(rank, config.gpu_spec, async_scheduling=True)
    # a decoding query reads the row once, for 16 heads: 2 x 16 x (512 + 64 + 512) FLOPs
    read_s = rank.kv_bytes_per_token / (H200_SXM.bandwidth * 0.9)
    computed_s = 61 * 2 * 16 * 1088 / (H200_SXM.peak_flops * 0.627)
    per_token = model.decode_terms(1)[1]
    assert max(read_s, computed_s) <= per_token < read_s + computed_s
    far = model.chunk_attention_s(1024, 16_384) - model.chunk_attention_s(1024, 0)
    assert far > model.pair_s * 1024 * 16_384  # and 16,384 rows are unpacked again


def test_a_window_bounds_attention(tmp_path: Path) -> None:
    for count, offset, pairs in ((100, 0, 5_000), (100, 50, 50 * 75 + 50 * 100), (10, 500, 1_000)):
        assert window_pairs(count, offset, 100) == pairs
    config = EngineConfig(
        str(write_config(tmp_path, "google/gemma-3-27b-it")), "h200", max_model_len=65_536
    )
    model = config.rank_spec
    timing = StepTimeModel(model, config.gpu_spec, async_scheduling=True)
    short = timing.step_s(StepWork(1, 1, 1, decode_context=1_000, window_context=1_000))
    far = timing.step_s(StepWork(1, 1, 1, decode_context=60_000, window_context=1_024))
    # by hand: of 59,000 more tokens, 10 of 62 layers read them all, and 52 read 24 more
    layer = 2 * 16 * 128 * 2
    assert far - short == pytest.approx(
        layer * (10 * 59_000 + 52 * 24) / (H200_SXM.bandwidth * 0.9), rel=1e-6
    )
    assert config.limits().sliding_window == 1_024
    assert can_skip(replace(config, disable_hybrid_kv_cache_manager=True))
