"""The simulated engine beside a real vLLM 0.26 on one H200: how far off it is, and no further.

The runs in tests/data/h200-2026-11-26 are replays of t4.jsonl (chats beside 120,000-token
documents) against the server itself, without and with --long-prefill-token-threshold 2048.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT

RUNS = ROOT / "tests" / "data" / "h200-2026-11-26"
SERVER = (
    "--model", "llama-3-8b", "--gpu", "h200", "--vllm-version", "0.26", "--async-scheduling",
    "--max-model-len", "131072", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
    "--gpu-memory-utilization", "0.9",
)  # fmt: skip
FLAGS = {"direct-4": (), "flag-direct-4": ("--long-prefill-token-threshold", "2048")}
LIMITS = {
    "direct-4": {
        "ttft p50": 0.22, "ttft p90": 0.20, "ttft p99": 0.16,
        "tpot p50": 0.04, "tpot p90": 0.01, "tpot p99": 0.08,
        "e2e p50": 0.02, "e2e p90": 0.09, "e2e p99": 0.10,
    },
    "flag-direct-4": {
        "ttft p50": 0.48, "ttft p90": 0.36, "ttft p99": 0.16,
        "tpot p50": 0.40, "tpot p90": 0.46, "tpot p99": 0.15,
        "e2e p50": 0.39, "e2e p90": 0.23, "e2e p99": 0.12,
    },
}  # fmt: skip
"""Largest error of each time as a share of the measured one. Lower them when the model improves."""
HIT_LIMITS = {"direct-4": 0.001, "flag-direct-4": 0.02}
"""Largest difference of the share of prompt tokens that were cached."""


def validate(run: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.proxy", "engine", "validate", str(RUNS / run),
         "--trace", str(RUNS / "t4.jsonl"), *SERVER, *FLAGS[run], "--json"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("run", FLAGS)
def test_the_simulated_engine_is_as_near_a_real_h200_as_it_was(run: str) -> None:
    told = validate(run)
    errors = {
        f"{line['measure']} p{100 * line['quantile']:g}": line["error"] for line in told["lines"]
    }
    assert errors.keys() == LIMITS[run].keys()
    assert {line["requests"] for line in told["lines"]} == {215}
    further = {name: error for name, error in errors.items() if abs(error) > LIMITS[run][name]}
    assert not further
    hits = told["hit_ratio"]
    assert hits["measured"] > 0.1  # t4.jsonl repeats documents and chats
    assert hits["simulated"] == pytest.approx(hits["measured"], abs=HIT_LIMITS[run])
