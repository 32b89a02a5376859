"""A disk that is full while results are written: one line, exit status 2, nothing half written.

No file may grow in these processes, which is what they see of a full disk.
"""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.analysis.demo import processes
from forebay.proxy.cli import main

FULL = "File too large"  # how the system puts it; "No space left on device" on a real disk
SIM = "--target sim:llama-3-8b@h200"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one trace, and points for a calibration."""
    top = tmp_path_factory.mktemp("made")
    trace = f"{top}/t.jsonl"
    words = f"traces synth documents --requests 60 -o {trace} --quiet"
    assert main(words.split()) == 0
    for seed in (1, 2):
        words = f"simulate {trace} --arrivals poisson --rate 2 --seed {seed} --out {top}/r{seed}"
        assert main(words.split()) == 0
    (top / "p.csv").write_text("kind,prompt_tokens,seconds\nttft,1024,0.04\nttft,8192,0.25\n")
    return top


def with_room(size: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which no file may have more bytes than `size`."""
    return subprocess.run(
        [sys.executable, "-m", "forebay.proxy", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )


@pytest.mark.parametrize(
    "line",
    [
        "runs merge {made}/r1 {made}/r2 -o {new}/merged",
        "runs export csv {made}/r1 -o {new}/r.csv",
        "report {made}/r1 -o {new}/r.html",
        "simulate {made}/t.jsonl --out {new}/run",
        f"experiment prefill {SIM} --lengths 1k,2k,4k --repeats 1 --out {{new}}/prefill",
        f"search {{made}}/t.jsonl {SIM} --arrivals poisson --attainment 0.9 --out {{new}}/search",
        "size --users 2 --document-tokens 2000 --quick --jobs 1 --out {new}/size",
        "engine fit {made}/p.csv --model llama-3-8b --gpu h200 --json -o {new}/cal.json",
        "demo --duration 5 --time-scale 5 --json --out {new}/demo",
    ],
)
def test_a_full_disk_is_one_line(line: str, made: Path, tmp_path: Path) -> None:
    words = line.format(made=made, new=tmp_path).split()
    quiet = [] if words[0] in ("engine",) else ["--quiet"]
    done = with_room(0, *words, *quiet)
    assert done.returncode == 2, done.stderr
    assert f"cannot be written ({FULL})" in done.stderr
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_search_on_a_full_disk_goes_on_later(made: Path, tmp_path: Path) -> None:
    """The part that could not be kept is missing, not half there."""
    out = tmp_path / "search"
    words = f"search {made}/t.jsonl {SIM} --arrivals poisson --attainment 0.9 --out {out} --quiet"
    done = with_room(1000, *words.split())
    assert done.returncode == 2, done.stderr
    assert f"trials.jsonl: cannot be written ({FULL})" in done.stderr
    kept = (out / "trials.jsonl").read_bytes()
    assert kept.endswith(b"}\n")
    assert main(words.split()) == 0
    assert kept.splitlines()[0] in (out / "trials.jsonl").read_bytes().splitlines()


@pytest.mark.real_time
async def test_a_server_runs_on_when_its_log_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that nobody reads from would stop as soon as the pipe to us is full."""

    class Full:
        name = "full.log"

        def write(self, line: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(Path, "open", lambda *_, **__: Full())

    words = ["engine", "--model", "llama-3-8b", "--gpu", "h200", "--port", "0"]
    async with processes.server(words, tmp_path / "engine.log") as url:
        assert url.startswith("http://127.0.0.1:")
