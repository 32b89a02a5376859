"""`forebay size`: the search, what it judges, what physics forbids, and the formulas beside it."""

import json
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot, inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fakes.kv_models import write_config

from forebay.analysis.charts.users_and_gpus import Curve, draw
from forebay.analysis.sizing import guide
from forebay.analysis.sizing.binding import Usage, binding
from forebay.analysis.sizing.floor import alone, check_floor
from forebay.analysis.sizing.guide import curves
from forebay.analysis.sizing.judge import JudgedWindow, judge
from forebay.analysis.sizing.naive import erlang_c, formulas
from forebay.analysis.sizing.options import SizeArguments
from forebay.analysis.sizing.search import LeastCount, Question, least_gpus
from forebay.analysis.sizing.targets import DEFAULT_SLO, default_targets, parse_targets
from forebay.analysis.sizing.workers import JobRunner
from forebay.analysis.sizing.workload import Users, class_of
from forebay.analysis.statistics.intervals import share_ratio_interval, wilson
from forebay.proxy.cli import main
from forebay.proxy.config.schema import Config
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import ModelFlags, changed_words
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.lengths import Fixed

LLAMA = EngineConfig()
TARGETS = parse_targets(DEFAULT_SLO)
USERS = Users(users=100, document_tokens=Fixed(32_000))


@dataclass(frozen=True)
class Needs:
    """Stands for a `Question` that `gpus` GPUs answer."""

    gpus: int
    unit = "GPU"

    def ask(self, gpus: int) -> "Said":
        return Said(gpus, gpus >= self.gpus)


@dataclass(frozen=True)
class Said:
    gpus: int
    met: bool
    attained: tuple[()] = ()
    busy: float = 0.5
    usage = Usage(0.1, 0.5, 0.1, 0.2, 8, 64)


@pytest.mark.parametrize("guess", [1, 2, 7, 20, 64])
def test_search_finds_the_least_and_asks_just_below_it(guess: int) -> None:
    for needed in range(1, 65):
        found = least_gpus(Needs(needed), guess, 64)  # type: ignore[arg-type]
        assert found.gpus == needed
        assert found.asked[needed].met
        assert needed == 1 or not found.asked[needed - 1].met
        assert len(found.asked) <= 13


def test_search_ends_at_the_most() -> None:
    with pytest.raises(InputError, match="not met with 64 GPUs either"):
        least_gpus(Needs(65), 3, 64)  # type: ignore[arg-type]


def test_targets() -> None:
    chat, document, tpot = TARGETS
    assert (chat.kind, chat.metric, chat.share, chat.limit_s) == ("chat", "ttft", 0.95, 2.0)
    assert document.name == "document.ttft_p95"
    assert (tpot.kind, tpot.limit_s, str(tpot)) == (None, 0.1, "tpot_p95=100ms")
    (itl,) = parse_targets("itl_p99=80ms")
    assert (itl.metric, itl.share) == ("stall", 0.99)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=2s", "'ttft=2s' names no percentile; for 95 % of the requests write ttft_p95=2s"),
        ("ttft", "is not [BUCKET.]METRIC_pNN=TIME"),
        ("ttft_p0=2s", "is not [BUCKET.]METRIC_pNN=TIME"),
        ("ttft_p100=2s", "is not [BUCKET.]METRIC_pNN=TIME"),
        ("speed_p95=2s", "no metric 'speed'"),
        ("image.ttft_p95=2s", "no bucket 'image'"),
        ("ttft_p95=0s", "cannot be met"),
        ("ttft_p95=soon", "is not METRIC=TIME"),
    ],
)
def test_bad_targets(text: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_targets(text)
    assert said in str(raised.value)


def test_traffic_is_as_asked_in_total_and_random_in_time() -> None:
    users = Users(users=120, document_tokens=Fixed(8_000), shared=0.5, documents=4)
    rows = users.requests(3, 200.0)
    assert rows == users.requests(3, 200.0)
    assert rows != users.requests(4, 200.0)
    assert len(rows) == 400
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert 0 < rows[0].arrival_s < rows[-1].arrival_s < 200
    documents = [row for row in rows if class_of(row) == "document"]
    assert len(documents) == 120
    common = [row for row in documents if row.blocks]
    assert len(common) == 60
    by_name: dict[str, set[tuple[int, ...]]] = {}
    for row in common:
        assert row.input_tokens == 15 * 512 + 64  # the document in whole blocks, and a question
        assert row.document is not None
        assert row.blocks is not None
        by_name.setdefault(row.document, set()).add(row.blocks[:15])
    assert all(len(beginnings) == 1 for beginnings in by_name.values())
    assert len({next(iter(one)) for one in by_name.values()}) == len(by_name) > 1


@pytest.mark.parametrize(
    ("length", "tokens", "blocks"),
    [(Fixed(511), 511, 0), (Fixed(512), 512, 1), (Fixed(130_900), 130_560, 255)],
)
def test_a_shared_document_is_never_longer_than_it_was_drawn(
    length: Fixed, tokens: int, blocks: int
) -> None:
    users = Users(users=5, document_share=1.0, shared=1.0, documents=1, document_tokens=length)
    first, *_ = users.requests(0, 60.0)
    assert first.input_tokens == tokens + 64
    assert first.blocks is not None
    assert len(first.blocks) == -(-(tokens + 64) // 512)
    others = [row.blocks for row in users.requests(0, 60.0)[1:] if row.document == first.document]
    assert others
    assert all(row is not None and row[:blocks] == first.blocks[:blocks] for row in others)
    assert not any(row and set(row[blocks:]) & set(first.blocks) for row in others)


def test_a_shared_document_that_just_fits_the_context_is_sized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rounded up, 7,700 tokens and a question were more than the context of 7,900."""
    line = "size --users 40 --document-tokens 7700 --max-model-len 7900 --chat-tokens 100"
    line += " --chat-output-tokens 10 --window 120 --jobs 1 --json"
    whatifs = run(line, capsys)["sensitivity"]["gpus"]
    assert whatifs["all questions about 50 shared documents"] == 1


def test_only_what_is_not_met_counts_as_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question(USERS, Scenario(LLAMA, 1), TARGETS, JudgedWindow(30, 120), 0)
    base = LeastCount(question, 1, {})
    tight = replace(question, targets=parse_targets("tpot_p95=3ms"))
    assert guide._vary(tight, base) is None

    def broken(*_: object) -> LeastCount:
        raise InputError("of something else")

    monkeypatch.setattr(guide, "least_gpus", broken)
    with pytest.raises(InputError, match="of something else"):
        guide._vary(question, base)


def test_bursts_bunch_arrivals() -> None:
    def spread(cv: float) -> float:
        rows = replace(USERS, users=600, cv=cv).requests(0, 600.0)
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(rows)]
        mean = sum(gaps) / len(gaps)
        return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)

    assert spread(1.0) == pytest.approx(1.0, abs=0.05)
    assert spread(3.0) == pytest.approx(3.0, abs=0.3)


def test_a_refused_request_took_forever_and_the_ends_are_not_judged() -> None:
    proxy = Config.model_validate(
        {"buckets": [{"name": "all", "up_to": 131_072, "max_queue": 0, "max_wait": 5}]}
    )
    rows = [TraceRequest(f"d{n}", n * 0.01, 60_000, 10, document="x") for n in range(8)]
    rows += [TraceRequest("late", 100.0, 10, 10)]
    simulated = simulate(rows, Scenario(LLAMA, 1, proxy=proxy))
    refused = sum(outcome.reject is not None for outcome in simulated.outcomes)
    assert 0 < refused < 8
    targets = parse_targets("document.ttft_p50=1m,document.ttft_p99=1m,tpot_p99=10s")
    judged = judge(simulated, targets, JudgedWindow(0, 50, 50), 0)
    assert "chat" not in judged.classes
    assert judged.classes["document"].rejected == judged.rejected == refused
    assert judged.classes["document"].p99_s == inf
    for one in judged.attained:
        assert (one.good, one.count) == (8 - refused, 8)
    assert not judged.attained[1].met
    assert judged.attained[1].value_s == inf


def test_usage_counts_a_common_document_once() -> None:
    users = Users(users=1, document_share=1.0, document_tokens=Fixed(51_200), shared=1.0)
    first, second = replace(users, documents=1).requests(0, 120.0)
    together = [replace(first, arrival_s=0.0), replace(second, arrival_s=0.001)]
    judged = judge(simulate(together, Scenario(LLAMA, 1)), (), JudgedWindow(0, 9, 0), 0)
    pool = (LLAMA.kv_budget.blocks - 1) * 16
    assert judged.usage.kv_peak == pytest.approx((51_200 + 2 * (64 + 128)) / pool)
    assert judged.usage.seats_peak == 2
    assert 0.5 < judged.usage.prefill_part <= 1


def test_a_target_without_requests_is_not_met() -> None:
    rows = [TraceRequest("c", 1.0, 100, 10)]
    targets = parse_targets("document.ttft_p99=1ms")
    judged = judge(simulate(rows, Scenario(LLAMA, 1)), targets, JudgedWindow(0, 9, 0), 0)
    (one,) = judged.attained
    assert (one.share, one.shown, one.met) == (None, "–", False)
    assert not judged.met


def test_default_targets_are_of_the_classes_that_ask() -> None:
    names = [target.name for target in default_targets(replace(USERS, document_share=0.0))]
    assert names == ["chat.ttft_p95", "tpot_p95"]
    assert default_targets(USERS) == TARGETS


@pytest.mark.parametrize(
    ("good", "count", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (10, 10, 0.7225, 1.0),  # 1 / (1 + 1.96^2 / 10)
        (95, 100, 0.8882, 0.9785),
    ],
)
def test_wilson(good: int, count: int, low: float, high: float) -> None:
    assert wilson(good, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("good_a", "count_a", "good_b", "count_b", "low", "high"),
    [  # differences of Newcombe's table II, method 10
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (10, 10, 0, 20, 0.6791, 1.0),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (0, 10, 0, 10, -0.2775, 0.2775),
    ],
)
def test_a_ratio_of_shares_is_clear_where_their_difference_is(
    good_a: int, count_a: int, good_b: int, count_b: int, low: float, high: float
) -> None:
    """Newcombe's difference d = a - b covers 0 just where the ratio covers 1."""
    a, b = good_a / count_a, good_b / count_b
    (low_a, high_a), (low_b, high_b) = wilson(good_a, count_a), wilson(good_b, count_b)
    difference = a - b - hypot(a - low_a, high_b - b), a - b + hypot(high_a - a, b - low_b)
    assert difference == pytest.approx((low, high), abs=1e-4)
    interval = share_ratio_interval(a, count_a, b, count_b)
    assert interval is not None
    assert (interval.low > 1, interval.high < 1) == (low > 0, high < 0)
    mirrored = share_ratio_interval(b, count_b, a, count_a)
    assert mirrored is not None
    assert mirrored.clear == interval.clear
    if interval.low > 0:
        assert mirrored.high == pytest.approx(1 / interval.low)


def test_shares_that_nobody_counted_have_no_interval() -> None:
    assert share_ratio_interval(None, 10, 0.5, 10) is None
    assert share_ratio_interval(0.5, 10, 0.5, 0) is None


@pytest.mark.parametrize(
    ("servers", "offered", "waits"),
    [
        (1, 0.5, 0.5),  # M/M/1: the load
        (2, 1.0, 1 / 3),
        (10, 8.0, 0.40918),  # tables of Erlang C
        (3, 3.0, 1.0),
        (2, 5.0, 1.0),
    ],
)
def test_erlang_c(servers: int, offered: float, waits: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(waits, abs=1e-5)


def test_formulas_by_hand() -> None:
    users = Users(users=60, document_share=1.0, document_tokens=Fixed(100_000 - 64))
    kv, full, usual, mmc = formulas(LLAMA, users, parse_targets("document.ttft_p95=10s"), 9)
    took = alone(LLAMA, 100_000, 128)
    pool = (LLAMA.kv_budget.blocks - 1) * 16
    assert kv.gpus == -(-took.end_s * 100_128 // pool) == 1  # one question a second
    assert full.gpus == 7  # 5.8 s of prefill a second, and 128 tokens in batches of 8: 0.5 s
    assert usual.gpus == 10
    assert mmc.gpus is not None
    assert full.gpus <= mmc.gpus <= usual.gpus


def test_an_idle_gpu_is_the_floor() -> None:
    qwen = EngineConfig(model="qwen2.5-14b")
    users = replace(USERS, document_tokens=Fixed(100_000))
    strict = parse_targets("document.ttft_p95=10s")
    with pytest.raises(InputError, match=r"12\.2 s on an idle h200-sxm \(compute-bound: 7\.57 PF"):
        check_floor(qwen, users, strict)
    check_floor(LLAMA, users, TARGETS)
    # Nine in ten are warm at best: the cold ones alone are more than the 5 % that may miss.
    with pytest.raises(InputError, match="a shared prefix would"):
        check_floor(qwen, replace(users, shared=0.9), strict)
    check_floor(qwen, replace(users, shared=0.96), strict)
    with pytest.raises(InputError, match=r"one token .* alone .*15\.0 GB .* 3\.1 ms at 4\.8 TB/s"):
        check_floor(LLAMA, users, parse_targets("tpot_p95=3ms"))
    # A target of all classes may spend all of its misses on documents.
    few = replace(users, document_share=0.04)
    check_floor(qwen, few, parse_targets("ttft_p95=2s"))


@pytest.mark.parametrize(
    ("prefill_s", "more_kv", "more_slots", "resource"),
    [
        (0.8, False, False, "prefill compute"),
        (0.1, False, False, "decode"),
        (0.1, False, True, "slots"),
        (0.8, True, True, "KV cache"),
    ],
)
def test_what_binds(prefill_s: float, more_kv: bool, more_slots: bool, resource: str) -> None:
    usage = Usage(prefill_s, 0.9, 0.2, 0.6, 64, 64)
    assert binding(usage, ["chat.ttft_p95"], [more_kv], [more_slots], "3 GPUs").resource == resource


def test_slots_bind_where_more_of_them_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    line = "size --users 120 --document-share 0 --document-tokens 1 --chat-tokens 100 --think 20"
    line += " --chat-output-tokens 900 --slo ttft_p95=500ms --max-num-seqs 16 --quick --json"
    assert run(f"{line} --window 60 --jobs 1", capsys)["binding"]["resource"] == "slots"


def test_few_blocks_bind_and_many_do_not() -> None:
    # 16k tokens of cache hold two such answers at once: memory, not speed, makes them wait.
    users = replace(USERS, users=60, document_share=0.0, chat_tokens=Fixed(4_000))
    users = replace(users, chat_output_tokens=Fixed(2_000))
    targets = parse_targets("ttft_p95=2s")
    engine = EngineConfig(max_model_len=8_192, num_gpu_blocks_override=1_025)
    question = Question(users, Scenario(engine, 1), targets, JudgedWindow(30, 120), 0)
    few = least_gpus(question, 8, 64).gpus
    more = replace(question, scenario=Scenario(replace(engine, num_gpu_blocks_override=8_193)))
    assert least_gpus(more, 8, 64).gpus < few / 2


SMALL = "size --users 40 --document-tokens 32000 --jobs 1 --window 120"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(line.split()) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_the_whole_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --users 200 --json --price-per-gpu-hour 3.5 --out {tmp_path / 'made'} --plot"
    line += " --gpu-watts 700"
    line += " --slo chat.ttft_p95=2s,document.ttft_p95=5s,tpot_p95=100ms"
    told = run(line + " --plot-tokens 8000,32000,130000", capsys)
    count = told["recommended_gpus"]
    assert count > 1
    assert told["with_one_spare"] == count + 1
    assert told["gpus_by_seed"]["high"] == count
    assert all(one["met"] for one in told["around"][str(count)])
    assert len(told["around"][str(count)]) == 3
    assert not all(one["met"] for one in told["around"][str(count - 1)])
    money = told["cost"]
    assert money["per_hour"] == 3.5 * (count + 1)
    assert money["per_request"] == pytest.approx(money["per_hour"] / 3600 / (200 / 60))
    tokens_per_hour = money["per_hour"] / money["per_million_output_tokens"] * 1e6
    watts = money["joules_per_output_token"] * tokens_per_hour / 3600
    assert watts == pytest.approx(700 * (count + 1))
    assert told["binding"]["resource"] == "prefill compute"
    assert told["formulas"][0]["name"] == "KV cache only"
    base, whatifs = told["sensitivity"]["nothing_changed"], told["sensitivity"]["gpus"]
    assert whatifs["all questions about 50 shared documents"] <= base <= count
    assert "checked" in told["calibration"]
    small, large, longest = told["plot"]
    assert all(a[1] <= b[1] for a, b in zip(small["points"], large["points"], strict=True))
    assert not longest["points"]
    assert "130,064 tokens takes" in longest["refused"]
    assert json.loads((tmp_path / "made" / "results.json").read_text()) == told
    ElementTree.parse(tmp_path / "made" / "plot.svg")
    assert main(line.split()) == 2
    assert "holds results.json" in capsys.readouterr().err


def test_pools_meet_the_same_targets_and_have_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --users 100 --quick --pools --price-per-gpu-hour 4"
    told = run(f"{line} --json", capsys)
    pools, alike = told["pools"], told["cost"]
    split = pools["prefill"], pools["decode"]
    assert sum(split) >= told["recommended_gpus"] == 2
    assert pools["cost"]["per_hour"] == 4 * (sum(split) + 1)
    computing = pools["busy"] * sum(split)
    assert pools["cost"]["per_busy_gpu_hour"] == pytest.approx(4 * (sum(split) + 1) / computing)
    busy = [judged["busy"] for judged in told["around"]["2"]]
    assert alike["per_busy_gpu_hour"] == pytest.approx(12 / (2 * sum(busy) / 3))
    # The same pools in the simulator meet the targets, one engine fewer does not.
    users, seed = USERS, 0
    judged_s = JudgedWindow(30, 120)
    for count, met in ((sum(split), True), (sum(split) - 1, False)):
        fleets = [Scenario(LLAMA, count, pools=(p, count - p)) for p in range(1, count)]
        fleets = fleets if not met else [Scenario(LLAMA, count, pools=split)]
        asked = (Question(users, fleet, TARGETS, judged_s, seed).ask(count) for fleet in fleets)
        assert any(judged.met for judged in asked) == met
    # The terminal says the same.
    assert main(line.split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{split[0]} GPU for prefills and {split[1]} for decodes" in said
    assert said.count("per hour of a GPU that computes") == 2


def test_pools_that_never_meet_the_targets_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that just meets its target alone has no time left for a move."""
    line = f"{SMALL} --users 5 --window 900 --quick --pools --slo document.ttft_p95=1.3s"
    assert run(f"{line} --json", capsys)["pools"]["prefill"] is None
    assert main(line.split()) == 0
    assert "GPUs do not meet the targets either" in " ".join(capsys.readouterr().out.split())


def test_pools_meet_what_no_mixed_fleet_meets(capsys: pytest.CaptureFixture[str]) -> None:
    """Each mixed engine computes a document now and then, and its answers stop meanwhile."""
    line = f"{SMALL} --users 200 --quick --slo stall_p95=40ms"
    assert main(line.split()) == 2
    refusal = capsys.readouterr().err.strip().removeprefix("forebay size: ")
    assert "--slo: not met with 16 GPUs either" in refusal
    told = run(f"{line} --pools --price-per-gpu-hour 3 --json", capsys)
    assert (told["recommended_gpus"], told["not_met"], told["cost"]) == (None, refusal, None)
    assert (told["pools"]["prefill"], told["pools"]["decode"]) == (2, 2)
    assert told["pools"]["cost"]["per_hour"] == 15
    assert main([*line.split(), "--pools"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"no number of GPUs that both prefill and decode meets the targets: {refusal}\n"
    )
    assert "2 GPUs for prefills and 2 for decodes, 4 in all, busy 74% of the time" in said


def test_equal_answers_whatever_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --json --quick --window 100"
    one, two = run(line, capsys), run(f"{line} --jobs 2", capsys)
    assert one == two


def test_the_table_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{SMALL} --quick --validate".split()) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "for llama-3-8b, vLLM's default flags; ",
        "to survive the loss of one",
        "M/M/c",
        "validation",
        "Wilson",
        "step times: measured",
    ):
        assert words in told
    assert "not on h200" not in told


def test_the_first_line_says_that_step_times_are_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense models in block FP8 were not served by others."""
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_config(tmp_path, "Qwen/Qwen3-8B", **blocks)
    words = f"{SMALL} --quick --model {tmp_path}"
    assert main(words.split()) == 0
    told = " ".join(capsys.readouterr().out.split())
    first = told.partition("users, each with")[0]
    assert "; unchecked: no served run of a dense model in fp8 on such a GPU" in first
    assert main([*words.split(), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["calibration"]
    assert kept["known_error"].startswith("unchecked")
    assert "within 5 %" not in kept["checked"]


def test_the_cap_on_prefills_can_be_given() -> None:
    """README, `tune` and `simulate` are built round it, and two of six answers depend on it."""
    asked = SizeArguments(max_num_seqs=64, long_prefill_token_threshold=2048)
    engine = asked.scenario(ModelFlags()).engine
    assert engine.long_prefill_token_threshold == 2048
    assert list(changed_words(engine)) == [
        *("--max-num-seqs 64", "--long-prefill-token-threshold 2048")
    ]
    other = EngineConfig(enable_prefix_caching=False, enable_lora=True)
    assert list(changed_words(other)) == ["--enable-lora", "--no-enable-prefix-caching"]


def test_a_proxys_file_needs_no_servers_to_be_sized(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("buckets: [{name: only, up_to: 131072, target: 3s}]\n")
    scenario = SizeArguments(config=path).scenario(ModelFlags())
    assert [bucket.name for bucket in scenario.buckets()] == ["only"]


def test_what_is_not_counted_is_said(tmp_path: Path) -> None:
    assert "no wait for --max-loras" in str(EngineConfig(enable_lora=True).constants_remark())
    write_config(tmp_path, "google/gemma-3-27b-it", vision_config={"hidden_size": 1152})
    tower = "a tower for images or sounds needs memory, which is not counted"
    assert tower in str(EngineConfig(str(tmp_path), "h200").constants_remark())


def test_it_says_that_constants_were_not_measured_on_the_gpu() -> None:
    """The words are those of `forebay engine` and `forebay simulate`."""
    assert EngineConfig(gpu="h200").constants_remark() is None
    assert EngineConfig(gpu="l40s", max_model_len=8_192).constants_remark() is None
    remark = EngineConfig(gpu="rtx-4090", max_model_len=8_192).constants_remark()
    assert remark == "constants measured on h200-sxm; not on rtx-4090"
    assert "measured on a100-80gb" in (EngineConfig(gpu="a100-40gb").constants_remark() or "")


class Refusing(JobRunner):
    """Complete that many jobs of each curve; the next fails in its process, or at once."""

    def __init__(self, answered: int, later: bool) -> None:
        super().__init__(None)
        self._left = answered
        self._later = later

    def start(self, work: Any, *job: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        self._left -= 1
        if self._left >= 0:
            done.set_result(LeastCount(job[0], 3, {}))
        elif self._later:
            done.set_exception(InputError("--slo: not met with 64 GPUs either"))
        else:
            raise InputError("--slo: not met with 64 GPUs either")
        return done


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("answered", [0, 2])
def test_a_refused_point_of_the_plot_costs_no_answer(answered: int, later: bool) -> None:
    users = replace(USERS, users=40)
    (curve,) = curves(
        users, Scenario(LLAMA, 1), TARGETS, Refusing(answered, later), sizes=[8_000], seed=0
    )
    assert curve.points == ((10, 3), (20, 3))[:answered]
    assert "not met with 64 GPUs" in curve.error


def test_more_users_never_draw_a_plot_that_is_not_xml() -> None:
    drawn = draw([Curve(8_000, ((10, 1), (20, 2))), Curve(9_000, (), "no <GPU>")], "A & B")
    root = ElementTree.fromstring(drawn)
    titles = [one.text for one in root.iter() if one.tag.endswith("title")]
    assert "20 users, 8,000 tokens: 2 GPUs" in titles
    assert "A & B" in titles


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--users 0 --document-tokens 100", "--users 0"),
        ("--users 5 --document-tokens long", "--document-tokens: 'long' is not a length"),
        ("--users 5 --document-tokens 100 --gpu abacus", "abacus"),
        ("--users 5 --document-tokens 100 --model gpt-5", "gpt-5"),
        ("--users 5 --document-tokens 100 --model nowhere.json", "no such file"),
        ("--users 5 --document-tokens 140000", "context of 131,072 tokens of llama-3-8b"),
        ("--users 5 --document-tokens 9000 --max-model-len 8000", "--document-tokens: a document"),
        ("--users 5 --document-tokens 9000 --gpu-memory-utilization 0.1", "does not fit by"),
        ("--users 5 --document-tokens 120000 --model qwen2.5-14b", "no number of GPUs meets it"),
        ("--users 5 --document-tokens 100 --shared 2", "--shared 2"),
        ("--users 5 --document-tokens 100 --think 0", "--think 0"),
        ("--users 5 --document-tokens 100 --cv 0", "--cv 0"),
        ("--users 5 --document-tokens 100 --slo fast", "--slo"),
        (
            "--users 5 --document-tokens 100 --slo chat.ttft=2s",
            "names no percentile; for 95 % of the requests write chat.ttft_p95=2s",
        ),
        ("--users 5 --document-tokens 100 --price-per-gpu-hour 0", "--price-per-gpu-hour 0"),
        ("--users 5 --document-tokens 100 --policy random", "--policy random"),
        ("--users 5 --document-tokens 100 --pools --model gpt-oss-20b", "--pools 1+1: only for"),
        ("--users 5 --document-tokens 100 --plot", "--plot: give the folder"),
        ("--users 5 --document-tokens 100 --seeds 2", "--seeds"),
        ("--users 500 --document-tokens 100000 --window 0.001", "--window 0.001: too short for"),
        ("--users 10 --document-tokens 1000 --window 1", "chat.ttft_p95: less than one request"),
        (
            "--users 5 --document-tokens 9 --document-share 0 --slo document.ttft_p99=1ms",
            "--slo document.ttft_p99=1ms: no request is a document",
        ),
        (
            "--users 60 --document-tokens 9 --chat-output-tokens 1 --document-output-tokens 1"
            " --window 60 --slo tpot_p95=100ms",
            "--slo tpot_p95=100ms: not one request of seed 0",
        ),
        ("--users 5 --document-tokens uniform:1,9 --plot --out {new}", "give --plot-tokens"),
        ("--users 5 --document-tokens 100 --plot --plot-tokens x --out {new}", "--plot-tokens x"),
        (
            "--users 500 --document-tokens 100000 --plot --plot-tokens 9000,131072 --out {new}",
            "--plot-tokens 131072: a document request of 131,264 tokens",
        ),
    ],
)
def test_bad_input(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", "--jobs", "1", *line.format(new=tmp_path / "new").split()]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("meta-llama/Llama-3.1-8B", {"hidden_size": None}, "hidden_size is missing"),
        ("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 400}, "the model does not fit by"),
        ("deepseek-ai/DeepSeek-R1", {}, "the model does not fit by"),
        ("deepseek-ai/DeepSeek-R1", {"index_topk": 2_048}, "index_topk: this model has sparse"),
    ],
)
def test_a_config_json_that_cannot_be_sized(
    name: str,
    changed: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_config(tmp_path, name, **changed)
    line = f"size --jobs 1 --users 5 --document-tokens 100 --model {path}"
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err
