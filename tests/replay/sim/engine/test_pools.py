"""Pools of prefill and decode engines: times by hand, and the books of every block."""

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refusal

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.pools import KvLink, parse_link
from forebay.replay.sim.engine.served import run_alone, served_engine
from forebay.replay.sim.engine.skipping import SkippingEngine
from forebay.replay.sim.fleet import sim_request
from forebay.replay.sim.scenario import Scenario, parse_pools, simulate
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

PROMPT, OUTPUT = 60_000, 50
KV_BYTES = 32 * 2 * 8 * 128 * 2  # of a token in Llama-3-8B


def alone(output: int, prompt: int = PROMPT) -> tuple[float, float]:
    """The first and the last token of a request on an idle engine."""
    request = sim_request(TraceRequest("alone", 0.0, prompt, output))
    run_alone(served_engine(EngineConfig()), request, 0.0)
    return request.first_token_s, request.finished_s


def test_one_request_by_hand() -> None:
    """Prefill, API server, 7.86 GB over 50 GB/s, and a step for the last token of the prompt."""
    link = KvLink(50e9, 0.002)
    scenario = Scenario(gpus=2, pools=(1, 1), kv_link=link)
    (outcome,) = simulate([TraceRequest("r", 0.0, PROMPT, OUTPUT)], scenario).outcomes
    times, timing = EngineConfig().step_constants().server_times(), EngineConfig().timing()
    prefill_s, _ = alone(1)
    received_s = times.request_s + (times.receive_token_s + times.tokenize_token_s) * PROMPT
    moving_s = 0.002 + KV_BYTES * PROMPT / 50e9
    assert moving_s == pytest.approx(0.159, abs=1e-3)
    fixed, per_token = timing.decode_terms(1)
    step_s = timing.admit_s(PROMPT) + fixed + per_token * PROMPT
    answer_s = times.answer_s + times.answer_token_s * PROMPT
    wanted = prefill_s + received_s + moving_s + step_s + answer_s
    assert outcome.ttft_s == pytest.approx(wanted, abs=1e-6)
    first_s, last_s = alone(OUTPUT)
    assert outcome.finished_s is not None
    assert outcome.finished_s - wanted == pytest.approx(last_s - first_s, abs=2e-3)


def test_transfers_of_one_link_follow_each_other() -> None:
    rows = [TraceRequest(f"r{number}", 0.0, PROMPT, 2) for number in range(3)]
    slow = Scenario(gpus=4, pools=(3, 1), kv_link=KvLink(1e9))
    last = max(outcome.first_token_s or 0.0 for outcome in simulate(rows, slow).outcomes)
    assert last > 3 * KV_BYTES * PROMPT / 1e9


def test_a_shared_prompt_moves_once() -> None:
    ids = tuple(range(PROMPT // 512))
    rows = [TraceRequest(f"r{n}", 60.0 * n, PROMPT, 9, ids, 512) for n in range(2)]
    scenario = Scenario(gpus=2, pools=(1, 1), kv_link=KvLink(1e9))
    first, second = simulate(rows, scenario).outcomes
    assert second.cached_tokens > 0.99 * PROMPT
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert first.ttft_s > KV_BYTES * PROMPT / 1e9
    assert second.ttft_s < 0.5


def test_all_blocks_are_free_at_the_end_and_each_request_is_answered() -> None:
    """Random prompts, shared prefixes and short memory, with preemptions in the decode pool."""
    for seed in range(30):
        rng = random.Random(f"pools {seed}")
        rows, now = [], 0.0
        for number in range(60):
            now += rng.expovariate(rng.choice([2.0, 20.0]))
            prompt, root = rng.randint(1, 6_000), rng.randrange(3)
            ids = tuple(1_000 * root + block for block in range(prompt // 64))
            rows.append(
                TraceRequest(f"r{number}", now, prompt, rng.randint(1, 300), ids or None, 64)
            )
        engine = EngineConfig(
            max_model_len=8_000,
            num_gpu_blocks_override=rng.choice([520, 700, 3_000]),
            async_scheduling=rng.random() < 0.5,
            enable_prefix_caching=rng.random() < 0.8,
        )
        pools = rng.choice([(1, 1), (2, 1), (1, 3)])
        scenario = Scenario(engine, sum(pools), pools=pools)
        engines = scenario.new_engines()
        outcomes = scenario.new_fleet(engines).run(rows)
        for row, outcome in zip(rows, outcomes, strict=True):
            assert outcome.finished_s is not None, (seed, row)
            assert outcome.first_token_s is not None
            assert row.arrival_s < outcome.first_token_s <= outcome.finished_s
        for served in engines.values():
            assert isinstance(served.engine, SkippingEngine)
            pool = served.engine._planner.pool
            pool.settle()
            assert pool.free == served.engine._planner.pool_blocks, seed


def test_long_prompts_no_longer_stall_answers() -> None:
    """Chats beside documents: the pools' longest gap is a decode step, mixed engines' a prefill."""
    rows = [TraceRequest(f"chat{n}", 0.05 * n, 200, 200) for n in range(200)]
    rows += [TraceRequest(f"document{n}", 0.5 * n + 0.01, 60_000, 50) for n in range(10)]
    rows.sort(key=lambda row: row.arrival_s)
    scenario = Scenario(gpus=4)
    stalls = [
        max(outcome.stall_s for outcome in simulate(rows, case).outcomes)
        for case in (scenario, replace(scenario, pools=(2, 2)))
    ]
    assert stalls[0] > 0.3
    assert stalls[1] < 0.1


def test_a_scenario_reaches_another_process() -> None:
    scenario = Scenario(gpus=4, pools=(1, 3), kv_link=parse_link("100Gbps"))
    assert pickle.loads(pickle.dumps(scenario)) == scenario


def test_the_speed_of_a_link_is_read() -> None:
    assert parse_link("400Gbps") == KvLink(50e9)
    assert parse_link("400 Gbit/s+2ms") == KvLink(50e9, 0.002)
    assert parse_link("400Gb/s") == KvLink(50e9)  # bits: a small b
    assert parse_link("12.5GB/s") == KvLink(12.5e9)
    assert parse_pools("none") is None


@pytest.mark.parametrize(
    "text", ["400", "fast", "0Gbps", "400Gbps+soon", "-1GB/s", "400TB", "400gbps"]
)
def test_a_wrong_speed_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--kv-link .*: give a speed, such as 400Gbps"):
        parse_link(text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pools 2", "--pools 2: give PREFILL+DECODE engines, such as 1+3"),
        ("--pools 1+2", "--pools 1+2: give a number of prefill and of decode engines, together"),
        ("--pools 0+4", "together the 4 of --gpus"),
        ("--pools 1+3 --exact", "leave out --exact"),
        ("--pools 1+3 --possible", "--possible: its bound is of engines without pools"),
        ("--sweep pools=1:3", "--pools 1:3: give PREFILL+DECODE engines"),
    ],
)
def test_refusals(words: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "input_tokens": 100, "output_tokens": 10}\n')
    line = refusal("simulate", str(trace), "--gpus", "4", *words.split())
    assert says in line
