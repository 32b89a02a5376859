"""`forebay simulate`: scenarios, sweeps, run folders and bad input."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest
from commands import refusal

from forebay.analysis.compare.figures import figures
from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.run import RunData
from forebay.proxy.cli import main
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import CalibrationFile
from forebay.replay.plan.slo import parse_slos
from forebay.replay.plan.source import TraceSource
from forebay.replay.results.folder import HLOG, TABLE
from forebay.replay.results.row import Row
from forebay.replay.results.summary import RunTotals
from forebay.replay.sim.engine.served import can_skip, served_engine
from forebay.replay.sim.engine.stepping import SteppingEngine
from forebay.replay.sim.run_folder import keep
from forebay.replay.sim.scenario import DIRECT, Scenario, simulate
from forebay.replay.sim.summary import summarise
from forebay.replay.sim.sweep import (
    SweepCase,
    cases,
    describe,
    parse_axis,
    run_all,
    run_on_ray,
    simulate_case,
)
from forebay.replay.sim.table import results_table
from forebay.replay.sim.workload import SimWorkload, with_blocks
from forebay.traces.edit.describe import describe as describe_requests
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import read_hlog
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents

SPEC = ChatBesideDocuments(
    chat_rate_per_s=4.0, document_rate_per_s=0.2, questions=4, duration_s=60.0, seed=3
)
TRACE = list(chat_beside_documents(SPEC))
SLOS = parse_slos("chat.ttft=2s,document.ttft=15s", ["chat", "document"])


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "trace.jsonl"
    write_trace(str(path), TRACE)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main(["simulate", *map(str, words), "--json"]) == 0
    return orjson.loads(capsys.readouterr().out)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def alike(value: Any) -> Any:
    """Compare equal with the same value but for the load of streams, which varies by the step."""
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def test_computing_every_step_gives_the_same_summary() -> None:
    exact, skipped = (
        dict(leaves(summarise(simulate(TRACE, Scenario(exact=exact)), SLOS, 60.0)))
        for exact in (True, False)
    )
    assert exact == {path: alike(value) for path, value in skipped.items()}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scheduling_policy", "priority"),
        ("scheduler_reserve_full_isl", False),
        ("max_num_active_seqs", 8),
        ("prefill_schedule_interval", 4),
        ("vllm_version", "0.20"),
    ],
)
def test_engines_that_cannot_skip_are_stepped(option: str, value: Any) -> None:
    config = EngineConfig(**{option: value})
    assert isinstance(served_engine(config).engine, SteppingEngine)
    assert not can_skip(config)
    assert can_skip(EngineConfig())
    done = simulate(TRACE[:40], Scenario(config))
    assert all(o.finished_s or o.reject for o in done.outcomes)


def test_summary_counts_what_the_outcomes_say() -> None:
    done = simulate(TRACE, Scenario())
    summary = summarise(done, SLOS, 60.0)
    finished = [o for o in done.outcomes if o.finished_s is not None]
    good = [
        o for o in finished if (o.ttft_s or 0.0) <= (2 if o.request.input_tokens <= 5_000 else 15)
    ]
    assert summary["requests"] == len(TRACE)
    assert summary["completed"] == len(finished)
    assert summary["completed"] + sum(summary["rejected"].values()) == len(TRACE)
    assert summary["goodput_per_s"] == pytest.approx(len(good) / 60.0)
    assert summary["attainment"] == pytest.approx(len(good) / len(TRACE))
    assert summary["hit_ratio"] == pytest.approx(
        sum(o.cached_tokens for o in finished) / sum(o.request.input_tokens for o in finished)
    )
    ttfts = sorted(o.ttft_s or 0.0 for o in finished)
    assert summary["ttft_ms"]["all"]["p50"] == pytest.approx(1e3 * ttfts[-(-len(ttfts) // 2) - 1])
    assert sum(summary["prompt_tokens_per_backend"].values()) == summary["prompt_tokens"]


def test_the_hit_ratio_of_one_engine_is_the_ideal() -> None:
    trace = list(chat_beside_documents(ChatBesideDocuments(duration_s=10.0)))
    done = simulate(trace, Scenario(gpus=1, policy=DIRECT))
    assert summarise(done, SLOS, 10.0)["hit_ratio"] == describe_requests(trace).ideal_hit_ratio


def test_the_keys_are_those_of_a_replay() -> None:
    """Readers of summary.json need not know which it is."""
    replayed = RunTotals(["chat", "document"], SLOS).summary({}, 60.0, closed=False, scale=1.0)
    done = simulate(TRACE, Scenario())
    summary = summarise(done, SLOS, 60.0)
    assert set(replayed) <= set(summary)
    for key, value in replayed.items():
        if key.endswith("_ms"):
            assert set(summary[key]) == set(value), key
    count = summary["completed"]
    assert summary["ttft_service_ms"] == summary["ttft_ms"]  # sent when it is due
    assert set(summary["schedule_lag_ms"].values()) == {len(TRACE), 0.0}
    for key in ("itl_ms", "icl_ms"):  # every gap of its own is not known
        assert set(summary[key]["all"].values()) == {0, None}
    assert isinstance(summary["ttft_ms"]["all"]["p99.9"], float)
    assert summary["ttft_ms"]["all"]["count"] == count
    infinite = summary["ttft_ms_failures_as_inf"]["all"]
    assert infinite["count"] == len(TRACE)
    assert (infinite["max"] == "inf") is (count < len(TRACE))


def test_a_table_shows_the_highest_percentile_that_is_firm() -> None:
    done = simulate(TRACE, Scenario())
    summary = {"case": {}, **summarise(done, SLOS, 60.0)}
    table = results_table([summary])
    shown = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert summary["ttft_ms"]["document"]["p99"] is not None
    longest = summary["ttft_ms"]["document"]["max"] / 1e3
    assert shown["document\np99"] == f"max {longest:.3g}"  # no percentile is firm
    assert shown["met"] != "-"


def test_the_same_twice_and_a_sweep_in_processes(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ("--sweep", "gpus=1,2", "--sweep", "policy=direct,warm_or_least_work")
    first = told(capsys, trace_file, *axes, "--jobs", 2)
    again = told(capsys, trace_file, *axes, "--jobs", 1)
    for result in (*first, *again):
        del result["cpu_s"]
    assert first == again
    assert [result["case"] for result in first] == [
        {"gpus": gpus, "policy": policy}
        for gpus in (1, 2)
        for policy in ("direct", "warm_or_least_work")
    ]
    direct, shaped = first[2:]
    assert shaped["hit_ratio"] > direct["hit_ratio"]


def test_engine_options_are_swept(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = told(
        capsys, trace_file, "--sweep", "max-num-batched-tokens=512,8192", "--jobs", 1
    )
    assert small["stall_ms"]["all"]["max"] < large["stall_ms"]["all"]["max"] / 4


def test_a_mixed_fleet_gives_each_engine_its_gpu_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chats alone: otherwise the place of a few documents decides who computes most."""
    chats = tmp_path / "chats.jsonl"
    write_trace(str(chats), [row for row in TRACE if row.input_tokens < 8_192])
    words = (chats, "--gpus", 3, "--load", 0.6)
    mixed = told(capsys, *words, "--gpu", "h200+h100+l40s")
    tokens = mixed["prompt_tokens_per_backend"]
    assert set(tokens) == {"gpu0", "gpu1", "gpu2"}
    assert tokens["gpu2"] < 0.5 * min(tokens["gpu0"], tokens["gpu1"])
    alike, again = told(capsys, *words, "--sweep", "gpu=h200,h200+h100+l40s")
    assert again["ttft_ms"] == mixed["ttft_ms"]
    # Load is a share of what these engines complete: less than three H200s.
    assert mixed["offered_rate_per_s"] < 0.9 * alike["offered_rate_per_s"]


def test_it_says_on_which_gpus_the_constants_were_not_measured(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(trace_file), "--json", "--load", "0.5", "--jobs", "1"]
    remarks = [f"constants measured on h200-sxm; not on {gpu}" for gpu in ("h100-sxm", "b200")]
    assert main([*words, "--gpus", "3", "--sweep", "gpu=h200,h200+h100+b200"]) == 0
    out, err = capsys.readouterr()
    assert [case["constants_remarks"] for case in orjson.loads(out)] == [[], remarks]
    assert err.splitlines() == [f"forebay simulate: {remark}" for remark in remarks]


def test_it_takes_a_calibration_of_its_gpu(
    tmp_path: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cal.json"
    slow = replace(kernel_table(), step_s=0.5)
    written = CalibrationFile("llama-3-8b", "h200-sxm", "2026-11-27", "a test", "", slow)
    file.write_bytes(orjson.dumps(written.as_json()))
    words = ("--rate", 1, "--calibration", file)
    assert told(capsys, trace_file, *words)["tpot_ms"]["all"]["p50"] >= 500
    for gpu in ("h100", "h200+h100"):
        assert main(["simulate", str(trace_file), *map(str, words), "--gpu", gpu]) == 2
        assert "is for llama-3-8b on h200-sxm" in capsys.readouterr().err


def test_engines_of_a_mixed_fleet_are_those_named() -> None:
    scenario = Scenario(gpus=4, gpu_mix=("h200", "l40s"))
    named = [scenario.engine_config(number).gpu for number in range(4)]
    assert named == ["h200", "l40s", "h200", "l40s"]
    pools = [scenario.new_engine(number).kv_tokens for number in range(2)]
    assert pools[0] > 4 * pools[1]


def test_pace(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = told(capsys, trace_file, "--rate", 2)
    fast = told(capsys, trace_file, "--rate", 4)
    assert slow["offered_rate_per_s"] == pytest.approx(2.0)
    assert slow["window_s"] == pytest.approx(2 * fast["window_s"])
    half, whole = told(capsys, trace_file, "--sweep", "load=0.5,1.0", "--jobs", 1)
    assert whole["offered_rate_per_s"] == pytest.approx(2 * half["offered_rate_per_s"])


def test_a_kept_run_is_read_like_a_replay(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in ("direct", "warm_or_least_work"):
        told(capsys, trace_file, "--policy", policy, "--out", tmp_path / policy)
    assert main(["compare", str(tmp_path / "direct"), str(tmp_path / "warm_or_least_work")]) == 0
    assert "chat" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "direct"), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["simulate", str(trace_file), "--out", str(tmp_path / "direct")]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_engine_options_are_kept_with_the_run(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus", 1, "--tp", 2, "--quantization", "fp8", "--max-num-batched-tokens", 2_048,
             "--max-num-seqs", 64)  # fmt: skip
    kept = told(capsys, trace_file, *words, "--out", tmp_path / "run")
    engine = orjson.loads((tmp_path / "run" / "run.json").read_bytes())["engine"]
    names = ("tensor_parallel_size", "quantization", "max_num_batched_tokens", "max_num_seqs")
    assert [engine[name] for name in names] == ["2", "fp8", "2048", "64"]
    swept = told(capsys, trace_file, *words[:2], "--sweep", "tensor_parallel_size=2",
                 "--sweep", "quantization=fp8", "--sweep", "max_num_batched_tokens=2048",
                 "--sweep", "max_num_seqs=64", "--jobs", 1)  # fmt: skip
    assert kept["ttft_ms"] == swept["ttft_ms"]
    assert kept["constants_remarks"] == swept["constants_remarks"]
    assert "all-reduce" in kept["constants_remarks"][0]


WAITING = Config.model_validate(
    {
        "backends": [{"url": "http://127.0.0.1:8001", "max_concurrency": 2}],
        "buckets": [{"name": "everything", "up_to": 131_072, "max_queue": 9, "max_wait": "1s"}],
    }
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A run with rejected requests, some of them after a wait."""
    case = SweepCase({}, Scenario(gpus=1, proxy=WAITING), SimWorkload(TRACE), SLOS)
    done, window_s = simulate_case(case)
    summary = describe(case, done, window_s)
    assert summary["completed"] > 50
    assert summary["late_rejections"] > 10
    folder = tmp_path_factory.mktemp("kept")
    keep(folder, case, done, summary, force=False)
    return load_run(folder)


def test_the_queue_wait_is_that_of_completed_requests(kept: RunData) -> None:
    """The log agrees with summary.json and `compare`; rejected requests are under `reject`."""
    logs = read_hlog(kept.path / HLOG)
    completed, refused = kept.summary["completed"], sum(kept.summary["rejected"].values())
    assert kept.summary["queue_ms"]["all"]["count"] == completed
    assert figures(kept, None).latency["queue"].count == completed
    assert sum(one.histogram.total_count for one in logs["queue_wait.everything"]) == completed
    assert sum(one.histogram.total_count for one in logs["reject.everything"]) == refused
    longest_ms = max(one.histogram.max_value for one in logs["queue_wait.everything"]) / 1e3
    assert longest_ms == pytest.approx(kept.summary["queue_ms"]["all"]["max"], rel=2e-3)


def test_the_log_has_a_line_a_second_and_tag(kept: RunData) -> None:
    """In virtual time as in a replay, an answer is in the second in which it ended."""
    logs = read_hlog(kept.path / HLOG)
    ended = pyarrow.parquet.read_table(kept.path / TABLE)["done_s"].to_numpy()
    for tag, outcome in (("e2e_response.everything", "ok"), ("reject.everything", "rejected")):
        second = np.maximum(np.ceil(ended[kept.words["outcome"] == outcome]), 1.0) - 1.0
        starts, counts = np.unique(second, return_counts=True)
        assert len(starts) > 20
        assert [one.start_s for one in logs[tag]] == starts.tolist()
        assert [one.histogram.total_count for one in logs[tag]] == counts.tolist()
    last_s = round(float(ended.max()), 3)
    for interval in itertools.chain.from_iterable(logs.values()):
        assert 0.0 < interval.length_s <= 1.0
        end_s = interval.start_s + interval.length_s
        assert interval.length_s == 1.0 or end_s == pytest.approx(last_s)


def test_the_log_of_years_has_as_many_lines_as_that_of_an_hour(tmp_path: Path) -> None:
    rows = [TraceRequest(f"{n}", n * 20_000.0, 10, 1) for n in range(5_000)]  # three years
    case = SweepCase({}, Scenario(), SimWorkload(rows), SLOS)
    done, window_s = simulate_case(case)
    keep(tmp_path / "run", case, done, describe(case, done, window_s), force=False)
    lines = (tmp_path / "run" / HLOG).read_text().splitlines()
    one_tag = tmp_path / "e2e_response.chat.hlog"  # to decode all five tags takes seconds
    tagged = "Tag=e2e_response.chat,"
    one_tag.write_text("\n".join(k for k in lines if k.startswith(("#", '"', tagged))) + "\n")
    log = read_hlog(one_tag)["e2e_response.chat"]
    assert 3_590 < len(log) <= 3_600
    assert sum(one.histogram.total_count for one in log) == 5_000


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_row_that_was_rejected_is_an_arrival(
    stream: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for one token: an engine refuses a request for none."""
    path = tmp_path / "trace.jsonl"
    rows = [TraceRequest(f"r{n}", n * 0.5, 900, 4 * (n % 2), status=200) for n in range(20)]
    write_trace(path, rows)
    found = told(capsys, path, *stream)
    assert (found["requests"], found["completed"]) == (20, 20)


def test_text_is_shared_by_its_equal_beginnings() -> None:
    rows = [
        TraceRequest(str(n), 0.0, 2_000, 1, text="a document " * 700 + question)
        for n, question in enumerate(("who?", "why?"))
    ]
    first, second = (with_blocks(row).blocks or () for row in rows)
    assert len(first) == 4
    assert first[:3] == second[:3]
    assert first[3] != second[3]


def test_a_proxy_configuration_is_used(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(
        'backends: [{url: "http://127.0.0.1:8001", max_concurrency: 2}]\n'
        "buckets: [{name: everything, up_to: 131072, max_queue: 0, max_wait: 1s}]\n"
        "routing: least_work\n"
    )
    result = told(capsys, trace_file, "--config", config, "--slo", "everything.ttft=3s")
    assert set(result["ttft_ms"]) == {"all", "everything"}
    assert result["rejected"]["queue_full"] > 0


SPLIT = """
backends: [{name: short, url: "http://h:1"}, {name: long, url: "http://h:2"}]
buckets:
  - {name: chat, up_to: 5000, max_wait: 2s, backends: [short]}
  - {name: document, up_to: 131072, max_wait: 60s, backends: [long]}
"""


def test_a_bucket_keeps_to_the_backends_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(SPLIT)
    proxy = load_config(file, {}, {})
    outcomes = simulate(TRACE, Scenario(gpus=2, proxy=proxy)).outcomes
    places = {(o.request.input_tokens > 5_000, o.backend) for o in outcomes if o.backend}
    assert places == {(False, "short"), (True, "long")}


def test_named_backends_are_the_whole_fleet(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(SPLIT)
    with pytest.raises(InputError, match=r"bucket chat names its backends.*give --gpus 2"):
        Scenario(gpus=4, proxy=load_config(file, {}, {}))


def test_engines_have_the_flag_that_the_configuration_names(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text('backends: [{url: "http://h:1", long_prefill_token_threshold: 2048}]\n')
    flagged = told(capsys, trace_file, "--config", config)
    config.write_text('backends: [{url: "http://h:1"}]\n')
    plain = told(capsys, trace_file, "--config", config)
    assert flagged["ttft_ms"] != plain["ttft_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus 0: give 1 or more"),
        (["--gpu", "h200+h100+l40s"], "--gpu h200+h100+l40s: names 3 GPUs; give --gpus 3 or more"),
        (["--gpu", "h200+tpu", "--gpus", "2"], "--gpu tpu: no such GPU"),
        (["--policy", "magic"], "no such policy"),
        (["--policy", "round_robin"], "no such policy; did you mean direct? One of: warm_or"),
        (["--policy", "round-robin"], "did you mean direct?"),
        (["--policy", "least-connections"], "did you mean least_connections?"),
        (["--sweep", "gpus"], "is not NAME=VALUE,VALUE"),
        (["--sweep", "gpu_count=2"], "no option 'gpu_count'"),
        (["--sweep", "gpus=two"], "is not a whole number"),
        (["--sweep", "gpus=2", "--sweep", "gpus=4"], "write all values once, gpus=2,4"),
        (["--sweep", "max-num-seqs=8", "--sweep", "max_num_seqs=9"], "max_num_seqs=8,9"),
        (["--sweep", "policy=magic"], "no such policy"),
        (["--sweep", "enable_prefix_caching=maybe"], "is neither true nor false"),
        (["--rate", "0"], "--rate: 0 is not a number above 0"),
        (["--rate", "1", "--load", "0.5"], "give one of them"),
        (["--arrivals", "closed:4"], "needs arrival times"),
        (["--model", "gpt-9"], "no such model"),
        (["--slo", "chat.ttft=never"], "is not METRIC=TIME"),
        (["--sweep", "max_model_len=8192"], "use --too-long"),
    ],
)
def test_bad_input(trace_file: Path, words: list[str], message: str) -> None:
    error = refusal("simulate", str(trace_file), *words)
    assert message in error


def test_a_trace_without_lengths_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text('{"id": "a", "arrival_s": 0.0}\n')
    error = refusal("simulate", str(path))
    assert "bare.jsonl" in error


def test_a_run_says_which_trace_it_was(trace_file: Path, tmp_path: Path) -> None:
    for name, trace in (("file", trace_file), ("rows", TRACE), ("pipe", Path("/dev/null"))):
        case = SweepCase({}, Scenario(), SimWorkload(trace), SLOS)
        played = SweepCase({}, Scenario(), SimWorkload(TRACE), SLOS)
        done, window_s = simulate_case(played)
        keep(tmp_path / name, case, done, describe(played, done, window_s), force=False)
        told = orjson.loads((tmp_path / name / "run.json").read_bytes())["trace"]
        if name == "pipe":  # read once, and gone
            assert told == {"path": "/dev/null", "sha256": None}
        else:
            assert told["sha256"] == TraceSource(trace).sha256()


def test_a_trace_out_of_order_is_refused() -> None:
    rows = [TraceRequest("a", 1.0, 10, 1), TraceRequest("b", 0.5, 10, 1)]
    with pytest.raises(InputError, match="arrives before"):
        simulate(rows, Scenario(policy=DIRECT))


def test_cases_vary_the_last_axis_fastest() -> None:
    axes = dict(map(parse_axis, ["seed=1,2", "gpus=1,2"]))
    listed = list(cases(axes, Scenario(), SimWorkload(TRACE[:5]), SLOS))
    assert [tuple(case.values.values()) for case in listed] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [result["requests"] for result in run_all(listed, 1)] == [5] * 4


def test_none_leaves_out_an_option_without_a_default() -> None:
    axes = dict([parse_axis("kv_offloading_size=none,64")])
    listed = list(cases(axes, Scenario(), SimWorkload(TRACE[:5]), SLOS))
    assert [case.scenario.engine.kv_offloading_size for case in listed] == [None, 64.0]
    with pytest.raises(InputError, match="'none' is not a whole number"):
        parse_axis("block_size=none")


def test_ray_changes_nothing() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'forebay[ray]'")
    axes = dict([parse_axis("gpus=1,2")])
    listed = list(cases(axes, Scenario(), SimWorkload(TRACE[:50]), SLOS))
    told = [list(run_all(listed, 1)), list(run_on_ray(listed, "local"))]
    for result in (*told[0], *told[1]):
        del result["cpu_s"]
    assert told[0] == told[1]


def test_ray_that_is_missing_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'forebay\[ray\]'"):
        list(run_on_ray([], "local"))


SESSION_SLOS = parse_slos("session.e2e=30s", [])


@pytest.mark.parametrize("limit_s", [5.0, 30.0, 300.0])
def test_a_replay_a_simulation_and_its_folder_judge_tasks_alike(
    tmp_path: Path, limit_s: float
) -> None:
    slos = parse_slos(f"session.e2e={limit_s}s,ttft=10s", [])
    rows = [replace(row, session=f"s{at % 40}") for at, row in enumerate(TRACE)]
    case = SweepCase({}, Scenario(), SimWorkload(rows), slos)
    done, window_s = simulate_case(case)
    summary = summarise(done, slos, window_s)
    keep(tmp_path / "run", case, done, summary, force=False)
    run = load_run(tmp_path / "run")
    totals = RunTotals(["chat", "document"], slos)
    columns = pyarrow.parquet.read_table(run.path / TABLE).to_pydict()
    for values in zip(*columns.values(), strict=True):
        totals.add(Row(*values))
    replayed = totals.summary({}, window_s, closed=False, scale=1.0)
    assert summary["sessions"] == replayed["sessions"] == 40
    assert replayed["session_e2e_ms"]["all"] == pytest.approx(summary["session_e2e_ms"]["all"])
    found = figures(run, None, slos)
    assert found.attainment == summary["attainment"] == replayed["attainment"]
    assert found.latency["session_e2e"].count == summary["session_e2e_ms"]["all"]["count"]


def test_a_target_of_tasks_needs_sessions() -> None:
    done = simulate([replace(row, session=None) for row in TRACE[:5]], Scenario())
    with pytest.raises(InputError, match=r"session\.e2e: no request of the trace has a session"):
        summarise(done, SESSION_SLOS, 1.0)
