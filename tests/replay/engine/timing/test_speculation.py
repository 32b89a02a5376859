"""Speculative decoding: yield, step times and memory by hand, and refusals.

tests/support/vllm_differential.py compares the scheduling with vLLM's own, step by step.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.proxy.cli import main
from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.specs import GIB, LLAMA_3_8B
from forebay.replay.engine.loop.metrics import EngineMetrics
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.exposition import Exposition
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork
from forebay.replay.sim.engine.served import can_skip
from forebay.traces.ground.errors import InputError


def options(method: str = "eagle3", count: int = 3, **more: Any) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": count, **more})


def served(
    config: EngineConfig, requests: int = 1, output: int = 2_000
) -> tuple[float, EngineCore]:
    """Serve equal requests at once. Returns the seconds they take, and the engine."""
    core, now = new_core(config), 0.0
    for number in range(requests):
        core.add(EngineRequest(f"r{number}", 1_000, output))
    while core.has_work:
        now += core.start_step(now)
        core.finish_step()
    assert core.generation_tokens == requests * output
    assert core.kv_usage == 0.0
    return now, core


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("count", "acceptance"), [(1, 0.6), (3, 0.7), (5, 0.9), (4, 0.0), (2, 1.0)]
)
def test_a_step_yields_the_published_number_of_tokens(
    count: int, acceptance: float, ahead: bool
) -> None:
    """(1 - a^(k+1)) / (1 - a), equation 1 of arXiv:2211.17192."""
    config = EngineConfig(
        speculative_config=options(count=count), acceptance=acceptance, async_scheduling=ahead
    )
    _, core = served(config, requests=16)
    wanted = count + 1.0 if acceptance == 1 else (1 - acceptance ** (count + 1)) / (1 - acceptance)
    drafts = sum(core.drafted)
    accepted = sum(number * times for number, times in enumerate(core.drafted))
    assert 1 + accepted / drafts == pytest.approx(wanted, rel=0.02)
    assert config.speculation is not None
    assert config.speculation.mean_tokens == pytest.approx(wanted)


def test_equal_seeds_give_equal_times_whatever_runs_beside() -> None:
    config = EngineConfig(speculative_config=options("ngram"), acceptance=0.7, seed=1)
    first, core = served(config)
    again, same = served(config)
    assert (first, core.drafted) == (again, same.drafted)
    other, changed = served(EngineConfig(speculative_config=options("ngram"), acceptance=0.7))
    assert changed.drafted != core.drafted
    assert other == pytest.approx(first, rel=0.1)


def test_many_proposals_cost_a_full_batch_more_than_they_yield() -> None:
    """Idle arithmetic verifies a lone request for nothing. A large batch has none left."""
    speculative = EngineConfig(speculative_config=options("ngram", 5), acceptance=0.3)
    plain = EngineConfig(async_scheduling=False)  # as with the method ngram
    lone, _ = served(plain)
    assert served(speculative)[0] < 0.8 * lone
    many, _ = served(plain, 512, 300)
    assert served(speculative, 512, 300)[0] > 1.1 * many


def test_a_step_by_hand() -> None:
    """Verified tokens are rows of every product and of the head. The draft's passes are added."""
    config = EngineConfig(speculative_config=options("eagle", 3), acceptance=0.7)
    constants = config.step_constants()
    plain = StepTimeModel(LLAMA_3_8B, config.gpu_spec, constants, async_scheduling=True)
    assert config.draft_rank is not None
    layer = StepTimeModel(config.draft_rank, config.gpu_spec, constants)
    work = StepWork(32, 8, 8, 80_000, drafted=24)
    rows = StepWork(32, 8, 32, 80_000)
    first, later = StepWork(32, 8, 8, 80_000), StepWork(8, 8, 8, 80_000)
    drafting = layer.step_s(first) + 2 * layer.step_s(later) - 3 * constants.step_s
    assert config.timing().step_s(work) == pytest.approx(plain.step_s(rows) + drafting, rel=1e-12)
    # The layer reads a cache of its own, so a token of context costs a step 3 of 32 layers more.
    per_token = plain.decode_terms(1)[1]
    assert config.timing().decode_terms(8)[1] == pytest.approx(per_token * (1 + 3 / 32), rel=1e-12)


def test_the_pool_beside_a_draft_by_hand() -> None:
    """A head has one layer of the target's cache, its weights, and a product of 2 x hidden."""
    layer = 2 * (6_144 * 4_096 + 4_096 * 4_096 + 2 * 14_336 * 4_096 + 4_096 * 14_336)
    head = layer + 2 * 2 * 4_096 * 4_096
    config = EngineConfig(speculative_config=options(), acceptance=0.5)
    activation = 38.5 * 1_024 * 128_256
    pool = (0.9 * 139.8 - 0.13) * GIB - 16_060_522_496 - activation - head
    assert config.kv_budget.blocks == int(pool // (16 * 33 * 2 * 8 * 128 * 2))
    ngram = EngineConfig(speculative_config=options("ngram"), acceptance=0.5)
    assert ngram.kv_budget.blocks == EngineConfig().kv_budget.blocks


def test_what_follows_from_the_method() -> None:
    ngram = EngineConfig(speculative_config=options("ngram"), acceptance=0.5)
    assert not ngram.asynchronous
    assert EngineConfig(speculative_config=options(), acceptance=0.5).asynchronous
    assert not can_skip(ngram)
    assert "speculative decoding" in (ngram.constants_remark() or "")


def test_vllms_own_options_of_acceptance() -> None:
    rates: dict[str, Any] = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, 0.5, 0.1],
    }
    of_rates = EngineConfig(speculative_config=options(**rates)).speculation
    assert of_rates is not None
    assert of_rates.mean_tokens == pytest.approx(2.4)
    of_length = EngineConfig(
        speculative_config=options(synthetic_acceptance_length=2.4)
    ).speculation
    assert of_length is not None
    assert of_length.rates == pytest.approx((1.0, 0.4, 0.0))


def test_counters_are_vllms() -> None:
    config = EngineConfig(speculative_config=options(), acceptance=0.7)
    _, core = served(config)
    core.drafted = [4, 3, 2, 1]
    text = Exposition(EngineMetrics(core, "model")).text().decode()
    for name, value in (
        ("num_drafts_total{", 10), ("num_draft_tokens_total{", 30),
        ("num_accepted_tokens_total{", 10),
    ):  # fmt: skip
        (line,) = [line for line in text.splitlines() if f"vllm:spec_decode_{name}" in line]
        assert float(line.split()[-1]) == value
    by_place = [
        float(line.split()[-1]) for line in text.splitlines()
        if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]  # fmt: skip
    assert by_place == [6, 3, 1]
    assert (
        "spec_decode"
        not in Exposition(EngineMetrics(EngineCore(EngineConfig()), "m")).text().decode()
    )


@pytest.mark.parametrize(
    ("config", "acceptance", "says"),
    [
        (options(), 1.5, "--acceptance 1.5: give a share in [0, 1]"),
        (options(), -0.1, "--acceptance -0.1: give a share in [0, 1]"),
        (None, 0.7, "--acceptance 0.7: nothing is drafted; give --speculative-config"),
        (options(), None, "give --acceptance 0.7"),
        ("eagle", 0.7, "give a JSON object"),
        ('["eagle"]', 0.7, "give a JSON object"),
        (options(count=0), 0.7, "num_speculative_tokens 0: give 1 to 64"),
        (options(count=True), 0.7, "num_speculative_tokens True: give 1 to 64"),
        (options("medusa"), 0.7, "method 'medusa' is not simulated; give ngram, draft_model"),
        (options("draft_model"), 0.7, "draft_model needs model"),
        (options("draft_model", model="qwen2.5-14b"), 0.7, "a vocabulary of 152,064 tokens"),
        (options(parallel_drafting=True), 0.7, "parallel_drafting is not simulated"),
        (options(synthetic_acceptance_rates=[0.5, 0.6, 0.1]), None, "none above the one before it"),
        (options(synthetic_acceptance_rates=[0.5]), None, "give 3 shares in [0, 1]"),
        (options(synthetic_acceptance_length=9), None, "give 1 to 4 tokens"),
        (options(synthetic_acceptance_length=2), 0.5, "or one of synthetic_acceptance_rates"),
    ],
)  # fmt: skip
def test_refusals_name_key_value_and_remedy(
    config: str | None, acceptance: float | None, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        EngineConfig(speculative_config=config, acceptance=acceptance)
    assert says in str(caught.value)


def test_options_of_the_engine_that_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--async-scheduling: vLLM has none with the method ngram"):
        EngineConfig(speculative_config=options("ngram"), acceptance=0.5, async_scheduling=True)
    with pytest.raises(InputError, match="--max-num-batched-tokens 4: a request with 4 proposed"):
        EngineConfig(speculative_config=options(count=4), acceptance=0.5, max_num_batched_tokens=4)


@pytest.mark.parametrize(
    "command",
    [
        "simulate {trace}",
        "size --users 10 --document-tokens 1000",
        "engine --model llama-3-8b --port 0",
        "search {trace} --target sim:llama-3-8b@h200",
    ],
)
def test_every_command_refuses_an_acceptance_above_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "input_tokens": 100, "output_tokens": 10}\n')
    words = [*command.format(trace=trace).split(), "--speculative-config", options()]
    assert main([*words, "--acceptance", "2"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--acceptance 2: give a share in [0, 1], such as 0.7" in line
