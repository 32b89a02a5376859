"""Data sheets: every GPU has its sizes, links and vLLM's defaults; a wrong unit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_gpu
from forebay.replay.engine.hardware.gpu_memory import find_gpu_memory
from forebay.replay.engine.hardware.gpu_sheet import features_of
from forebay.traces.ground.errors import InputError

SHEET = {"name": "card", "peak_flops": 989.5e12, "bandwidth": 4.8e12, "memory_gib": 139.8,
         "multiprocessors": 132}  # fmt: skip
# dense 16-bit TFLOP/s, TB/s, FP8 TFLOP/s, max_num_batched_tokens and max_num_seqs of vLLM 0.32
SHEETS = {
    "h200": (989.5, 4.8, 1979, 8192, 1024),
    "h200-nvl": (835.5, 4.8, 1670.5, 8192, 1024),
    "h100": (989.5, 3.35, 1979, 8192, 1024),
    "a100": (312, 2.039, 0, 2048, 256),
    "NVIDIA A100-SXM4-40GB": (312, 1.555, 0, 2048, 256),
    "b200": (2250, 8.0, 4500, 16_384, 1024),
    "l40s": (366.5, 0.864, 733, 2048, 256),
    "RTX 4090": (165.2, 1.008, 330.3, 2048, 256),
    "mi300x": (1307.4, 5.3, 2614.9, 16_384, 1024),
}


@pytest.mark.parametrize("name", SHEETS)
def test_gpus_and_the_defaults_of_vllm(name: str) -> None:
    tflops, bandwidth, narrow, tokens, seqs = SHEETS[name]
    gpu = find_gpu(name)
    assert (gpu.peak_flops / 1e12, gpu.bandwidth / 1e12) == (tflops, bandwidth)
    features = features_of(gpu)
    assert features.fp8_flops == pytest.approx(narrow * 1e12)
    assert features.link_bandwidth
    assert features.link_latency_s
    config = EngineConfig("llama-3-8b", name, max_model_len=4_096)
    assert (config.batched_tokens, config.seqs) == (tokens, seqs)
    memory = find_gpu_memory(name)
    assert (memory.batched_tokens, memory.sequences) == (tokens, seqs)
    assert memory.gib == gpu.memory_gib


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bandwidth": 4.8, "peak_flops": 989.5}, r"peak_flops is 989\.5; give FLOP/s"),
        ({"bandwidth": 4.8}, r"bandwidth is 4\.8; give bytes/s, such as 4\.8e12"),
        ({"bandwidth": 4.8e9}, "peak_flops 9.895e[+]14 for a bandwidth of 4.8e[+]09: one of them"),
        ({"memory_gib": 143_771}, "memory_gib is 143771; give GiB"),
        ({"memory_gib": 150e9}, "memory_gib is 1.5e[+]11; give GiB"),
        ({"multiprocessors": 16_896}, "multiprocessors is 16896; give a number of SMs"),
        ({"link_bandwidth": 900}, "link_bandwidth is 900; give bytes/s in one direction"),
        ({"link_latency_s": 5}, "link_latency_s is 5; give seconds"),
    ],
)
def test_a_wrong_unit_is_one_line(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**SHEET, **changed}))
    with pytest.raises(InputError, match=said):
        find_gpu(str(path))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "link_bandwidth"),
        ({"quantization": "fp8"}, "fp8_flops"),
        ({"kv_cache_dtype": "fp8"}, "fp8_flops"),
    ],
)
def test_a_file_states_what_the_options_need(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(SHEET))
    with pytest.raises(InputError, match=f"--gpu card: its file does not state {named}"):
        EngineConfig("llama-3-8b", str(path), **options)
    more = {"fp8_flops": 1979e12, "link_bandwidth": 450e9, "link_latency_s": 5e-6}
    (tmp_path / "more.json").write_text(json.dumps({**SHEET, **more}))
    EngineConfig("llama-3-8b", str(tmp_path / "more.json"), **options)
