"""Sizes of four models by hand: what an idle server needs for a document, and what fits on it."""

import json
from pathlib import Path

import pytest
from fakes.kv_models import write_config

from forebay.analysis.sizing.floor import alone, check_floor
from forebay.analysis.sizing.targets import NotMet, parse_targets
from forebay.analysis.sizing.workload import Users
from forebay.proxy.cli import main
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.ground.errors import InputError
from forebay.traces.synth.lengths import Fixed

PEAK, BANDWIDTH, LINK = 989.5e12, 4.8e12, 450e9  # of an H200, and one direction of its NVLink
PRODUCTS, ATTENTION, LINKS = 0.735, 0.627, 0.62  # shares reached
FP8_PRODUCTS = 0.735 * 0.82


def users(document_tokens: int) -> Users:
    return Users(
        users=100,
        document_tokens=Fixed(document_tokens),
        chat_tokens=Fixed(500),
        chat_output_tokens=Fixed(200),
    )


def by_hand(
    tokens: int, *, weights: float, pair_flops: float, layers: int, hidden: int, ranks: int,
    rate: float = PEAK * PRODUCTS,
) -> float:  # fmt: skip
    """Products and causal attention at their rates, divided among GPUs, and their all-reduces."""
    products_s = 2 * weights * tokens / rate / ranks
    attention_s = pair_flops * tokens * tokens / 2 / (PEAK * ATTENTION) / ranks
    sums_s = 0.0
    if ranks > 1:
        moved = 2 * (ranks - 1) / ranks * 2 * hidden * tokens
        sums_s = (2 * layers + 1) * moved / (LINK * LINKS)
    return products_s + attention_s + sums_s


@pytest.mark.parametrize(("ranks", "about_s"), [(1, 12.2), (2, 6.7)])
def test_a_14b_with_100_000_tokens(ranks: int, about_s: float) -> None:
    """On one GPU no number of servers meets 10 s. On two, compute for prefills is what binds."""
    config = EngineConfig("qwen2.5-14b", tensor_parallel_size=ranks)
    weights = 48 * (5120 * 7168 + 5120 * 5120 + 3 * 5120 * 13_824)
    expected_s = by_hand(100_064, weights=weights, pair_flops=48 * 4 * 40 * 128, layers=48,
                         hidden=5120, ranks=ranks)  # fmt: skip
    took = alone(config, 100_064).ttft_s
    assert took == pytest.approx(about_s, abs=0.1)
    # elementwise kernels, admission and the API server are the rest
    assert expected_s < took < 1.12 * expected_s
    targets = parse_targets("document.ttft_p95=10s")
    if ranks == 1:
        with pytest.raises(NotMet, match=r"compute-bound.* --tensor-parallel-size 2 \(6\.7 s\)"):
            check_floor(config, users(100_000), targets)
    else:
        check_floor(config, users(100_000), targets)


def test_a_70b_in_fp8_on_two_gpus(tmp_path: Path) -> None:
    path = str(write_config(tmp_path, "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"))
    config = EngineConfig(path, "h200", tensor_parallel_size=2)
    weights = 80 * (8192 * 10_240 + 8192 * 8192 + 3 * 8192 * 28_672)
    served = weights + 2 * (2 * 128_256 * 8192 + 161 * 8192)
    pool = (0.9 * 139.8 - 0.55) * GIB - served / 2 - 38.5 * 1024 * 128_256
    assert config.kv_budget.blocks == int(pool // (16 * 80 * 2 * 4 * 128 * 2))
    expected_s = by_hand(32_064, weights=weights, pair_flops=80 * 4 * 64 * 128, layers=80,
                         hidden=8192, ranks=2, rate=1979e12 * FP8_PRODUCTS)  # fmt: skip
    assert expected_s < alone(config, 32_064).ttft_s < 1.12 * expected_s
    check_floor(config, users(32_000), parse_targets("document.ttft_p95=10s"))


def test_a_mixture_on_eight_gpus(tmp_path: Path) -> None:
    config = EngineConfig(
        str(write_config(tmp_path, "Qwen/Qwen3-235B-A22B")), "h200", tensor_parallel_size=8
    )
    pool = (0.9 * 139.8 - 0.55) * GIB - 235_093_634_560 * 2 / 8 - 38.5 * 1024 * 151_936
    assert config.kv_budget.blocks == int(pool // (16 * 94 * 2 * 1 * 128 * 2))
    attention = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096
    active = 94 * (attention + 128 * 4096 + 8 * 3 * 4096 * 1536)
    expected_s = by_hand(32_064, weights=active, pair_flops=94 * 4 * 64 * 128, layers=94,
                         hidden=4096, ranks=8)  # fmt: skip
    # Each token is copied to eight experts, whose narrow products are bound by these copies. Their
    # weights are read before or after, not beside.
    assert expected_s < alone(config, 32_064).ttft_s < 1.6 * expected_s
    with pytest.raises(InputError, match="the KV cache holds 0 tokens"):
        EngineConfig(str(tmp_path), "h200", tensor_parallel_size=2)


def test_a_hybrid_is_refused_by_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"model_type": "olmo_hybrid", "full_attention_interval": 4}
    path = str(write_config(tmp_path, "Qwen/Qwen3-8B", **changed))
    assert main(["size", "--model", path, "--users", "9", "--document-tokens", "9000"]) == 2
    assert "full_attention_interval: this model has a recurrent" in capsys.readouterr().err


def test_a_single_server_says_what_it_uses_most(capsys: pytest.CaptureFixture[str]) -> None:
    words = "size --users 4 --document-tokens 2000 --tp 2 --quick --jobs 1 --window 60 --json"
    assert main([*words.split(), "--slo", "chat.ttft_p50=2s"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["servers"], told["gpus_per_server"], told["recommended_gpus"]) == (1, 2, 2)
    assert told["binding"] is None
    assert told["closest"].startswith("none, one is enough; ")
