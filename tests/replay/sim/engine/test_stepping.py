"""A workload in which vLLM never ends is an error, and not a simulation without an end."""

from dataclasses import replace
from math import inf

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine import stepping
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.stepping import SteppingEngine
from forebay.traces.ground.errors import InputError

SHORT_OF_MEMORY = EngineConfig(
    max_model_len=96,
    block_size=32,
    num_gpu_blocks_override=4,  # one of them is the null block
    max_num_batched_tokens=512,
    max_num_seqs=16,
    long_prefill_token_threshold=20,
    scheduling_policy="priority",
    scheduler_reserve_full_isl=False,
    enable_prefix_caching=False,
    speculative_config='{"method": "eagle", "num_speculative_tokens": 2}',
    acceptance=1.0,
    async_scheduling=False,
)


def play(config: EngineConfig) -> int:
    """Play two requests that arrive together to their ends. Returns the number of steps."""
    engine = SteppingEngine(config)
    engine.add(SimRequest("a", 51, 23), 0.0)
    engine.add(SimRequest("b", 75, 10), 0.0)
    while engine.next_at() < inf:
        engine.advance(engine.next_at())
        assert engine.steps < 10_000
    return engine.steps


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_endless_preemption_is_an_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "MOST_PREEMPTIONS", 1_000)
    config = replace(SHORT_OF_MEMORY, vllm_version=version)
    says = "--scheduling-policy priority: the engine preempts and admits the same requests forever"
    with pytest.raises(InputError, match=says) as caught:
        play(config)
    assert "raise --gpu-memory-utilization" in str(caught.value)
    assert play(replace(config, scheduling_policy="fcfs")) < 200
    assert play(replace(config, num_gpu_blocks_override=8)) < 200
