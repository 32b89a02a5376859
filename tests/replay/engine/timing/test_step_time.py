"""The step-time model against the published rows, and the KV pool against the KV arithmetic."""

from dataclasses import replace

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.specs import H200_NVL, H200_SXM, LLAMA_3_8B
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork
from forebay.traces.ground.errors import InputError


@pytest.mark.parametrize(
    ("batched_tokens", "worst_gap_s", "uploader_ttft_s"),
    [
        (131_072, 6.99, 7.00),
        (8_192, 0.78, 7.13),
        (2_048, 0.21, 7.47),
        (1_024, 0.11, 7.93),
        (512, 0.078, 8.84),
        (256, 0.074, 10.9),
    ],
)
def test_smaller_chunks_trade_the_uploader_for_the_chatter(
    batched_tokens: int, worst_gap_s: float, uploader_ttft_s: float
) -> None:
    """With small chunks the worst gap is the first: for 0.0625 s the engine takes in the prompt."""
    config = EngineConfig(
        "phi-3-mini-128k",
        "h200-nvl",
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=16,
        async_scheduling=False,
    )
    core = EngineCore(config)
    core.add(EngineRequest("chat", 500, 10_000))
    while core.step(0.0).outputs == []:
        pass  # its own prompt
    upload = EngineRequest("upload", 120_000, 1)
    core.add(upload)
    gaps: list[float] = []
    while upload.output_tokens == 0:
        gaps.append(core.step(0.0).duration_s)
    assert max(gaps) == pytest.approx(worst_gap_s, rel=0.06)
    assert sum(gaps) + core.config.step_constants().server_times().request_s == pytest.approx(
        uploader_ttft_s, rel=0.03
    )


def test_fewer_sequences_leave_more_cache() -> None:
    more = EngineCore(EngineConfig("llama-3-8b", max_num_seqs=256))
    assert more.kv_tokens - EngineCore(EngineConfig("llama-3-8b")).kv_tokens == pytest.approx(
        29_000, rel=0.02
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("microsoft/Phi-3-mini-128k-instruct", "phi-3-mini-128k"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
    ],
)
def test_model_names_are_forgiving(name: str, model: str) -> None:
    assert find_model(name).name == model


def test_gpu_names_are_forgiving() -> None:
    assert find_gpu("NVIDIA H200 NVL") is H200_NVL
    assert find_gpu("h200") is H200_SXM
    with pytest.raises(InputError, match=r"tpu: .* h200-nvl, h200-sxm"):
        find_gpu("tpu")


def test_more_work_never_takes_less_time() -> None:
    model = StepTimeModel(LLAMA_3_8B, H200_SXM)

    def prefill(count: int, before: int) -> float:
        return model.step_s(StepWork(count, 1, chunks=[(count, before)]))

    sizes = [2, 16, 50, 128, 256, 511, 512, 600, 1_024, 4_096, 8_192]
    for before in (0, 1_000, 100_000):
        seconds = [prefill(count, before) for count in sizes]
        assert seconds == sorted(seconds), before
    assert prefill(512, 100_000) > prefill(512, 0)


def test_decode_is_bound_by_memory_not_below_its_floor() -> None:
    core = EngineCore(EngineConfig("llama-3-8b"))
    core.add(EngineRequest("r", 1_000, 10))
    core.step(0.0)
    floor_s = LLAMA_3_8B.weight_bytes / H200_SXM.bandwidth
    assert floor_s < core.step(0.0).duration_s < 2.2 * floor_s


def test_a_request_reads_and_writes_its_recurrent_states() -> None:
    model = find_model("Qwen3.6-35B-A3B")
    times = StepTimeModel(model, H200_SXM)
    more_s = times.step_s(StepWork(8, 9, 8)) - times.step_s(StepWork(8, 8, 8))
    moved = 2 * 30 * (2 * 3 * 8192 + 4 * 32 * 128 * 128)
    assert 1 < more_s / (moved / H200_SXM.bandwidth) < 1.6  # with the sampler's part of a request
    # A prompt's tokens come one after the other, those of several prompts at the same time.
    alone = times.step_s(StepWork(8192, 1, 1, chunks=[(8192, 0)]))
    both = times.step_s(StepWork(8192, 1, 1, chunks=[(4096, 0), (4096, 0)]))
    assert alone - both > 30 * 4096 * 40e-9


def test_sparse_attention_reads_the_chosen_tokens_and_all_index_keys() -> None:
    sparse = find_model("DeepSeek-V3.2")
    dense = replace(sparse, index=None)
    times = StepTimeModel(sparse, H200_SXM)
    assert sparse.attended_window == 2048
    per_token = [StepTimeModel(m, H200_SXM).decode_terms(1)[1] for m in (sparse, dense)]
    assert per_token[0] < per_token[1] / 4
    short = times.step_s(StepWork(1, 1, 1, 2048, window_context=2048))
    long = times.step_s(StepWork(1, 1, 1, 65_536, window_context=2048))
    assert long - short == pytest.approx((65_536 - 2048) * per_token[0])
