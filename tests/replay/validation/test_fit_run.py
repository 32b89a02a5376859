"""Fitting whole replays, and models and GPUs from files: against known answers."""

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from commands import forebay
from fakes.made_runs import SCHEMA
from vllm_server import ModelSize, write_model

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.calibration.fit import Fit
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.server.server import start_engine
from forebay.replay.engine.timing.step_constants import read_calibration
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.runner import replay
from forebay.replay.validation.fit_run import compared, fit_run, hit_ratio, predict
from forebay.replay.validation.measured import Timed, read_runs
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

CONFIG = EngineConfig("llama-3-8b", "h200", max_num_batched_tokens=2_048, max_num_seqs=64)
# Asynchronous scheduling hides step_s behind the GPU's part, so that no run shows it.
SYNCHRONOUS = replace(CONFIG, async_scheduling=False)
TRUTH = replace(
    kernel_table(), gemm_compute=0.45, step_s=6e-3, request_s=25e-3
)  # fmt: skip


def trace(count: int) -> list[TraceRequest]:
    """Pairs of prompts of 200 to 8,000 tokens, every third of one document."""
    rows = []
    for at in range(count):
        tokens = 200 + (at * 7_919) % 7_800
        first = 0 if at % 3 == 0 else 1_000 * (at + 1)
        blocks = tuple(first + index for index in range(-(-tokens // 512)))
        rows.append(TraceRequest(f"r{at}", at // 2 * 0.8, tokens, 10 + at * 7 % 60, blocks=blocks))
    return rows


def timed(rows: list[TraceRequest], config: EngineConfig = CONFIG) -> tuple[Timed, ...]:
    """The times that a server with TRUTH would have measured."""
    asked = [Timed(row, row.arrival_s, 1.0, 1.0, 1.0, 0) for row in rows]
    return predict(asked, config, TRUTH)


def replayed(rows: list[TraceRequest] | Path, out: Path, **options: Any) -> None:
    """Replay to a server in virtual time, and keep the run in `out`."""

    async def main() -> None:
        async with start_engine(CONFIG) as server:
            await replay(ReplayOptions(rows, [server.url], out, quiet=True, **options))

    run(main())


def digits(fit: Fit) -> dict[str, str]:
    """The fitted constants as they are printed."""
    return {name: f"{getattr(fit.constants, name):.4g}" for name in fit.fitted}


def test_the_fit_of_one_busy_run_predicts_another() -> None:
    measured, other = timed(trace(30), SYNCHRONOUS), timed(trace(41)[11:], SYNCHRONOUS)
    done = fit_run(measured, SYNCHRONOUS, kernel_table(), used="a test", today=date(2026, 11, 21))
    # As the solver that scipy replaced: the constants of the server, to the printed digits.
    assert digits(done.fit) == {"gemm_compute": "0.45", "step_s": "0.006", "request_s": "0.025",
                                "tokenize_token_s": "2.3e-06"}  # fmt: skip
    predicted = predict(other, SYNCHRONOUS, done.fit.constants)
    before = predict(other, SYNCHRONOUS, kernel_table())
    assert max(abs(line.error) for line in compared(other, predicted)) < 0.05
    assert max(abs(line.error) for line in compared(other, before)) > 0.2
    assert "not checked" in done.file.checked


def test_the_fit_finds_what_each_chunk_costs_a_cpu(tmp_path: Path) -> None:
    """A GPU's next step is launched ahead of time, so the shipped constant is 0."""
    write_model(tmp_path / "model", ModelSize())
    core = {"name": "core", "peak_flops": 1e11, "bandwidth": 1e10, "memory_gib": 2.0,
            "multiprocessors": 1}  # fmt: skip
    (tmp_path / "core.json").write_text(json.dumps(core))
    server = EngineConfig(
        str(tmp_path / "model" / "config.json"), str(tmp_path / "core.json"), block_size=32,
        max_num_batched_tokens=1_024, max_num_seqs=64, async_scheduling=False,
    )  # fmt: skip
    truth = replace(kernel_table(), gemm_compute=0.5, chunk_s=3e-3)
    asked = [Timed(row, row.arrival_s, 1.0, 1.0, 1.0, 0) for row in trace(40)]
    measured = predict(asked, server, truth)
    done = fit_run(measured, server, kernel_table(), used="a test", today=date(2026, 11, 27))
    assert kernel_table().chunk_s == 0.0
    assert digits(done.fit) == {  # as the solver that scipy replaced
        "prefill_compute": "0.6137", "decode_bandwidth": "0.898", "step_s": "0.001359",
        "chunk_s": "0.003563", "request_s": "0.001511", "tokenize_token_s": "2.263e-06",
    }  # fmt: skip
    assert done.fit.constants.chunk_s == pytest.approx(3e-3, rel=0.2)
    smaller = replace(server, long_prefill_token_threshold=256)
    lines = compared(predict(asked, smaller, truth), predict(asked, smaller, done.fit.constants))
    assert max(abs(line.error) for line in lines) < 0.05


def test_prediction_is_what_a_replay_against_the_server_measures(tmp_path: Path) -> None:
    """Over HTTP in virtual time, with text for ids: the same times and hits, request by request."""
    rows = trace(24)
    replayed(rows, tmp_path / "run")
    measured = read_runs([tmp_path / "run"], rows)
    predicted = predict(measured, CONFIG)
    for theirs, ours in zip(measured, predicted, strict=True):
        assert ours.cached_tokens == theirs.cached_tokens
        assert ours.ttft_s == pytest.approx(theirs.ttft_s, rel=1e-3, abs=1e-4)
        assert ours.e2e_s == pytest.approx(theirs.e2e_s, rel=1e-3, abs=1e-4)
    assert (hits := hit_ratio(measured)) is not None
    assert hit_ratio(predicted) == hits > 0.1


def test_a_chat_has_the_tokens_of_its_template_too(tmp_path: Path) -> None:
    rows = trace(24)
    replayed(rows, tmp_path, endpoint="chat")
    measured = read_runs([tmp_path], rows)
    more = {
        one.row.input_tokens - row.input_tokens for one, row in zip(measured, rows, strict=True)
    }
    assert more == {4}  # the marks of both roles
    predicted = predict(measured, CONFIG)
    assert max(abs(line.error) for line in compared(measured, predicted)) < 1e-3
    assert hit_ratio(predicted) == pytest.approx(hit_ratio(measured), abs=0.01)


def test_the_command_says_how_true_the_engine_is(tmp_path: Path) -> None:
    """Against a server with its own constants it is exact, against any other it is not."""
    path, other = tmp_path / "trace.jsonl", tmp_path / "run"
    write_trace(path, iter(trace(12)))
    replayed(path, other)
    server = ("--model", "llama-3-8b", "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
              "--hold-out", "1")  # fmt: skip
    done = forebay(
        "engine", "fit", str(other), *server, "--gpu", "h200", "--within", "0.01", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert max(abs(line["error"]) for line in told["points"]) < 0.01
    assert told["hit_ratio"]["measured"] == told["hit_ratio"]["simulated"] > 0
    far = forebay("engine", "fit", str(other), *server, "--gpu", "h200-nvl", "--within", "0.01")
    assert far.returncode == 1
    assert "Furthest off: " in far.stdout
    absent = forebay("engine", "fit", str(tmp_path / "absent"), *server, "--gpu", "h200")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert (
        "absent: cannot be read (No such file or directory); give points, a run folder or"
        in absent.stderr
    )
    path.unlink()
    refused = forebay("engine", "fit", str(other), *server, "--gpu", "h200")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "give it as --trace" in refused.stderr


def test_the_command_fits_runs_of_a_trace(tmp_path: Path) -> None:
    rows = trace(12)
    measured = timed(rows)
    for name in ("one", "two"):
        write_run(
            tmp_path / name,
            [
                answer(
                    one.row.id, one.ttft_s, sent_s=one.sent_s, prompt_tokens=one.row.input_tokens,
                    output_tokens=one.row.output_tokens, cached_tokens=one.cached_tokens,
                    e2e_service_s=one.e2e_s, tpot_s=one.tpot_s,
                )
                for one in measured
            ],
        )  # fmt: skip
    write_trace(tmp_path / "trace.jsonl", iter(rows))
    runs = (str(tmp_path / "one"), str(tmp_path / "two"))
    model = ("--model", "llama-3-8b", "--gpu", "h200")
    server = ("--max-num-batched-tokens", "2048", "--max-num-seqs", "64")
    fits = ("--trace", str(tmp_path / "trace.jsonl"))
    out = tmp_path / "fitted.json"
    done = forebay("engine", "fit", *runs, *model, *server, *fits, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    written = read_calibration(out)
    assert written.as_json() == {key: told[key] for key in written.as_json()}
    fitted = {name: f"{told['constants'][name]:.4g}" for name in told["fitted"]}
    assert fitted == {"gemm_compute": "0.4576", "gemm_bandwidth": "0.6844", "request_s": "0.02488",
                      "tokenize_token_s": "2.4e-06"}  # fmt: skip
    assert "12 requests of trace.jsonl as replayed in one, two (medians)" in written.source
    assert told["hit_ratio"]["measured"] == told["hit_ratio"]["simulated"]
    assert {row["measure"] for row in told["points"]} == {"ttft", "tpot", "e2e"}
    EngineConfig("llama-3-8b", "h200", calibration=out)
    points = str(tmp_path / "points.csv")
    Path(points).write_text("kind,prompt_tokens,seconds\nttft,1024,0.04\n")
    for words, says in (
        ((*runs, *model), "run.json: names no trace; give it as --trace"),
        ((*runs, *model, *fits, "--hold-out", "3"), "'--hold-out': give 1 or less"),
        ((points, points, *model), "a second file of points; give one, or run folders"),
        ((points, *model, "--block-size", "32"), "--block-size describes the server of RUN"),
    ):
        refused = forebay("engine", "fit", *words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert says in refused.stderr


def test_medians_over_runs_request_by_request(tmp_path: Path) -> None:
    rows = [TraceRequest("a", 0.0, 100, 9), TraceRequest("b", 1.0, 100, 9)]
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, (a_s, b_s) in zip(folders, ((1.0, 5.0), (2.0, 4.0), (9.0, 6.0)), strict=True):
        write_run(folder, [answer("a", a_s), answer("b", b_s)])
    assert [one.ttft_s for one in read_runs(folders, rows)] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([("b", {})], "has no request a; --trace must be the replayed trace"),
        (
            [("a", {"prompt_tokens": 104}), ("b", {"prompt_tokens": 105})],
            "request b has 105 prompt tokens, in the trace it has 100",
        ),
        ([("a", {"prompt_tokens": 99}), ("b", {"prompt_tokens": 99})], "request a has 99 prompt"),
        ([("a", {"prompt_tokens": None}), ("b", {})], "request a has 0 prompt tokens"),
        ([("a", {}), ("b", {"prompt_tokens": 400})], "must count tokens as it does"),
        ([("a", {}), ("b", {}), ("c", {})], "has requests that are not in the trace"),
        ([("a", {}), ("b", {"outcome": "failed"})], "1 of 2 requests failed, b first"),
        ([("a", {}), ("b", {"backend": "other"})], "several servers"),
        ([("a", {"outcome": "rejected"})], "no request was answered"),
    ],
)
def test_a_run_that_is_not_of_the_trace(
    answers: list[tuple[str, dict[str, Any]]], says: str, tmp_path: Path
) -> None:
    rows = [TraceRequest("a", 0.0, 100, 9), TraceRequest("b", 1.0, 100, 9)]
    write_run(tmp_path, [answer(name, 1.0, **more) for name, more in answers])
    with pytest.raises(InputError, match=says):
        read_runs([tmp_path], rows)


def test_a_run_may_be_shorter_than_its_trace(tmp_path: Path) -> None:
    rows = [TraceRequest("a", 0.0, 100, 9), TraceRequest("b", 1.0, 100, 9)]
    write_run(tmp_path, [answer("a", 1.0)])
    assert [one.row.id for one in read_runs([tmp_path], rows)] == ["a"]


def test_a_failed_request_is_played_and_not_compared(tmp_path: Path) -> None:
    """A prompt that failed halfway delays the others; a rejected one was never in the engine."""
    rows = [TraceRequest(f"r{at}", 0.0, 8_000, 9) for at in range(40)]
    ends: dict[str, dict[str, Any]] = {
        "r0": {"outcome": "failed", "reason": "truncated", "status": 200, "output_tokens": 3},
        "r1": {"outcome": "rejected", "reason": "queue_full", "status": 429},
        "r2": {"outcome": "failed", "reason": "connect"},
    }
    write_run(
        tmp_path,
        [answer(row.id, 1.0, prompt_tokens=8_000, **ends.get(row.id, {})) for row in rows],
    )
    measured = read_runs([tmp_path], rows)
    assert [one.row.id for one in measured] == ["r0", *(f"r{at}" for at in range(3, 40))]
    assert [one.finished for one in measured] == [False] + [True] * 37
    predicted = predict(measured, CONFIG)
    assert {line.requests for line in compared(measured, predicted)} == {37}
    alone = predict(measured[1:], CONFIG)
    assert sum(one.ttft_s for one in predicted[1:]) > 1.02 * sum(one.ttft_s for one in alone)


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_prompts_of_text_hit_the_cache_too(kind: str) -> None:
    """The second question about a document finds it; another document shares nothing."""
    texts = [
        f"{name} " * 4_000 + question for name, question in (("aa", "x"), ("aa", "y"), ("bb", "x"))
    ]
    rows = [
        TraceRequest(f"r{at}", 10.0 * at, 3_000, 9, text=text)
        if kind == "text"
        else TraceRequest(
            f"r{at}", 10.0 * at, 3_000, 9, messages=({"role": "user", "content": text},)
        )
        for at, text in enumerate(texts)
    ]
    asked = [Timed(row, row.arrival_s, 1.0, 1.0, 1.0, 0) for row in rows]
    first, second, other = (one.cached_tokens for one in predict(asked, CONFIG))
    assert first == other == 0
    assert second is not None
    assert 2_900 < second < 3_000


def test_the_servers_flags_are_those_of_the_simulated_engine(tmp_path: Path) -> None:
    """`engine fit` takes every flag that decides how a server schedules."""
    shown = forebay("engine", "fit", "--help").stdout
    for flag in EngineFlags().values():
        words = flag.replace("_", "-")
        assert re.search(rf"--(\[no-\])?{words}[ ,\n]", shown)
    write_trace(tmp_path / "trace.jsonl", iter(trace(4)))
    wrong = ("--vllm-version", "0.11", "--watermark", "0.5", "--model", "llama-3-8b")
    told = forebay("engine", "fit",
        str(tmp_path), *wrong, "--gpu", "h200", "--trace", str(tmp_path / "trace.jsonl"),
    )  # fmt: skip
    assert told.returncode == 2
    assert "--watermark: vLLM 0.11 has no such option" in told.stderr


def answer(name: str, ttft_s: float, **more: Any) -> dict[str, Any]:
    row = {"id": name, "backend": "one", "sent_s": 0.0, "outcome": "ok", "prompt_tokens": 100}
    row |= {"cached_tokens": 0, "output_tokens": 9, "ttft_service_s": ttft_s}
    return {**row, "e2e_service_s": ttft_s + 1.0, "tpot_s": 0.125, **more}


def write_run(folder: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    full = [{name: row.get(name) for name in SCHEMA.names} for row in rows]
    pq.write_table(pa.Table.from_pylist(full, SCHEMA), str(folder / "requests.parquet"))


def test_requests_wait_for_the_request_time_and_nothing_else() -> None:
    from forebay.replay.engine.engine import EngineCore
    from forebay.replay.engine.request import EngineRequest

    core = EngineCore(CONFIG)
    early, late = (
        EngineRequest("early", 64, 1, arrival_s=0.0),
        EngineRequest("late", 64, 1, arrival_s=50.0),
    )
    play(core, [late, early])
    alone_s = early.first_token_s
    assert alone_s > core.config.step_constants().server_times().request_s
    assert late.first_token_s - 50.0 == pytest.approx(alone_s)


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
}  # fmt: skip
GPU = {"name": "card", "peak_flops": 9.895e14, "bandwidth": 4.8e12, "memory_gib": 139.8,
       "multiprocessors": 132}  # fmt: skip


def test_a_model_and_a_gpu_from_files_are_those_built_in(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    model = find_model(str(folder / "config.json"))
    assert model == find_model("llama-3-8b")
    gpu = find_gpu(str(tmp_path / "gpu.json"))
    assert gpu == replace(find_gpu("h200"), name="card")
    config = EngineConfig(str(folder / "config.json"), str(tmp_path / "gpu.json"))
    assert config.kv_budget.blocks == EngineConfig("llama-3-8b", "h200").kv_budget.blocks
    assert EngineConfig(model, gpu).served_name == "llama-3-8b"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peak_flops": "fast"}, "gpu.json: peak_flops is 'fast'; give a number above 0"),
        ({"bandwidth": None}, "gpu.json: bandwidth is None"),
        ({"name": 3}, "gpu.json: name is 3; give text"),
        ({"flops": 1}, "gpu.json: flops: unknown key; known are name, peak_flops"),
    ],
)
def test_a_bad_gpu_file_is_named_by_its_key(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({**GPU, **change}))
    with pytest.raises(InputError, match=says):
        find_gpu(str(tmp_path / "gpu.json"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_local_experts": 8, "model_type": "mixtral"}, "num_experts_per_tok .* is missing"),
        ({"mamba_d_state": 128, "model_type": "falcon_h1"}, "mamba_d_state: this model has a"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_model_whose_steps_cannot_be_priced(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **change}))
    with pytest.raises(InputError, match=says):
        find_model(str(tmp_path / "config.json"))
