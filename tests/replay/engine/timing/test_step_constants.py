"""Published runs that no constant was fitted to: several GPUs, experts, other GPUs than an H200.

Each table states its bound. Where a row misses, the text says by how much and why.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from fakes.kv_models import CONFIGS, INFERENCE_SIM, write_config

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.gpu_sheet import features_of
from forebay.replay.engine.placement import rank_of
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork

# inference-sim/training, default_args/2026021*: vLLM on H100 SXM, --max-num-batched-tokens 2048,
# --max-num-seqs 128, constant arrivals; 45 prompts that are asked again and again, so that all but
# their last block is cached. Model, GPUs, requests a second, prompt and output tokens, and the
# medians of TPOT ((request_latency - time_to_first_token) / tokens) and TTFT in ms.
SERVED = [
    ("Llama-2-7B", 1, 8, 575, 249, 8.16, 26.8),
    ("CodeLlama-34B", 2, 8, 575, 250, 14.58, 45.3),
    ("Llama-2-70B", 4, 8, 575, 249, 18.59, 55.2),
    ("Llama-2-70B", 4, 20, 575, 249, 21.96, 68.3),
    ("Mixtral-8x7B", 2, 8, 570, 249, 18.90, 55.8),
    ("Mixtral-8x7B", 2, 5, 589, 248, 17.79, 53.0),
]
SECONDS, WARM_S, PROMPTS = 15, 9.0, 45


def errors(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median and the largest of the relative errors of (measured, model)."""
    off = sorted(abs(model / measured - 1) for measured, model in rows)
    return median(off), off[-1]


def served(row: tuple[str, int, int, int, int, float, float], folder: Path) -> tuple[float, float]:
    """Return the medians of TPOT and TTFT of a simulated run, ms."""
    name, ranks, rate, prompt, output, _, _ = row
    path = write_config(folder, INFERENCE_SIM[name])
    config = EngineConfig(
        str(path), "h100", tensor_parallel_size=ranks, max_model_len=4096,
        max_num_batched_tokens=2048, max_num_seqs=128, vllm_version="0.20",
    )  # fmt: skip
    requests = [
        EngineRequest(str(n), prompt, output,
                      [1_000 * (n % PROMPTS) + block for block in range(prompt // 16)],
                      arrival_s=n / rate)
        for n in range(rate * SECONDS)
    ]  # fmt: skip
    play(new_core(config), requests, lambda *_: None)
    late = [one for one in requests if one.arrival_s > WARM_S]
    tpot = median((one.last_token_s - one.first_token_s) / (output - 1) for one in late)
    return 1e3 * tpot, 1e3 * median(one.first_token_s - one.arrival_s for one in late)


def test_served_runs_on_h100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TPOT within 5 % in the median and 13 % at most; so is TTFT but for the 7B.

    Its 26.8 ms are 4.2 ms less than simulated: that server takes a request in sooner than the
    H200's, whose times of admission and API server are used.
    """
    found = [served(row, tmp_path / str(n)) for n, row in enumerate(SERVED)]
    with capsys.disabled():
        for row, (tpot, ttft) in zip(SERVED, found, strict=True):
            off = f"TPOT {tpot:.2f} ms ({tpot / row[5] - 1:+.1%})"
            print(f"\n{row[0]} on {row[1]}, {row[2]}/s: {off}, TTFT {ttft / row[6] - 1:+.1%}")
    typical, worst = errors([(row[5], tpot) for row, (tpot, _) in zip(SERVED, found, strict=True)])
    assert (typical < 0.05, worst < 0.13) == (True, True)
    firsts = [(row[6], ttft) for row, (_, ttft) in zip(SERVED, found, strict=True)]
    typical, worst = errors(firsts[1:])
    assert (typical < 0.05, worst < 0.13) == (True, True)
    assert firsts[0][1] - firsts[0][0] == pytest.approx(4.2, abs=0.3)


# ai-dynamo/aiconfigurator, fpm_golden_runs/fpm_upfront_qwen32_full_once_20260613_194007: single
# steps of vLLM 0.20.1 with Qwen3-32B in 16 bits on 1, 2 and 4 B300, medians, ms. A prompt of so
# many tokens ("prefill"), or so many requests that decode behind 4,097 tokens ("decode").
STEPS = {
    1: [("prefill", 1024, 53.0), ("prefill", 4096, 205.0), ("prefill", 8192, 397.3),
        ("decode", 1, 13.6), ("decode", 4, 14.5), ("decode", 14, 16.37)],
    2: [("prefill", 1024, 33.4), ("prefill", 4096, 114.0), ("prefill", 8192, 223.6),
        ("decode", 1, 8.95), ("decode", 4, 9.35), ("decode", 14, 10.16)],
    4: [("prefill", 4096, 72.0), ("prefill", 8192, 133.95), ("decode", 1, 6.05),
        ("decode", 4, 6.39), ("decode", 14, 6.78)],
}  # fmt: skip
FITTED = [(128, 7.96), (1024, 23.5)]
"""Prompts on four GPUs whose steps are bound by their launch: they made two constants."""


def step_ms(model: StepTimeModel, kind: str, count: int) -> float:
    if kind == "decode":
        return 1e3 * model.step_s(StepWork(count, count, count, decode_context=4097 * count))
    requests = max(1, count // 4096)  # the 8,192 tokens are two prompts
    chunks = [(count // requests, 0)] * requests
    return 1e3 * model.step_s(StepWork(count, requests, requests, chunks=chunks))


def on_b300(folder: Path, ranks: int) -> StepTimeModel:
    """A B300 has the rates and links of a B200, and more memory."""
    gpu = find_gpu("b200")
    gpu = replace(gpu, name="b300", features=features_of(gpu))
    model = find_model(str(write_config(folder, CONFIGS["Qwen/Qwen3-32B"])))
    return StepTimeModel(rank_of(model, ranks), gpu, async_scheduling=True)


def test_steps_on_a_gpu_that_was_never_measured(tmp_path: Path) -> None:
    """A B300 takes 9 % longer in the median, 17 % at most: shares of its peak are the H200's.

    That misses 5 % and 13 %. Beside one GPU's error, several GPUs add little: the speed-up over one
    GPU is within 5 % in the median and 9 % at most, except for the prompt of 1,024 tokens: one GPU
    computes it within the H200's launch time.
    """
    found = {
        ranks: [(ms, step_ms(on_b300(tmp_path, ranks), kind, count)) for kind, count, ms in rows]
        for ranks, rows in STEPS.items()
    }
    typical, worst = errors([row for rows in found.values() for row in rows])
    assert (typical < 0.095, worst < 0.18) == (True, True)
    alone = dict(zip([row[:2] for row in STEPS[1]], found[1], strict=True))
    faster = [
        (alone[row[:2]][0] / measured, alone[row[:2]][1] / modelled)
        for ranks in (2, 4)
        for row, (measured, modelled) in zip(STEPS[ranks], found[ranks], strict=True)
        if row[1] != 1024
    ]
    typical, worst = errors(faster)
    assert (typical < 0.05, worst < 0.1) == (True, True)


def test_launches_of_several_gpus_are_those_fitted(tmp_path: Path) -> None:
    model = on_b300(tmp_path, 4)
    for tokens, ms in FITTED:
        assert step_ms(model, "prefill", tokens) == pytest.approx(ms, rel=0.01)
