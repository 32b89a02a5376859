"""NVIDIA's op tables: made-up ones with a known answer, and the real ones if they are there."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import forebay
from fakes.op_tables import needs_tables, tables_folder

from forebay.replay.engine.calibration.tables import KERNELS, OpTables
from forebay.replay.engine.hardware.find import find_gpu
from forebay.replay.engine.hardware.specs import LLAMA_3_8B, GpuSpec
from forebay.replay.engine.timing.step_constants import calibration_file_of
from forebay.replay.engine.timing.step_time import StepWork

# What kernels of the made-up GPU reach: 10 us each and half of 1e15 FLOP/s or of 1e12 bytes/s.
FLOPS, BANDWIDTH = 5e14, 5e11
GPU = {"name": "made-up", "peak_flops": 1e15, "bandwidth": 1e12, "memory_gib": 80.0,
       "multiprocessors": 100}  # fmt: skip
SIZES = (1_024, 4_096, 16_384, 65_536)


def write(
    folder: Path, gpu: str, version: str, op: str, name: str, rows: list[dict[str, Any]]
) -> None:
    path = folder / "systems" / "data" / gpu / op / "vllm" / version
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path / f"{name}.parquet")


def made_up(folder: Path, gpu: str = "made_up", version: str = "0.24.0") -> Path:
    """Tables of one GPU: products, and attention of 32 heads of 128 with 8 of keys."""
    products = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k,
         "latency": 1e3 * max(2.0 * m * n * k / FLOPS, 2.0 * n * k / BANDWIDTH)}
        for m in (1, 16, 256, 4_096, 16_384) for n in SIZES for k in SIZES
    ]  # fmt: skip
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
             "kv_cache_dtype": "bfloat16"}  # fmt: skip
    prompts = [
        {**heads, "batch_size": 1, "isl": isl, "latency": 1e3 * (1e-5 + 8_192 * isl**2 / FLOPS)}
        for isl in (16, 256, 1_024, 4_096, 16_384)
    ]
    decodes = [
        {**heads, "batch_size": batch, "isl": 1, "step": step,
         "latency": 1e3 * (1e-5 + 4_096 * batch * (step + 1) / BANDWIDTH)}
        for batch in (1, 8, 64) for step in (255, 1_023, 8_191)
    ]  # fmt: skip
    write(folder, gpu, version, "gemm", "gemm_perf", products)
    write(folder, gpu, version, "attention", "context_attention_perf", prompts)
    write(folder, gpu, version, "attention", "generation_attention_perf", decodes)
    return folder


def made_up_gpu(folder: Path) -> str:
    path = folder / "gpu.json"
    path.write_text(json.dumps(GPU))
    return str(path)


def test_a_step_is_the_sum_of_its_rows(tmp_path: Path) -> None:
    """Sizes between two rows, and chunks behind others, are interpolated."""
    gpu = GpuSpec("made-up", 1e15, 1e12, 80.0, 100)
    tables = OpTables(made_up(tmp_path), LLAMA_3_8B, gpu)
    assert tables.decode_s(8, 1_024) == pytest.approx(1e-5 + 4_096 * 8 * 1_024 / BANDWIDTH)
    assert tables.decode_s(32, 4_096) == pytest.approx(4_096 * 32 * 4_096 / BANDWIDTH, rel=0.05)
    whole, first, rest = (tables.chunk_s(*c) for c in ((4_096, 0), (1_024, 0), (3_072, 1_024)))
    assert first + rest == pytest.approx(whole)
    weights = sum(a * b for a, b in LLAMA_3_8B.linear_shapes)
    step = tables.step_s(StepWork(4_096, 1, 0, chunks=[(4_096, 0)]))
    small = 9e-6 + LLAMA_3_8B.elementwise_bytes * 4_096 / (0.8 * 1e12)
    assert step == pytest.approx(32 * (2 * 4_096 * weights / FLOPS + whole + small), rel=1e-3)


def test_the_newest_complete_version_counts(tmp_path: Path) -> None:
    made_up(tmp_path, version="0.9.0")
    made_up(tmp_path, version="0.14.0")
    write(tmp_path, "made_up", "0.20.0", "gemm", "gemm_perf", [{"m": 1}])
    gpu = GpuSpec("made-up", 1e15, 1e12, 80.0, 100)
    assert OpTables(tmp_path, LLAMA_3_8B, gpu).version == "0.14.0"


def test_the_command_writes_constants_of_the_tables(tmp_path: Path) -> None:
    """Half of each rate, as the made-up kernels reach. What tables lack is the shipped."""
    file, folder = tmp_path / "cal.json", made_up(tmp_path)
    said = forebay(
        "engine", "fit", str(folder), "--model", "llama-3-8b", "--gpu", made_up_gpu(tmp_path),
        "-o", str(file),
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "the tables are of vLLM 0.24.0, the engine is simulated as 0.33" in said.stderr
    told = json.loads(file.read_text())
    assert {*told["fitted"]} == {*KERNELS}
    for name in ("gemm_compute", "gemm_bandwidth", "decode_bandwidth"):
        assert told["constants"][name] == pytest.approx(0.5, rel=0.1), name
    shipped = calibration_file_of("llama-3-8b", "made-up").constants
    for name in ("eager_launch_s", "graph_launch_s", "step_s", "request_s"):
        assert told["constants"][name] == getattr(shipped, name)
    assert "They lack launches" in told["source"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--gpu", "h200"), "--gpu h200-sxm: {} has no tables of it; it has made_up"),
        (("--gpu", "{}/gpu.json", "--model", "gpt-oss-20b"), "only dense models in 16 bits"),
        (("--gpu", "{}/gpu.json", "--model", "phi-3-mini"), "lack attention of 32 heads of 96"),
        (("--gpu", "{}/gpu.json", "--hold-out", "0.5"), "op tables are fitted whole"),
        (("--gpu", "{}/gpu.json", "--max-num-seqs", "64"), "--max-num-seqs describes the server"),
    ],
)
def test_what_the_tables_lack_is_one_clear_line(
    tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    made_up_gpu(made_up(tmp_path))
    words = [option.format(tmp_path) for option in options]
    said = forebay("engine", "fit", str(tmp_path), "--model", "llama-3-8b", *words)
    assert said.returncode != 0
    assert text.format(tmp_path) in said.stderr
    assert "Traceback" not in said.stderr


# The sums of NVIDIA's own tool (cli_estimate), ms: prompts of 1,024 and 8,192 tokens, and decode of
# 1, 16 and 64 requests behind 1,024 tokens, 16 behind 8,192.
SUMS = {
    "h200": [21.2, 199, 4.86, 5.78, 7.57, 9.59], "h100": [22.1, 200, 6.18, 7.51, 10.4, 13.1],
    "a100": [64.7, 557, 11.9, 13.6, 17.8, 22.3], "l40s": [70.3, 700, 22.0, 25.0, 38.3, 49.3],
    "b200": [11.6, 97.5, 3.48, 3.67, 4.89, 5.91],
}  # fmt: skip


@needs_tables
@pytest.mark.parametrize("gpu", SUMS)
def test_sums_are_those_of_nvidias_tool(gpu: str) -> None:
    """Within 5 %: it interpolates in another way."""
    tables = OpTables(tables_folder(), LLAMA_3_8B, find_gpu(gpu))
    works = [StepWork(count, 1, 1, chunks=[(count, 0)]) for count in (1_024, 8_192)]
    works += [
        StepWork(count, count, count, decode_context=count * context)
        for count, context in ((1, 1_024), (16, 1_024), (64, 1_024), (16, 8_192))
    ]
    assert [1e3 * tables.step_s(work) for work in works] == pytest.approx(SUMS[gpu], rel=0.05)


@needs_tables
@pytest.mark.parametrize("gpu", ["a100", "b200"])
def test_a_fit_to_the_tables_is_near_them(gpu: str, tmp_path: Path) -> None:
    file = tmp_path / "cal.json"
    said = forebay(
        "engine", "fit", str(tables_folder()), "--model", "llama-3.1-8b", "--gpu", gpu,
        "-o", str(file), "--json",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    errors = sorted(abs(row["error"]) for row in json.loads(said.stdout)["points"])
    assert errors[len(errors) // 2] < 0.03
    assert errors[-1] < 0.12
