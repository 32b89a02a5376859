"""The class against vLLM's own scheduler on random workloads, in a subprocess that has vLLM."""

import os

import pytest
from vllm_server import play_workloads

WORKLOADS = int(os.environ.get("FOREBAY_VLLM_WORKLOADS", "60"))


@pytest.mark.timeout(900)
def test_the_class_loses_nothing_and_decides_as_vllm_without_a_bound(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with capfd.disabled():
        told = play_workloads("vllm_scheduler_runs.py", WORKLOADS, "vLLM's scheduler and the class")
    assert told["differences"] == 0
    assert told["workloads"] == WORKLOADS
    for name in (
        *("async_workloads", "priority_workloads", "speculative_workloads", "adapter_workloads"),
        *("unchunked_workloads", "windows_workloads", "states_workloads", "one_workloads"),
        *("aborts", "preemptions", "faults", "cut_prefills"),
    ):
        assert told[name] > 0, f"the workloads exercise no {name}"
