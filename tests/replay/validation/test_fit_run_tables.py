"""A fit to the proxy's log of one hour predicts another: NVIDIA's op tables are the truth."""

import os
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from fakes.op_tables import needs_tables, tables_folder
from fakes.proxy_files import write_hour
from fakes.table_engine import engines_of_tables

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import GpuSpec
from forebay.replay.engine.timing.step_constants import Calibration
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.replay.sim.workload import SimWorkload
from forebay.replay.validation.fit_run import fit_run
from forebay.replay.validation.proxy_log import read_log
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.lengths import Lognormal, Uniform

SERVERS, LEARNED_LOAD = 2, 0.6
more_gpus = pytest.mark.skipif(
    "FOREBAY_TWIN_GPUS" not in os.environ, reason="20 s of CPU: set FOREBAY_TWIN_GPUS=all"
)
RTX_PRO = GpuSpec("rtx-pro-6000-server", 467.8e12, 1.792e12, 95.0, 188)
"""467.8 TFLOP/s, 1.792 TB/s, 97,887 MiB: the tables' own data sheet."""


def traffic(seed: int, count: int) -> list[TraceRequest]:
    """Chats of Azure's lengths, and 15 % questions about documents of 2,000 to 24,000 tokens."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=0.85, document_rate_per_s=0.15,
        document_tokens=Lognormal(8e3, 0.6, 2_000, 24_000),
        question_tokens=Uniform(20, 200), output_tokens=Uniform(60, 300), follow_gap_s=60.0,
        instruction_tokens=200, duration_s=count, seed=seed,
    )  # fmt: skip
    return list(chat_beside_documents(spec))


def engine(gpu: str | GpuSpec, constants: Calibration | None = None) -> EngineConfig:
    return EngineConfig("llama-3-8b", gpu, calibration=constants, max_model_len=32_768)


def served(rows: list[TraceRequest], config: EngineConfig, rate: float) -> list[SimOutcome]:
    """Play requests through the proxy's policy."""
    paced, _ = SimWorkload(rows, rate=rate).requests(config.context, lambda _: rate)
    return list(simulate(paced, Scenario(config, SERVERS)).outcomes)


def figures(outcomes: list[SimOutcome]) -> dict[str, float]:
    done = [(outcome.ttft_s, outcome.request, outcome.served) for outcome in outcomes]
    ttft = np.array([seconds for seconds, _, served in done if served], dtype=float)
    tpot = np.array([
        (served.finished_s - served.first_token_s) / max(1, row.output_tokens - 1)
        for _, row, served in done if served
    ])  # fmt: skip
    return {
        "TTFT p50": float(np.quantile(ttft, 0.5)), "TTFT p99": float(np.quantile(ttft, 0.99)),
        "TPOT p50": float(np.median(tpot)), "TPOT mean": float(tpot.mean()),
    }  # fmt: skip


@needs_tables
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "gpu",
    [
        "l40s",
        pytest.param("b200", marks=more_gpus),
        pytest.param(RTX_PRO, marks=more_gpus, id=RTX_PRO.name),
        pytest.param("a100", marks=more_gpus),
    ],
)
def test_a_twin_corrects_itself(
    gpu: str | GpuSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the constants of an H200. Judged on other requests at another load."""
    start, folder = kernel_table(), tables_folder()
    with engines_of_tables(folder):
        hour = traffic(1, 1_100)
        capacity = capacity_per_s(hour, engine(gpu, start), SERVERS)
        first = served(hour, engine(gpu, start), LEARNED_LOAD * capacity)
        other, rate = traffic(7, 3_000), 0.5 * capacity
        truth = figures(served(other, engine(gpu, start), rate))
    # Fit to the proxy's capture, which holds 1,000 requests and more.
    _, capture = write_hour(tmp_path, first)
    measured = read_log(capture)
    assert len(measured) > 1_000
    done = fit_run(measured, engine(gpu), start, used="a test", today=date(2026, 11, 29))
    # Judge both models in front of the same policy.
    errors = {}
    for name, constants in (("before", start), ("after", done.file.constants)):
        twin = figures(served(other, engine(gpu, constants), rate))
        errors[name] = {figure: twin[figure] / truth[figure] - 1 for figure in truth}
    with capsys.disabled():
        for name, off in errors.items():
            words = ", ".join(f"{figure} {error:+.1%}" for figure, error in off.items())
            print(f"\n{engine(gpu).gpu_spec.name} {name}: {words}", end="")
    assert done.refusal() is None
    assert abs(errors["after"]["TTFT p99"]) < 0.05
    assert abs(errors["after"]["TPOT mean"]) < 0.05
