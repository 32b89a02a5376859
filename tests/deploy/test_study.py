"""deploy/study-h200.sh on two pretended GPUs: simulated servers answer as `vllm serve`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_gpus import install_gpus, starts
from paths import ROOT
from ports import free_ports

SCRIPT = ROOT / "deploy" / "study-h200.sh"
REAL_RUNS = ROOT / "tests" / "data" / "h200-2026-11-26"
STUDIES = ("hol", "shared-document", "saturation")
RUNS = tuple(f"{kind}-{way}-1" for kind in ("default", "flag") for way in ("direct", "forebay"))
THRESHOLD = "--long-prefill-token-threshold"


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """An empty folder for the pretended commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Short runs of a small context, on ports of their own."""
    server, _, proxy, admin = free_ports(4)
    python = Path(sys.executable)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder.parent / "out"),
        "VLLM": str(folder / "vllm"), "FOREBAY": str(python.with_name("forebay")),
        "PYTHON": str(python), "MODEL": "llama-3.1-8b", "CONTEXT": "16384", "SEEDS": "1",
        "DURATION": "6", "DOCUMENT_RATE": "0.5", "TIME_SCALE": "20", "SETTLE": "0",
        "LIMIT": "60", "PORT": str(server), "PROXY_PORT": str(proxy), "ADMIN_PORT": str(admin),
        "CUDA_VISIBLE_DEVICES": "",
    } | more  # fmt: skip


def study(given: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(SCRIPT)], env=given, capture_output=True, text=True, timeout=250, check=False
    )


def pretend_studies(out: Path, *names: str) -> None:
    for name in names:
        (out / name).mkdir(parents=True)
        (out / name / "results.json").write_text(json.dumps({"sentence": f"{name} is done."}))


def copy_default_runs(out: Path) -> None:
    """Put runs with default flags there, as an earlier call leaves them."""
    for run, real in zip(RUNS[:2], ("direct-4", "forebay-4"), strict=True):
        shutil.copytree(REAL_RUNS / real, out / "runs" / run)


def run_info(out: Path, run: str) -> dict[str, Any]:
    path = out / "runs" / run / "run.json"
    info: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return info


@pytest.mark.timeout(600)
def test_a_killed_study_goes_on_and_ends_with_a_page(bin_folder: Path, tmp_path: Path) -> None:
    """The first call dies in its second run, the second ends the rest, the third does nothing.

    The runs with default flags are there already, of a real H200.
    """
    install_gpus(bin_folder, time_scale=20.0)
    out, given = tmp_path / "out", environment(bin_folder)
    pretend_studies(out, "hol", "saturation")
    copy_default_runs(out)
    with (
        (tmp_path / "first.log").open("w") as log,
        subprocess.Popen(["bash", str(SCRIPT)], env=given, stdout=log, stderr=log) as first,
    ):
        while "run flag-forebay-1" not in (tmp_path / "first.log").read_text():
            assert first.poll() is None, (tmp_path / "first.log").read_text()
            time.sleep(0.02)
        first.kill()
    before = run_info(out, RUNS[2])
    assert before["ended"] == "complete"

    second = study(given)
    assert second.returncode == 0, second.stderr
    assert run_info(out, RUNS[2])["run_id"] == before["run_id"]
    assert [run_info(out, run).get("ended") for run in RUNS] == ["complete"] * 4
    assert [len(run_info(out, run)["targets"]) for run in RUNS] == [1, 1, 2, 1]
    assert (out / "report.html").exists()
    page = (out / "study.md").read_text()
    for said in (
        "| vLLM alone, default flags | 1 |", f"| Forebay, `{THRESHOLD} 2048` | 1 |",
        "**hol**: hol is done.", "**shared-document**: ", "- vLLM: 0.26.0", "- gpu: 1, NVIDIA H200",
        "- server (flag): `vllm serve meta-llama/Llama-3.1-8B-Instruct",
        "flags that this vLLM does not have: --max-num-queued-reqs",
    ):  # fmt: skip
        assert said in page
    served = starts(bin_folder)
    gpus = [line.split()[0] for line in served]  # those of one fleet start in any order
    assert [{*gpus[:2]}, {*gpus[2:4]}, gpus[4:]] == [{"0", "1"}, {"0", "1"}, ["0"]]
    assert [f"{THRESHOLD} 2048" in line for line in served] == [True] * 4 + [False]
    proxy = (out / "servers" / "flag" / "proxy.yaml").read_text()
    assert proxy.count("long_prefill_token_threshold: 2048") == 2

    third = study(given)
    assert third.returncode == 0, third.stderr
    assert starts(bin_folder) == served
    assert (out / "study.md").read_text() == page


@pytest.mark.timeout(300)
def test_a_threshold_that_vllm_lacks_is_left_out(bin_folder: Path, tmp_path: Path) -> None:
    """The runs without it are there already, of a real H200."""
    install_gpus(bin_folder, gpus=1, time_scale=20.0, lacks=[THRESHOLD])
    out = tmp_path / "out"
    pretend_studies(out, *STUDIES)
    copy_default_runs(out)
    done = study(environment(bin_folder))
    assert done.returncode == 0, done.stderr
    line = f"the runs flag-*: {THRESHOLD}: this vLLM has no such flag"
    assert f"left out: {line}" in done.stderr
    page = (out / "study.md").read_text()
    assert line in page
    assert "| Forebay, default flags | 1 |" in page
    assert not starts(bin_folder)


def test_a_flag_that_is_needed_ends_the_study(bin_folder: Path, tmp_path: Path) -> None:
    install_gpus(bin_folder, lacks=["--max-num-seqs"])
    done = study(environment(bin_folder))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--max-num-seqs: this vLLM has no such flag" in done.stderr
    assert not starts(bin_folder)


def test_a_vllm_that_is_not_there_ends_the_study(bin_folder: Path) -> None:
    install_gpus(bin_folder)
    done = study(environment(bin_folder, VLLM="/nowhere/vllm"))
    assert done.returncode == 1
    assert "--vllm /nowhere/vllm: no such command" in done.stderr


@pytest.mark.timeout(300)
def test_a_run_whose_server_died_does_not_count(bin_folder: Path, tmp_path: Path) -> None:
    """The server is killed in the first run: nothing is measured, and nothing counts as there."""
    install_gpus(bin_folder, gpus=1, time_scale=1.0, lacks=[THRESHOLD])
    out, given = tmp_path / "out", environment(bin_folder, TIME_SCALE="1", DURATION="2")
    pretend_studies(out, *STUDIES)
    log = tmp_path / "log"
    with (
        log.open("w") as said,
        subprocess.Popen(["bash", str(SCRIPT)], env=given, stdout=said, stderr=said) as running,
    ):
        while "run default-direct-1" not in log.read_text():
            assert running.poll() is None, log.read_text()
            time.sleep(0.02)
        state = json.loads((out / "servers" / "default" / "state.json").read_text())
        os.kill(state["servers"][0]["process"]["pid"], signal.SIGKILL)
        assert running.wait(200) == 1
    assert "left out: run default-direct-1: " in log.read_text()
    assert not any((out / "runs" / run).exists() for run in RUNS[:2])
    page = (out / "study.md").read_text()
    assert "run default-direct-1: " in page
    assert "flag-*: --long-prefill-token-threshold: this vLLM has no such flag" in page
    assert [line.split()[0] for line in starts(bin_folder)] == ["0"]
    assert "--long-prefill-token-threshold 0" not in starts(bin_folder)[0]
