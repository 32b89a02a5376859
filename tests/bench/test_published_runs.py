"""The committed results of published, calibrated and tuned runs: how far off they are."""

import json
from pathlib import Path
from statistics import median

import calibrated_h200
import pytest
import tune_vllm_cpu
from published_runs import (
    LOOP_TIMES,
    LOOPS,
    MODELS,
    RESULT,
    SERVED,
    SERVED_TIMES,
    SHEETS,
    looped,
    off,
    served,
)

LAYERS = MODELS["MiniMax-M2.5"]["num_hidden_layers"]
RUNS = json.loads(RESULT.read_text())


def test_published_runs_are_as_near_as_they_were() -> None:
    assert len(RUNS["served"]) == len(SERVED)
    e2e, _, ttft_p99 = (
        median(abs(off(row, name)) for row in RUNS["served"]) for name in SERVED_TIMES
    )
    assert (e2e < 0.05, ttft_p99 < 0.20) == (True, True)
    lacking = {
        gpu: [1e3 * (row["tpot_ms"] - row["simulated"]["tpot_ms"]) / LAYERS
              for row in RUNS["loops"] if row["gpu"] == gpu and row["prompt"] == 1024]
        for gpu in SHEETS
    }  # fmt: skip
    assert (min(lacking["H200"]) > 85, max(lacking["H200"]) < 120) == (True, True)  # us a layer
    assert (min(lacking["B300"]) > 20, max(lacking["B300"]) < 60) == (True, True)


@pytest.mark.parametrize("number", [3, 8])
def test_a_run_is_simulated_as_its_result_says(number: int, tmp_path: Path) -> None:
    found = served(SERVED[number], tmp_path)
    for name in SERVED_TIMES:
        assert found[name] == pytest.approx(RUNS["served"][number]["simulated"][name], rel=1e-9)


def test_a_closed_loop_is_simulated_as_its_result_says(tmp_path: Path) -> None:
    found = looped(LOOPS[0], tmp_path)
    for name in LOOP_TIMES:
        assert found[name] == pytest.approx(RUNS["loops"][0]["simulated"][name], rel=1e-9)


def test_first_tokens_of_a_run_that_was_not_fitted() -> None:
    told = json.loads(calibrated_h200.RESULT.read_text())
    errors = [
        line["error"]
        for one in told
        for line in one["lines"]
        if one["fitted"] and (line["measure"], line["quantile"]) == ("ttft", 0.99)
    ]
    assert len(errors) == 2
    assert max(map(abs, errors)) < 0.03


def test_gains_of_tune_are_those_predicted() -> None:
    for one in json.loads(tune_vllm_cpu.RESULT.read_text())["traces"]:
        start, best = one["predicted"]
        assert one["gain"] == pytest.approx(best - start, rel=0.1)
