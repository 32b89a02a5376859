"""Our engine against vLLM's own scheduler, step by step, in a subprocess that has vLLM."""

import os

import pytest
from vllm_server import play_workloads

WORKLOADS = int(os.environ.get("FOREBAY_VLLM_WORKLOADS", "100"))


@pytest.mark.timeout(900)
def test_every_step_is_vllms(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        told = play_workloads("vllm_differential.py", WORKLOADS, "vLLM's scheduler and ours")
    assert told["differences"] == 0
    assert told["workloads"] == WORKLOADS
    for name in (
        *("async_workloads", "priority_workloads", "interval_workloads", "preemptions"),
        *("hit_tokens", "aborts", "stop", "length", "speculative_workloads", "accepted_tokens"),
        *("one_workloads", "windows_workloads", "states_workloads"),
        *("host_workloads", "loaded_tokens"),
    ):
        assert told[name] > 0, f"the workloads exercise no {name}"
