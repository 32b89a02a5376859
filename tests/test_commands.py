"""The commands of the command line: bad input gets one clear line and exit status 2."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.made_runs import write_pair
from stages.started import FOREBAY, run_forebay

from forebay.analysis.demo.processes import ServerFailed
from forebay.proxy.cli import main


def test_bad_input_of_a_process() -> None:
    """The exit status and the one line are those of `main`."""
    done = run_forebay("proxy", "--backend", "localhost:8001")
    assert (done.returncode, done.stdout) == (2, "")
    assert "give a URL such as http://127.0.0.1:8001" in done.stderr
    assert done.stderr.count("\n") == 1


PRINTING = ("--help", "proxy --help", "proxy --print-config", "kv --model llama-3-8b --gpu h200")


def printing_to(out: int, words: str) -> tuple[int, str]:
    """The exit status and standard error of a command that prints there."""
    done = subprocess.run(
        [*FOREBAY, *words.split()],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", PRINTING)
def test_output_to_a_full_disk_gets_one_line(words: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        status, said = printing_to(full, words)
    finally:
        os.close(full)
    assert (status, said.count("\n")) == (2, 1)
    assert "cannot write the output: No space left on device" in said


@pytest.mark.parametrize("words", PRINTING)
def test_a_reader_that_leaves_is_no_failed_check(words: str) -> None:
    """As in `forebay kv ... | head -1`: neither 1 nor 2."""
    read, write = os.pipe()
    os.close(read)
    try:
        assert printing_to(write, words) == (141, "")
    finally:
        os.close(write)


def test_every_key_is_printed_without_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--print-config"]) == 0
    out, _ = capsys.readouterr()
    assert "backends: []\n" in out
    assert "max_concurrency" not in out
    assert "admin_port: 9090\n" in out
    assert main(["proxy", "--print-config", "--check-config"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no backend: give --backend" in err


def test_a_password_in_a_url_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--backend", "http://u:secretpw@h:1"]) == 2
    assert main(["explain", "x", "--admin", "ftp://u:secretpw@h:1"]) == 2
    said = capsys.readouterr().err
    assert "secretpw" not in said
    assert "ftp://***@h:1" in said


def test_the_proxy_starts_without_a_backend_and_stops_with_0() -> None:
    words = ["proxy", "--backend", "http://127.0.0.1:9", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen([*FOREBAY, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "listening on http://127.0.0.1:" in said
    assert "backend gpu0 is unreachable" in said
    assert "gpu0: long prompts are computed whole" in said


@pytest.mark.parametrize(
    "held", ["trace.jsonl", "report.html", "direct/summary.json", "forebay/run.json"]
)
def test_the_demo_overwrites_nothing_unasked(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise ServerFailed("it was started")

    monkeypatch.setattr("forebay.analysis.demo.side_by_side.side_by_side", never)
    file = tmp_path / held
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    words = ["demo", "--out", str(tmp_path), "--duration", "5"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert str(file if file.parent == tmp_path else file.parent) in said
    assert said.count("--force") == said.count("\n") == 1
    assert file.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert main([*words, "--force"]) == 1
    assert "it was started" in capsys.readouterr().err


def test_the_preview_of_the_demo_writes_a_report_and_rejects_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "--preview", "--json", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "preview in virtual time" in said.err
    found = {one["case"]["router"]: one for one in json.loads(said.out)["preview"]}
    assert list(found) == ["direct", "least connections", "cache-aware", "forebay"]
    ours = found.pop("forebay")
    # A document of 120,000 tokens needs 9 s of a GPU: one would have come after 15 s.
    assert ours["rejected"] == {"deadline_unattainable": 1}
    assert ours["attainment_by_bucket"]["chat"] >= 0.999
    assert ours["attainment"] > 0.995
    for other in found.values():
        assert ours["attainment"] > other["attainment"]
        assert ours["attainment_by_bucket"]["chat"] > other["attainment_by_bucket"]["chat"]
        assert ours["ttft_ms"]["chat"]["p99"] < other["ttft_ms"]["chat"]["p99"] / 2
    assert "virtual time" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert main(words) == 2  # it overwrites nothing unasked


def test_the_preview_of_the_demo_with_the_scheduler_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every router's chats have short pauses then, with those of the API server: up to 272 ms."""
    words = ["demo", "--preview", "--out", str(tmp_path), "--scheduler-cls"]
    assert main([*words, "forebay", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["preview"]:
        assert row["ttft_ms"]["chat"]["p99"] < 1_000
        assert row["stall_ms"]["chat"]["max"] < 300
    assert main([*words, "other", "--force"]) == 2
    assert "of all classes only forebay can be simulated" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_the_demo_in_a_short_form(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = run_forebay(
        *("demo", "--out", str(out), "--duration", "15", "--time-scale", "5", "--json"),
        FOREBAY_HEALTH__TIMEOUT="30s",  # an engine may be late: other tests keep the machine busy
    )
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    assert comparison["headline"]
    assert [one["case"]["router"] for one in comparison["preview"]][-1] == "forebay"
    assert "long_prefill_token_threshold: 2048" in (out / "logs/proxy.yaml").read_text()
    assert (out / "logs/engine0.log").stat().st_size > 0
    for side in ("direct", "forebay"):
        summary = json.loads((out / side / "summary.json").read_text())
        assert summary["requests"] > 50
        assert summary["completed"] + sum(summary["rejected"].values()) == summary["requests"]
        assert not summary["failed"]
        for name in ("run.json", "requests.parquet", "latency.hlog"):
            assert (out / side / name).stat().st_size > 0
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["pyarrow", "jinja2"])
def test_a_missing_extra_is_named_in_one_line(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = write_pair(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "forebay.analysis.report.report", raising=False)
    words = ["report", str(folder), "-o", str(tmp_path / "report.html")]
    assert main(words) == 2
    line = f"forebay report: {package} is not installed: pip install 'forebay[load]'\n"
    assert capsys.readouterr().err == line
