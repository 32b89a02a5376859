"""The commands of the tutorials and the load test of README.md run and print what is shown."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pages.shown import Ports, block, blocks, masked
from paths import ROOT
from stages.started import FOREBAY, eventually, run_forebay, started

TUTORIALS = ROOT / "docs" / "tutorials"
TUTORIAL = (TUTORIALS / "first-proxy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """Two simulated servers and a proxy, started by the lines of the tutorial."""
    logs, at = tmp_path_factory.mktemp("logs"), Ports()
    with ExitStack() as running:
        for line in block(TUTORIAL, "forebay engine").splitlines():
            words = shlex.split(at(line.removesuffix(" &")))[1:]
            ready = f"http://127.0.0.1:{words[-1]}/health"
            running.enter_context(started([*FOREBAY, *words], logs / words[-1], ready))
        words = shlex.split(at(block(TUTORIAL, "forebay proxy")))[1:]
        words += ["--port", at.free[2], "--admin-port", at.free[3]]
        admin = f"http://127.0.0.1:{at.free[3]}"
        running.enter_context(started([*FOREBAY, *words], logs / "proxy", f"{admin}/readyz"))
        eventually(lambda: "gpu1 is up" in (logs / "proxy").read_text(encoding="utf-8"))
        log = (logs / "proxy").read_text(encoding="utf-8")
        for line in block(TUTORIAL, "INFO    listening").splitlines():
            assert masked(line.split("INFO")[1]) in masked(log)
        yield at


def test_a_free_port_that_holds_a_shown_one() -> None:
    """18002 stands for 8001: its last four digits are not the 8002 of the pages."""
    assert Ports(("18002", "28080", "19090", "8001"))("8001 8002 8080 9090 80801") == (
        "18002 28080 19090 8001 80801"
    )


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_and_explain(ports: Ports) -> None:
    printed = run("bash", "-c", ports(block(TUTORIAL, "curl -i")))
    heads = printed.lower().splitlines()
    for line in block(TUTORIAL, "HTTP/1.1 200 OK").lower().splitlines():
        assert masked(line) in map(masked, heads)
    words = block(TUTORIAL, "forebay explain").splitlines()[0].removeprefix("$ forebay ").split()
    why = run(*FOREBAY, *words, "--admin", f"http://127.0.0.1:{ports.free[3]}")
    lines = [masked(line) for line in why.splitlines()]
    for line in block(TUTORIAL, "forebay explain").splitlines()[1:]:
        assert masked(line) in lines


def test_the_openai_client(ports: Ports) -> None:
    pytest.importorskip("openai")
    assert run(sys.executable, "-c", ports(block(TUTORIAL, "from openai"))).strip()


def test_the_load_test_of_the_readme(ports: Ports, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "run"
    words = ["--chat-rate", "8", "--document-rate", "0.3", "--duration", "4s", "-o", str(trace)]
    run(*FOREBAY, "traces", "synth", "chat-beside-documents", "--document-tokens", "6000", *words)
    shown = block(README, "forebay replay").partition("$ forebay replay ")[2].splitlines()
    command = ports(f"replay {shown[0]}").replace("trace.jsonl", str(trace))
    printed = run(*FOREBAY, *command.replace("runs/a", str(out)).split())
    lines = [masked(line) for line in printed.splitlines()]
    for line in shown[1:4]:
        assert masked(line) in lines, printed


@pytest.mark.timeout(300)
def test_the_first_load_test(ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line as it stands, but for the length of the two replays."""
    monkeypatch.chdir(tmp_path)
    page = (TUTORIALS / "first-load-test.md").read_text(encoding="utf-8")
    synth, describe = block(page, "forebay traces").splitlines()
    assert "requests" in run_line(synth)[1]
    assert "requests" in run_line(describe)[0]
    for line in ports(block(page, "forebay replay")).splitlines():
        printed, _ = run_line(f"{line} --duration 3s")
        lines = [masked(line) for line in printed.splitlines()]
        for shown in block(page, "verdict: valid").splitlines()[:3]:
            assert masked(shown) in lines, printed
    compare, report = block(page, "forebay compare").splitlines()
    assert "B/A" in run_line(compare)[0]
    run_line(report)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.timeout(300)
def test_from_traffic_to_a_gpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up trace for the recorded one."""
    monkeypatch.chdir(tmp_path)
    page = (TUTORIALS / "traffic-to-gpus.md").read_text(encoding="utf-8")
    run_line("forebay traces synth chat-beside-documents --duration 20s -o trace.jsonl")
    lines = [line for _, text in blocks(page) for line in text.splitlines()]
    simulations = [line for line in lines if line.startswith("forebay simulate")]
    assert len(simulations) == 2
    for line in simulations:
        printed, _ = run_line(line)
        assert "met" in printed
        assert len(printed.splitlines()) >= 5


def run_line(line: str) -> tuple[str, str]:
    """Standard output and standard error of a `forebay` line."""
    done = run_forebay(*shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
