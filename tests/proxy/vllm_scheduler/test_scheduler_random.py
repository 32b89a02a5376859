"""The class against vLLM's own scheduler on random workloads, in a subprocess that has vLLM."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from vllm_server import needed_vllm_python

WORKLOADS = os.environ.get("FOREBAY_VLLM_WORKLOADS", "60")


@pytest.mark.timeout(900)
def test_the_class_loses_nothing_and_decides_as_vllm_without_a_bound(
    capfd: pytest.CaptureFixture[str],
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    command = [needed_vllm_python(), str(ROOT / "tests" / "support" / "vllm_scheduler_runs.py")]
    run = subprocess.run(
        [*command, "--workloads", WORKLOADS], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-4_000:]}"
    told = json.loads(run.stdout.splitlines()[-1])
    with capfd.disabled():  # the log of a run that passed has the figures too
        print(f"\nvLLM's scheduler and the class: {json.dumps(told)}", file=sys.stderr, flush=True)
    assert told["differences"] == 0
    assert told["workloads"] == int(WORKLOADS)
    for name in (
        *("async_workloads", "priority_workloads", "speculative_workloads", "adapter_workloads"),
        *("unchunked_workloads", "windows_workloads", "states_workloads", "one_workloads"),
        *("aborts", "preemptions", "faults", "cut_prefills"),
    ):
        assert told[name] > 0, f"the workloads exercise no {name}"
