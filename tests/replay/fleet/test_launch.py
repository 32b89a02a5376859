"""Servers that start, die or do not listen, with a script in the place of vLLM; real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from fake_vllm import children, install, starts
from fleet_stage import Fleet, fleet_up, forebay
from vllm_server import ModelSize, write_model

from forebay.proxy.cli import main
from forebay.replay.fleet.cli import _free_ports
from forebay.replay.fleet.control import stop_fleet
from forebay.replay.fleet.gpu.vllm_install import VllmInstall
from forebay.replay.fleet.launch import healthy
from forebay.replay.fleet.plan import FleetOptions, FleetPlan, make_plan
from forebay.replay.fleet.server_process import ServerProcess, last_line, last_words
from forebay.replay.fleet.state import (
    FleetState,
    Process,
    ServerState,
    left_of,
    locked,
    read_state,
    start_time,
    this_process,
    write_state,
)
from forebay.traces.errors import InputError

WAIT_S = 100.0


def all_gone(scene_log: Path) -> None:
    """Wait until nothing of what was started is left: a killed child takes a moment to go."""
    left = [*(start["pid"] for start in starts(scene_log)), *children(scene_log).values()]
    deadline = time.monotonic() + WAIT_S
    while left := [pid for pid in left if start_time(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", ModelSize())
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _starts_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "starts"))


def a_plan(folder: Path, model: Path) -> FleetPlan:
    options = FleetOptions(str(model), folder, cache_root=folder)
    fake = VllmInstall(str(install(folder)), "0.32.0")
    return make_plan(options, fake, [], _free_ports("127.0.0.1", 2))


def words_of(folder: Path, model: Path, *more: str) -> list[str]:
    """Return the words of `fleet up` for servers of the script."""
    return [
        *("--model", str(model), "--cpu", "--port", "0", "--vllm", str(install(folder))),
        *("--cache-root", str(folder), *more),
    ]


def test_a_server_that_dies_leaves_the_other_running(tmp_path: Path, model: Path) -> None:
    words = words_of(tmp_path, model, "--servers", "2")
    with fleet_up(words, tmp_path / "fleet") as fleet:
        assert fleet.status()[0] == 0
        first, second = (server["process"]["pid"] for server in fleet.state["servers"])
        engine = children(tmp_path / "starts")[first]
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "cpu0 killed by SIGKILL: " in fleet.log.read_text())
        wait_for(lambda: not start_time(engine))  # and the GPU's memory with it
        code, status = fleet.status()
        assert (code, status["well"]) == (1, False)
        assert [server["pid"] for server in status["servers"]] == [None, second]
        assert [server["healthy"] for server in status["servers"]] == [False, True]
        assert fleet.down().returncode == 0
        assert fleet.process.wait(WAIT_S) == 1
        assert "stopped; not all servers were up" in fleet.log.read_text()
    all_gone(tmp_path / "starts")


def test_a_fleet_whose_servers_have_all_died_ends(tmp_path: Path, model: Path) -> None:
    with fleet_up(words_of(tmp_path, model), tmp_path / "fleet") as fleet:
        os.kill(fleet.state["servers"][0]["process"]["pid"], signal.SIGKILL)
        assert fleet.process.wait(WAIT_S) == 1
    assert read_state(tmp_path / "fleet") is None
    all_gone(tmp_path / "starts")


def test_a_server_that_ignores_sigterm_is_killed_at_the_second_signal(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEAF", "1")
    with fleet_up(words_of(tmp_path, model, "--drain", "600"), tmp_path / "fleet") as fleet:
        fleet.process.terminate()
        wait_for(lambda: "SIGTERM: stopping" in fleet.log.read_text())
        fleet.process.terminate()
        assert fleet.process.wait(WAIT_S) == 0
        assert "cpu0: killed, it had not ended on SIGTERM" in fleet.log.read_text()
    all_gone(tmp_path / "starts")


async def deaf_server(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> ServerProcess:
    """Start a server that ignores SIGTERM, and wait until it is healthy."""
    monkeypatch.setenv("FAKE_DEAF", "1")
    plan = a_plan(tmp_path, model).servers[0]
    process = await ServerProcess.start(plan)
    async with aiohttp.ClientSession() as session:
        while not await healthy(session, plan.url):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return process


def test_a_server_that_ignores_sigterm_is_killed_in_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        process = await deaf_server(tmp_path, model, monkeypatch)
        assert not await process.stop(0.05, asyncio.Event())

    asyncio.run(scenario())
    all_gone(tmp_path / "starts")


def test_a_stop_that_is_cancelled_leaves_no_process(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens where the other server fails at the same time."""

    async def scenario() -> None:
        process = await deaf_server(tmp_path, model, monkeypatch)
        stopping = asyncio.create_task(process.stop(WAIT_S, asyncio.Event()))
        await asyncio.wait({stopping}, timeout=0.05)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        async with asyncio.timeout(0):  # it is known to have ended
            await process.wait()

    asyncio.run(scenario())
    all_gone(tmp_path / "starts")


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("--- a b\nValueError: x\n--- c d\nINFO:     Begun\n", "INFO:     Begun", "Begun"),
        ("--- a\n(E pid=1) ERROR 11-21 13:50:34 [f.py:2] a.b.OSError: full\n\nbye\n",
         "OSError: full", "bye"),
        ("--- a\nvllm: error: unrecognized arguments: --x\n",
         "error: unrecognized arguments: --x", "vllm: error: unrecognized arguments: --x"),
        ("--- a\nWARNING 11-21 13:50:34 [f.py:2] OSError: 24, raise it\nlast\n", "last", "last"),
        ("--- a\n10%|#  \r55%|##\n", "55%|##", "55%|##"),
        ("--- a\n", "its log is empty", ""),
    ],
)  # fmt: skip
def test_the_log_line_that_tells(text: str, words: str, line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert (last_words(log), last_line(log)) == (words, line)


def test_a_number_that_somebody_else_has_by_now_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state file names this very process id, but another start time."""
    mine = Process(os.getpid(), "another boot:1")
    assert not mine.alive
    assert this_process().alive
    server = ServerState("gpu0", "http://127.0.0.1:9", str(tmp_path / "log"), process=mine)
    write_state(tmp_path, FleetState(mine, "m", "0.32", "proxy.yaml", 1.0, [server]))
    assert main(["fleet", "status", "--dir", str(tmp_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["well"], said["supervisor"]["alive"]) == (False, False)
    assert said["servers"][0]["pid"] is None
    assert main(["fleet", "down", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["supervisor"] == "gone"
    assert read_state(tmp_path) is None


def test_a_process_whose_start_was_not_read_is_not_alive(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = Process(process.pid, start_time(process.pid))
    assert gone.began == ""
    assert not gone.alive
    server = ServerState("gpu0", "http://127.0.0.1:9", str(tmp_path / "log"), process=gone)
    state = FleetState(gone, "m", "0.32", "proxy.yaml", 1.0, [server])
    write_state(tmp_path, state)
    assert stop_fleet(tmp_path, state) == {"supervisor": "gone", "left_servers": {}}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 2}'])
def test_a_state_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(InputError, match=r"state\.json: "):
        read_state(tmp_path)


def test_one_fleet_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InputError, match="a fleet is up there"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_up_status_and_down_as_commands(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, fake = tmp_path / "fleet", install(tmp_path)
    words = ["--model", str(model), "--cpu", "--servers", "2", "--port", "0", "--vllm", str(fake),
             "--cache-root", str(tmp_path), "--", "--load-format", "dummy"]  # fmt: skip
    status, down = (["fleet", word, "--dir", str(folder)] for word in ("status", "down"))
    assert main(status) == 2
    with fleet_up(words, folder) as fleet:
        said = fleet.log.read_text()
        assert "--enable-prefix-caching" in said
        assert "forebay proxy --config " in said
        assert (folder.stat().st_mode & 0o777) == 0o700
        code, said_now = fleet.status()
        assert (code, said_now["well"]) == (0, True)
        capsys.readouterr()
        assert main(status) == 0
        shown = capsys.readouterr().out
        assert "cpu1  http://127.0.0.1:" in shown
        assert shown.count("  healthy\n") == 2
        taken = fleet.state["servers"][0]["url"].rpartition(":")[2]
        assert main(["fleet", "up", "--dir", str(folder), *words]) == 2
        assert "a fleet is up there" in capsys.readouterr().err
        words[words.index("--port") + 1] = taken
        assert main(["fleet", "up", "--dir", str(tmp_path / "other"), *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"forebay fleet: --port {taken}: cannot listen on 127.0.0.1")
        done = fleet.down()
        assert (done.returncode, json.loads(done.stdout)["supervisor"]) == (0, "stopped")
        assert fleet.process.wait() == 0
    all_gone(tmp_path / "starts")
    assert read_state(folder) is None
    assert main(status) == 1
    assert main(down) == 0


def test_a_dead_terminal_ends_no_server_and_keeps_none(tmp_path: Path, model: Path) -> None:
    """Standard output and error have no reader any more, as after a lost connection."""
    folder, log = tmp_path / "fleet", tmp_path / "starts"
    fake = install(tmp_path)
    out, err = os.pipe(), os.pipe()
    with hangups(signal.SIG_DFL), subprocess.Popen(
        [sys.executable, "-m", "forebay.proxy", "fleet", "up", "--dir", str(folder), "--json",
         "--model", str(model), "--cpu", "--port", "0", "--vllm", str(fake),
         "--cache-root", str(tmp_path)],
        stdout=out[1], stderr=err[1],
    ) as process:  # fmt: skip
        try:
            os.close(out[0])
            os.close(out[1])
            os.close(err[1])
            with open(err[0]) as said:
                assert next(line for line in said if ": starting as process " in line)
            wait_for(lambda: read_state(folder) is not None)
            process.send_signal(signal.SIGHUP)
            assert process.wait(WAIT_S) == 0
        finally:
            process.terminate()
    all_gone(log)


def test_nohup_outlives_its_terminal(tmp_path: Path, model: Path) -> None:
    words = ["--model", str(model), "--cpu", "--port", "0", "--vllm", str(install(tmp_path)),
             "--cache-root", str(tmp_path)]  # fmt: skip
    with hangups(signal.SIG_IGN), fleet_up(words, tmp_path / "fleet") as fleet:
        fleet.process.send_signal(signal.SIGHUP)
        assert fleet.status()[0] == 0
        assert fleet.down().returncode == 0
        assert fleet.process.wait(WAIT_S) == 0
        assert "SIGTERM: stopping" in fleet.log.read_text()
    all_gone(tmp_path / "starts")


@contextmanager
def hangups(answer: signal.Handlers) -> Iterator[None]:
    """Processes started inside handle SIGHUP this way, even where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def unwatched(tmp_path: Path, model: Path) -> Iterator[tuple[Fleet, Path, list[str]]]:
    """A fleet whose supervisor was killed, its folder, and the words that would start it again."""
    folder, fake = tmp_path / "fleet", install(tmp_path)
    words = ["--model", str(model), "--cpu", "--port", "0", "--vllm", str(fake),
             "--cache-root", str(tmp_path)]  # fmt: skip
    with fleet_up(words, folder) as fleet:
        fleet.process.kill()
        fleet.process.wait()
        yield fleet, folder, words


def test_down_ends_what_a_killed_supervisor_left(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unwatched(tmp_path, model) as (fleet, folder, words):
        code, status = fleet.status()
        assert (code, status["well"], status["servers"][0]["healthy"]) == (1, False, True)
        assert main(["fleet", "up", "--dir", str(folder), *words]) == 2
        assert "of a fleet whose supervisor is gone still run" in capsys.readouterr().err
        assert json.loads(fleet.down().stdout) == {
            "supervisor": "gone", "left_servers": {"cpu0": "stopped"},
        }  # fmt: skip
    all_gone(tmp_path / "starts")


def test_down_ends_the_engine_of_an_api_server_that_died_unwatched(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unwatched(tmp_path, model) as (fleet, folder, words):
        state = read_state(folder)
        assert state is not None
        server = state.servers[0].process
        assert server is not None
        assert not left_of(server)  # it is there itself
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.alive)
        (engine,) = children(tmp_path / "starts").values()
        assert [one.pid for one in left_of(server)] == [engine]
        boot, _, tick = server.began.partition(":")
        assert not left_of(Process(server.pid, f"{boot}:{int(tick) + 10**9}"))
        assert not left_of(Process(server.pid, f"another boot:{tick}"))
        assert main(["fleet", "up", "--dir", str(folder), *words]) == 2
        assert "still run" in capsys.readouterr().err
        assert json.loads(fleet.down().stdout)["left_servers"] == {"cpu0": "killed"}
        wait_for(lambda: not start_time(engine))
        assert not left_of(server)
    all_gone(tmp_path / "starts")


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_fleet_that_does_not_start_ends_with_1(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DIES", "cpu0")
    done = forebay(
        *("fleet", "up", "--dir", str(tmp_path / "fleet"), "--model", str(model), "--cpu"),
        *("--port", "0", "--vllm", str(install(tmp_path)), "--cache-root", str(tmp_path)),
    )
    assert done.returncode == 1
    assert "cpu0 ended with status 3: ValueError: no such flag" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "fleet" / "state.json").exists()


def test_a_start_without_end_is_ended(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SILENT", "1")
    words = words_of(tmp_path, model, "--start-timeout", "1")
    done = forebay("fleet", "up", "--dir", str(tmp_path / "fleet"), *words)
    assert done.returncode == 1
    assert "cpu0 was not up in 1 s: " in done.stderr
    all_gone(tmp_path / "starts")
