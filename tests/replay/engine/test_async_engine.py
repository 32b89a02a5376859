"""Async scheduling: the next step is planned before the tokens of this one are known."""

import pytest

from forebay.replay.engine.async_engine import AsyncEngineCore, new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest


def core(**options: object) -> EngineCore:
    return new_core(EngineConfig(async_scheduling=True, **options))  # type: ignore[arg-type]


def ids(requests: list[EngineRequest]) -> list[str]:
    return [one.id for one in requests]


def test_the_option_decides_and_the_version_without_it() -> None:
    assert isinstance(core(), AsyncEngineCore)
    assert isinstance(new_core(EngineConfig()), AsyncEngineCore)
    assert type(new_core(EngineConfig(async_scheduling=False))) is EngineCore
    assert type(new_core(EngineConfig(vllm_version="0.11"))) is EngineCore


def test_the_end_by_max_tokens_is_foreseen() -> None:
    engine = core()
    one = EngineRequest("r", 1_000, 3)
    engine.add(one)
    results = [engine.step(0.0) for _ in range(3)]
    assert [ids(result.outputs) for result in results] == [["r"]] * 3
    assert results[-1].finished == [one]
    assert not engine.has_work
    assert engine.pool.usage == 0


def test_an_end_that_nobody_foresaw_costs_one_more_step() -> None:
    engine = core()
    one = EngineRequest("r", 1_000, 3, finish_reason="stop", max_tokens=100)
    engine.add(one)
    while not (result := engine.step(0.0)).finished:
        assert engine.has_work
    assert one.output_tokens == 3
    assert engine.pool.usage == 0
    assert engine.has_work
    wasted = engine.step(0.0)
    assert (wasted.tokens, wasted.outputs, wasted.duration_s > 0) == (1, [], True)
    assert not engine.has_work
    assert engine.generation_tokens == 3
    assert result.finished == [one]


def test_what_comes_during_a_step_takes_part_in_the_one_after_the_next() -> None:
    engine = core()
    engine.add(EngineRequest("a", 10, 9))
    engine.start_step(0.0)
    engine.add(EngineRequest("b", 10, 9))
    outputs = [ids(engine.finish_step().outputs)]
    outputs += [ids(engine.step(0.0).outputs) for _ in range(2)]
    assert outputs == [["a"], ["a"], ["a", "b"]]


def test_an_abort_during_a_step_is_computed_once_more_for_nothing() -> None:
    engine = core()
    engine.add(EngineRequest("a", 10, 9))
    engine.add(EngineRequest("b", 10, 9))
    engine.start_step(0.0)
    assert engine.abort("a")
    assert ids(engine.finish_step().outputs) == ["b"]
    later = [engine.step(0.0) for _ in range(2)]
    assert [ids(result.outputs) for result in later] == [["b"], ["b"]]
    assert [result.tokens for result in later] == [2, 1]


def test_output_blocks_are_cached_when_their_tokens_arrive() -> None:
    engine = core()
    one = EngineRequest("r", 31, 9)
    engine.add(one)
    engine.start_step(0.0)  # the prompt; the step that computes token 32 is planned too
    assert (one.computed, one.tokens, one.registered) == (32, 31, 1)
    engine.finish_step()
    engine.step(0.0)
    assert one.registered == 2


def test_a_token_that_comes_after_a_preemption_still_counts() -> None:
    engine = core(max_model_len=64, num_gpu_blocks_override=5, max_num_seqs=2)
    first, second = EngineRequest("a", 31, 20), EngineRequest("b", 31, 20)
    engine.add(first)
    engine.add(second)
    tokens: list[str] = []
    while engine.has_work:
        tokens += ids(engine.step(0.0).outputs)
        engine.pool.check()
    assert engine.preemptions > 0
    assert (tokens.count("a"), tokens.count("b")) == (20, 20)
    assert engine.pool.usage == 0


def test_a_step_must_be_finished_before_the_next_and_cannot_be_finished_twice() -> None:
    engine = core()
    engine.add(EngineRequest("r", 10, 5))
    engine.start_step(0.0)
    with pytest.raises(RuntimeError, match="a step is running"):
        engine.start_step(0.0)
    engine.finish_step()
    with pytest.raises(RuntimeError, match="no step"):
        engine.finish_step()
