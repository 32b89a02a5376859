"""`forebay replay` as a command: real time, real sockets, exit statuses, Ctrl-C."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pyarrow.parquet
import pytest
from aiohttp import web
from commands import forebay, printed, refusal
from stages.replay_server import Server, serve

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.provenance import repeat_command
from forebay.proxy.cli import main
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

BY_CHANCE = {"run_id", "started_at", "started_unix_s"}


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """`server` on a loop of its own thread."""
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def body() -> None:
        async with serve(server):
            up.set()
            await stop.wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(body())

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, (TraceRequest(f"r{at}", at * 0.02, 16, 2) for at in range(25)))
    return path


def test_a_run_and_what_it_prints(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with served(Server()) as server:
        words = ("replay", trace, "--target", server.url, "--out", out)
        table = printed(*words)
        assert "--force" in refusal(*words)  # the folder holds a run
        again = ("--force", "--json", "--arrivals", "poisson", "--rate", "100")
        as_json = orjson.loads(printed(*words, *again))
    for word in ("bucket", "chat", "TTFT p50", "stall p99", "goodput", "hit ratio", "verdict"):
        assert word in table
    assert as_json == orjson.loads((out / "summary.json").read_bytes())
    assert as_json["completed"] == 25
    record = orjson.loads((out / "run.json").read_bytes())
    assert (record["arrivals"], record["rate_per_s"]) == ("poisson", 100.0)
    assert len(record["trace"]["sha256"]) == 64


def test_an_alias_is_no_second_model_and_a_run_names_its_folder(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy lists an alias with its model as root. The alias of a name it has not is none."""
    monkeypatch.chdir(tmp_path)
    with served(Server(more_models=[{"id": "adapter", "root": "/loras/a"}])) as server:
        said = refusal("replay", trace, "--target", server.url)
    assert "serves tiny, adapter; choose with --model" in said
    with served(Server(more_models=[{"id": "gpt-4o", "root": "tiny"}])) as server:
        printed("replay", trace, "--target", server.url)
    [run] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}", run.name)
    assert orjson.loads((run / "run.json").read_bytes())["model"] == "tiny"


def test_a_run_without_an_answer_fails_and_keeps_what_the_server_said(
    trace: Path, tmp_path: Path
) -> None:
    async def unknown(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        error = {"message": f"The model `m` does not exist. {len(server.bodies)}", "code": 404}
        return web.json_response({"error": error}, status=404)

    out = tmp_path / "run"
    with served(Server(unknown)) as server:
        done = forebay("replay", trace, "--target", server.url, "--out", out)
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "verdict: failed (none of 25 requests was answered: 4xx 25)" in told
    assert told.count("does not exist") == 1  # the first fault of its kind
    assert "4xx (HTTP 404): 25 requests; the first one: The model `m` does not exist." in told
    assert "measured nothing" in done.stderr
    summary = orjson.loads((out / "summary.json").read_bytes())
    (kind,) = summary["unanswered"]
    assert (kind["reason"], kind["status"], kind["requests"]) == ("4xx", 404, 25)
    assert kind["said"].startswith("The model `m` does not exist.")
    kept = pyarrow.parquet.read_table(out / "requests.parquet")
    assert all("does not exist" in str(said) for said in kept["said"].to_pylist())


def test_warm_caches_are_said_in_one_line(tmp_path: Path) -> None:
    """The server finds 16 tokens of every prompt, and no two of these share any."""
    path, out = tmp_path / "alone.jsonl", tmp_path / "run"
    write_trace(path, (TraceRequest(f"r{at}", 0.0, 32, 2, blocks=(at,)) for at in range(50)))
    with served(Server()) as server:
        done = forebay("replay", path, "--target", server.url, "--out", out, "--json")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("forebay replay: the caches were warm: 800 of 1,600 prompt tokens ")
    assert "without --salt each run" in line
    assert line == f"forebay replay: {orjson.loads(done.stdout)['warnings'][0]}"


def test_the_command_of_the_report_repeats_the_run(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--rate 200 --arrivals gamma:2 --seed 5 --duration 0.1 --salt x --model tiny --warmup 1 "
        "--slo tpot=50ms,long.ttft=300us --buckets short:10,long:900 --max-in-flight 7 "
        "--max-model-len 900 --too-long truncate --endpoint chat --time-scale 2 --skip-bad"
    )
    with open(trace, "a") as file:
        file.write("rubbish\n")
    records = []
    with served(Server()) as server:
        line = f"replay {trace} --target {server.url} {words} --out {tmp_path}/run"
        for folder in ("first", "second"):
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)
            assert main(shlex.split(line)) == 0
            out = tmp_path / ("run" if folder == "first" else "second/run")
            records.append(orjson.loads((out / "run.json").read_bytes()))
            line = repeat_command(load_run(out)).removeprefix("forebay ")
    first, second = (
        {name: value for name, value in record.items() if name not in BY_CHANCE}
        for record in records
    )
    assert first == second
    assert first["slos"][1] == {"bucket": "long", "metric": "ttft", "limit_s": 0.0003}


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c(tmp_path: Path) -> None:
    path, out = tmp_path / "long.jsonl", tmp_path / "run"
    write_trace(path, (TraceRequest(f"r{at}", at * 0.05, 16, 2) for at in range(2000)))
    with served(Server()) as server:
        words = ["replay", str(path), "--target", server.url, "--out", str(out)]
        run = "import sys; from forebay.proxy.cli import main; sys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen(
            [sys.executable, "-c", run, *words], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what was measured is in" in told
    assert "Traceback" not in told
    summary = orjson.loads((out / "summary.json").read_bytes())
    assert summary["requests"] == 2000
    assert summary["completed"] >= 3
    assert summary["completed"] + summary["failed"]["never_sent"] == 2000
