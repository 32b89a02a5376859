"""Servers that start, die or do not listen, with a script in the place of vLLM; real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.fake_vllm import children, install, starts
from stages.fleet_stage import fleet_up
from stages.started import run_forebay
from vllm_server import ModelSize, write_model

from forebay.proxy.cli import main
from forebay.replay.fleet.servers import fleet_status, last_words, stop_servers
from forebay.replay.fleet.state import (
    FleetState,
    Process,
    ServerState,
    create_state,
    read_state,
    start_time,
)
from forebay.traces.ground.errors import InputError

WAIT_S = 100.0


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The words of `fleet up` for servers of the script, of which none is left afterwards."""
    log = tmp_path / "starts"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    write_model(tmp_path / "model", ModelSize())
    yield ["--model", str(tmp_path / "model"), "--cpu", "--port", "0",
           "--vllm", str(install(tmp_path))]  # fmt: skip
    # A killed child takes a moment to go.
    started = [*(start["pid"] for start in starts(log)), *children(log).values()]
    wait_for(lambda: not any(map(start_time, started)))
    assert not (tmp_path / "fleet" / "state.json").exists()


def test_up_status_and_down_as_commands(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fleet"
    status, down = (["fleet", word, "--dir", str(folder)] for word in ("status", "down"))
    assert main(status) == 2
    with fleet_up([*words, "--servers", "2", "--", "--load-format", "dummy"], folder) as fleet:
        assert "--enable-prefix-caching" in fleet.said
        assert f"all 2 up; now: forebay proxy --config {folder}/proxy.yaml" in fleet.said
        assert (folder.stat().st_mode & 0o777) == 0o700
        code, said_now = fleet.status()
        assert (code, said_now["well"]) == (0, True)
        capsys.readouterr()
        assert main(status) == 0
        shown = capsys.readouterr().out
        assert "cpu1  http://127.0.0.1:" in shown
        assert shown.count("  healthy\n") == 2
        assert main(["fleet", "up", "--dir", str(folder), *words]) == 2
        cure = "a fleet is up there: stop it with `forebay fleet down --dir "
        assert cure in capsys.readouterr().err
        taken = fleet.state["servers"][0]["url"].rpartition(":")[2]
        other = ["fleet", "up", "--dir", str(tmp_path / "other"), *words, "--port", taken]
        assert main(other) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"forebay fleet: --port {taken}: cannot listen on 127.0.0.1")
        assert fleet.down() == {"cpu0": "stopped", "cpu1": "stopped"}
    assert main(status) == 1
    assert main(down) == 0


def test_a_server_that_dies_leaves_the_other_running(tmp_path: Path, words: list[str]) -> None:
    with fleet_up([*words, "--servers", "2"], tmp_path / "fleet") as fleet:
        first, second = (server["process"]["pid"] for server in fleet.state["servers"])
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not start_time(first))
        code, status = fleet.status()
        assert (code, status["well"]) == (1, False)
        assert [server["pid"] for server in status["servers"]] == [None, second]
        assert [server["healthy"] for server in status["servers"]] == [False, True]
        # The dead server has left its engine, which still occupies the GPU's memory.
        assert fleet.down() == {"cpu0": "killed", "cpu1": "stopped"}


def test_a_server_that_ignores_sigterm_is_killed_in_the_end(
    tmp_path: Path, words: list[str]
) -> None:
    with fleet_up(words, tmp_path / "fleet", FAKE_DEAF="1"):
        state = read_state(tmp_path / "fleet")
        assert state is not None
        assert state.stop_s == 45
        state.stop_s = 0.05
        assert stop_servers(state) == {"cpu0": "killed"}


def test_an_interrupt_of_down_kills_at_once(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "fleet"
    down = [sys.executable, "-m", "forebay.proxy", "fleet", "down", "--dir", str(folder)]
    with (
        fleet_up([*words, "--drain", "600"], folder, FAKE_DEAF="1"),
        subprocess.Popen(down, stderr=subprocess.PIPE, text=True) as stopping,
    ):
        assert stopping.stderr is not None
        assert "at most 615 s; Ctrl-C kills it" in stopping.stderr.readline()
        time.sleep(0.2)  # it waits by then
        stopping.send_signal(signal.SIGINT)
        assert stopping.stderr.readline() == "fleet: cpu0: killed\n"
        assert stopping.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("environ", "more", "says"),
    [
        ({"FAKE_DIES": "cpu0"}, [], "cpu0 ended with status 3: ValueError: no such flag"),
        ({"FAKE_SILENT": "1"}, ["--start-timeout", "1"], "cpu0 was not up in 1 s: "),
    ],
)
def test_a_fleet_that_does_not_come_up_ends_with_1(
    tmp_path: Path, words: list[str], environ: dict[str, str], more: list[str], says: str
) -> None:
    words = [*words, "--servers", "2", *more]
    done = run_forebay("fleet", "up", "--dir", str(tmp_path / "fleet"), *words, **environ)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_leaves_no_server(
    tmp_path: Path, words: list[str], number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even where the tests run under nohup
    command = [sys.executable, "-m", "forebay.proxy", "fleet", "up", "--dir"]
    try:
        with subprocess.Popen(
            [*command, str(tmp_path / "fleet"), *words],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "FAKE_SILENT": "1"},
        ) as process:  # fmt: skip
            assert process.stderr is not None
            assert next(line for line in process.stderr if ": starting as process " in line)
            process.send_signal(number)
            assert process.wait(WAIT_S) == 130
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--- a b\nValueError: x\n--- c d\nINFO:     Begun\n", "INFO:     Begun"),
        ("--- a\n(E pid=1) ERROR 11-21 13:50:34 [f.py:2] a.b.OSError: full\n\nbye\n",
         "OSError: full"),
        ("--- a\nvllm: error: unrecognized arguments: --x\n",
         "error: unrecognized arguments: --x"),
        ("--- a\nWARNING 11-21 13:50:34 [f.py:2] OSError: 24, raise it\nlast\n", "last"),
        ("--- a\n10%|#  \r55%|##\n", "55%|##"),
        ("--- a\n", "its log is empty"),
    ],
)  # fmt: skip
def test_the_log_line_that_tells(text: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert last_words(log) == words


def state_of(folder: Path, process: Process) -> FleetState:
    server = ServerState("gpu0", "http://127.0.0.1:9", str(folder / "log"), 0, process)
    return FleetState("m", "0.32", "proxy.yaml", 1.0, [server])


@pytest.mark.parametrize("began", ["", "another boot:1", "this boot:1"])
def test_a_number_that_another_process_has_by_now_is_not_touched(
    tmp_path: Path, began: str
) -> None:
    """The state file names a process that leads a group, with another start time."""
    with subprocess.Popen(["sleep", "20"], start_new_session=True) as other:
        boot = start_time(other.pid).partition(":")[0]
        process = Process(other.pid, began.replace("this boot", boot))
        assert Process(other.pid, start_time(other.pid)).alive
        create_state(tmp_path, state_of(tmp_path, process))
        state = read_state(tmp_path)
        assert state == state_of(tmp_path, process)
        assert fleet_status(state)["servers"][0]["pid"] is None
        assert stop_servers(state) == {"gpu0": "gone"}
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 3}'])
def test_a_file_that_is_no_state_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InputError, match=r"state\.json: not the state of a fleet"):
        read_state(tmp_path)
