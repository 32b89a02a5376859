"""Simulate published runs of other people's servers, with no constant fitted to them.

    python tests/bench/published_runs.py      (writes results/published-runs.json)
    make docs-figures                         (writes the tables of docs/explanation/simulator.md)

The measured figures are in inference-sim/training (default_args/*/results) and, where it lacks the
model, inference-sim/sim-to-real-accuracy-validation (results/cluster_2000req/error_records.csv):
vLLM on H100 SXM, --max-num-batched-tokens 2048, --max-num-seqs 128, constant arrivals of equal
requests, 600 s at the first rate and then 600 s at the second. A few prompts are asked again and
again. The closed loops are in ai-dynamo/aiconfigurator (systems/silicon_sample.csv, configs 606,
733, 732): MiniMax-M2.5 in FP8, vLLM 0.16.0 on H200 and 0.19.0 on B300. Their client is that of
InferenceMAX: random prompts and answers of 80 to 100 % of the length, ten for each place in the
loop.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from kv_models import CONFIGS, INFERENCE_SIM

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.closed_loop import closed_loop
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import DIRECT, Scenario, simulate
from forebay.traces.schema import TraceRequest

RESULT = Path(__file__).with_name("results") / "published-runs.json"
SERVED_TIMES, LOOP_TIMES = ("e2e_s", "ttft_mean_s", "ttft_p99_s"), ("tpot_ms", "ttft_ms")
BLOCK = 16
WARM_S, LATE_S = 60.0, 120.0
"""Seconds that are simulated at the first rate, and then at the second."""
MODELS: dict[str, dict[str, Any]] = {
    **INFERENCE_SIM,
    "Qwen3-14B": CONFIGS["Qwen/Qwen3-14B"],
    "MiniMax-M2.5": {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 200_064, "max_position_embeddings": 196_608, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}  # fmt: skip
WORKLOADS = {"general": (575, 248, 45), "codegen": (592, 247, 44), "roleplay": (787, 251, 50)}
"""Prompt tokens, output tokens and number of prompts."""


@dataclass(frozen=True, slots=True)
class Served:
    """One stage of a published run. `e2e_s` is a mean."""

    model: str
    gpus: int
    workload: str
    rate: int
    e2e_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    first_rate: int | None = None


SERVED = (
    Served("Llama-2-7B", 1, "codegen", 5, 1.8103, 0.04597, 0.02504),
    Served("Llama-2-7B", 1, "roleplay", 6, 2.0711, 0.03826, 0.02713),
    Served("Qwen3-14B", 1, "codegen", 5, 3.1203, 0.06734, 0.03963),
    Served("Qwen3-14B", 1, "codegen", 10, 3.4179, 0.06117, 0.04328, 5),
    Served("Qwen3-14B", 1, "roleplay", 6, 3.2850, 0.06377, 0.04132),
    Served("Qwen3-14B", 1, "general", 8, 3.3116, 0.06804, 0.04168),
    Served("Qwen3-14B", 1, "general", 20, 4.3651, 0.08652, 0.05450, 8),
    Served("CodeLlama-34B", 2, "codegen", 5, 3.6104, 0.06903, 0.04446),
    Served("CodeLlama-34B", 2, "codegen", 10, 3.7791, 0.05488, 0.04614, 5),
    Served("CodeLlama-34B", 2, "roleplay", 6, 3.6697, 0.07488, 0.04568),
    Served("Llama-2-70B", 4, "codegen", 5, 4.3329, 0.10623, 0.05340),
    Served("Llama-2-70B", 4, "codegen", 10, 4.7418, 0.06767, 0.05668, 5),
    Served("Llama-2-70B", 4, "roleplay", 6, 4.5616, 0.09626, 0.05475),
    Served("Llama-2-70B", 4, "general", 8, 4.6784, 0.12062, 0.05739),
    Served("Mixtral-8x7B", 2, "codegen", 5, 4.5185, 0.48159, 0.06300),
    Served("Mixtral-8x7B", 2, "codegen", 10, 4.7536, 0.06815, 0.05678, 5),
    Served("Mixtral-8x7B", 2, "roleplay", 6, 4.6847, 0.08535, 0.06051),
    Served("Mixtral-8x7B", 2, "general", 8, 4.7960, 0.38308, 0.06389),
    Served("Mixtral-8x7B", 2, "general", 20, 5.1357, 0.25603, 0.07095, 8),
)
LOOP_NAMES = ("gpu", "gpus", "prompt", "output", "in_flight", "ttft_ms", "tpot_ms")
"""GPU and their number, tokens, requests, and the means of TTFT and TPOT."""
LOOPS = (
    ("H200", 4, 1024, 1024, 4, 89.85, 12.382), ("H200", 4, 1024, 1024, 8, 106.26, 13.628),
    ("H200", 4, 1024, 1024, 16, 116.07, 15.736), ("H200", 4, 1024, 1024, 32, 167.96, 20.398),
    ("H200", 4, 1024, 1024, 64, 227.72, 25.740), ("H200", 4, 8192, 1024, 4, 319.13, 13.353),
    ("H200", 4, 8192, 1024, 8, 415.89, 15.605), ("H200", 4, 8192, 1024, 16, 549.90, 19.931),
    ("H200", 4, 8192, 1024, 32, 789.27, 29.570), ("H200", 4, 8192, 1024, 64, 1257.14, 44.778),
    ("H200", 4, 1024, 8192, 4, 103.02, 12.451), ("H200", 4, 1024, 8192, 8, 104.82, 13.644),
    ("H200", 4, 1024, 8192, 16, 122.61, 15.971), ("H200", 4, 1024, 8192, 32, 162.68, 21.257),
    ("H200", 4, 1024, 8192, 64, 220.65, 27.042), ("B300", 4, 1024, 1024, 4, 52.01, 7.888),
    ("B300", 4, 1024, 1024, 16, 70.73, 9.966), ("B300", 4, 1024, 1024, 64, 129.05, 14.496),
    ("B300", 4, 8192, 1024, 8, 200.61, 9.496), ("B300", 4, 8192, 1024, 64, 574.76, 22.725),
    ("B300", 2, 1024, 1024, 4, 71.19, 9.379), ("B300", 2, 1024, 1024, 16, 101.69, 13.362),
    ("B300", 2, 1024, 1024, 64, 194.18, 22.225), ("B300", 2, 8192, 1024, 8, 281.49, 11.851),
)  # fmt: skip
SHEETS = {"H200": "h200", "B300": "b200"}  # a B300 has the rates of a B200


def written(folder: Path, model: str) -> str:
    path = folder / model / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(MODELS[model]))
    return str(path)


def served(row: Served, folder: Path) -> dict[str, float]:
    """Return E2E mean, TTFT mean and TTFT p99 of a simulated run, in seconds."""
    prompt, output, prompts = WORKLOADS[row.workload]
    engine = EngineConfig(
        written(folder, row.model), "h100", tensor_parallel_size=row.gpus, max_model_len=4096,
        max_num_batched_tokens=2048, max_num_seqs=128, vllm_version="0.20",
    )  # fmt: skip
    # The stage before fills the cache. Without one the first requests find it empty.
    warm = int(WARM_S * row.first_rate) if row.first_rate else 0
    start_s = WARM_S if warm else 0.0
    times = [n / (row.first_rate or 1) for n in range(warm)]
    times += [start_s + n / row.rate for n in range(int((LATE_S if warm else 600.0) * row.rate))]
    trace = [
        TraceRequest(
            str(n), at_s, prompt, output,
            blocks=tuple(1_000 * (n % prompts) + block for block in range(-(-prompt // BLOCK))),
            block_tokens=BLOCK,
        )
        for n, at_s in enumerate(times)
    ]  # fmt: skip
    done = simulate(trace, Scenario(engine, 1, DIRECT)).outcomes[warm:]
    ttfts = np.array([_ttft_s(outcome) for outcome in done])
    e2e_s = fmean((outcome.finished_s or 0.0) - outcome.request.arrival_s for outcome in done)
    return {"e2e_s": e2e_s, "ttft_mean_s": float(ttfts.mean()),
            "ttft_p99_s": float(np.quantile(ttfts, 0.99))}  # fmt: skip


def looped(row: tuple[str, int, int, int, int, float, float], folder: Path) -> dict[str, float]:
    """Return the means of TTFT and TPOT of a closed loop, in ms."""
    gpu, gpus, prompt, output, at_once, _, _ = row
    engine = EngineConfig(
        written(folder, "MiniMax-M2.5"), SHEETS[gpu], tensor_parallel_size=gpus,
        vllm_version="0.20", max_model_len=prompt + output + 256, enable_prefix_caching=False,
    )  # fmt: skip
    drawing = np.random.default_rng(0)
    sizes = [
        drawing.integers(int(0.8 * size), size, 10 * at_once, endpoint=True)
        for size in (prompt, output)
    ]
    trace = [
        TraceRequest(str(n), 0.0, int(asked), int(answered))
        for n, (asked, answered) in enumerate(zip(*sizes, strict=True))
    ]
    done = closed_loop(trace, served_engine(engine), "gpu0", at_once)
    tpots = [
        ((outcome.finished_s or 0.0) - (outcome.first_token_s or 0.0))
        / (outcome.request.output_tokens - 1)
        for outcome in done
    ]
    return {"ttft_ms": 1e3 * fmean(map(_ttft_s, done)), "tpot_ms": 1e3 * fmean(tpots)}


def _ttft_s(outcome: SimOutcome) -> float:
    return (outcome.first_token_s or 0.0) - outcome.request.arrival_s


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{**asdict(row), "simulated": served(row, folder)} for row in SERVED]
        loops = [
            {**dict(zip(LOOP_NAMES, row, strict=True)), "simulated": looped(row, folder)}
            for row in LOOPS
        ]
    RESULT.write_text(json.dumps({"served": rows, "loops": loops}, indent=1) + "\n")
    print(f"{served_table()}\n\n{loops_table()}")


def off(row: dict[str, Any], name: str) -> float:
    return float(row["simulated"][name] / row[name] - 1)


def served_table() -> str:
    """Return the errors of the runs with arrivals, and their medians."""
    return "\n".join(_served_lines())


def loops_table() -> str:
    """Return the errors of the closed loops, and their medians."""
    return "\n".join(_loop_lines())


def _served_lines() -> Iterator[str]:
    rows = json.loads(RESULT.read_text())["served"]
    yield "| model, GPUs, load | E2E mean | TTFT mean | TTFT p99 |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        kind = f"{row['model']} on {row['gpus']} H100, {row['workload']}, {row['rate']}/s"
        yield _line(kind, [off(row, name) for name in SERVED_TIMES])
    sizes = [sorted(abs(off(row, name)) for row in rows) for name in SERVED_TIMES]
    yield _summary(sizes)


def _loop_lines() -> Iterator[str]:
    rows = json.loads(RESULT.read_text())["loops"]
    yield "| GPUs, prompt, output, in flight | TPOT mean | TTFT mean |"
    yield "| --- | --- | --- |"
    for gpu in SHEETS:
        mine = [row for row in rows if row["gpu"] == gpu]
        for row in mine:
            kind = f"{row['gpus']} {gpu}, {row['prompt']:,}, {row['output']:,}, {row['in_flight']}"
            yield _line(kind, [off(row, name) for name in LOOP_TIMES])
        yield _summary([sorted(abs(off(row, name)) for row in mine) for name in LOOP_TIMES])


def _line(kind: str, errors: Sequence[float]) -> str:
    return f"| {kind} | {' | '.join(f'{error:+.1%}' for error in errors)} |"


def _summary(sizes: Sequence[Sequence[float]]) -> str:
    cells = [f"{median(size):.1%}, {size[int(0.9 * len(size))]:.1%}" for size in sizes]
    return f"| median and p90 without sign | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
