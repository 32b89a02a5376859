"""`forebay top`: frames from what the admin port tells, in a terminal and without one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console
from stages.proxy_stage import on_stage

from forebay.proxy.cli import main
from forebay.proxy.diagnose.frame import TimedScene, earlier, frame_of
from forebay.proxy.diagnose.scene import MetricSample, Scene, samples_of
from forebay.proxy.diagnose.top_cli import rendered

ADMIN = "http://127.0.0.1:9090"


def backend(name: str, **other: Any) -> dict[str, Any]:
    made = {
        "name": name, "up": True, "draining": False, "state": "up", "in_flight": 3,
        "in_flight_elsewhere": 0, "max_concurrency": 512, "prefills": 1, "backlog_s": 0.5,
        "queued": {"chat": 1, "document": 2}, "kv_tokens": 1_000.0, "kv_reserved_tokens": 250,
        "prefill_cost": {"observations": 9, "seconds_10k_tokens": 0.3},
    }  # fmt: skip
    return {**made, **other}


def status(*backends: dict[str, Any], **other: Any) -> dict[str, Any]:
    made = {
        "ready": True, "draining": False, "uptime_s": 50.0, "active_requests": 6,
        "shedding_classes": 0, "versions": {"forebay": "0.1.0"},
        "queued": {"chat": 1, "document": 2}, "backends": list(backends or (backend("gpu0"),)),
    }  # fmt: skip
    return {**made, **other}


def sample(name: str, value: float, **labels: str) -> MetricSample:
    return MetricSample(f"forebay_{name}", labels, value)


def counters(scale: float) -> list[MetricSample]:
    return [
        sample("responses_total", 100.0 * scale, bucket="chat", status="200"),
        sample("rejects_total", 10.0 * scale, bucket="chat", reason="queue_full"),
        sample("backend_requests_total", 90.0 * scale, backend="gpu0", bucket="chat"),
        sample("waiting_requests", 2.0, backend="gpu0", bucket="document", reason="kv_full"),
    ]


def test_rates_are_those_between_two_readings() -> None:
    before = TimedScene(100.0, Scene(status(), [], counters(1.0)))
    now = TimedScene(110.0, Scene(status(), [], counters(3.0)))
    since_start = frame_of(before)
    assert (since_start.over_s, since_start.buckets[0].requests_per_s) == (50.0, 2.0)
    frame = frame_of(now, before)
    chat, document = frame.buckets
    assert (frame.over_s, chat.requests_per_s, chat.rejected_per_s) == (10.0, 20.0, 2.0)
    assert (document.waiting, document.ttft_p99_s) == (2, None)
    assert frame.backends[0].requests_per_s == 18.0
    assert frame.waits == [(2, "document", "gpu0", "kv_full")]
    restarted = TimedScene(120.0, Scene(status(), [], counters(0.5)))
    assert frame_of(restarted, now).buckets[0].requests_per_s == 5.0


def test_workers_are_added_up() -> None:
    workers = [{"worker": i, "status": status()} for i in range(2)] + [
        {"worker": 2, "status": None}
    ]
    told = {"ready": True, "draining": False, "workers": workers}
    workers[1]["status"] = status(mode="observe")
    frame = frame_of(TimedScene(0.0, Scene(told, [])))
    assert (frame.workers, frame.active, frame.observing) == (3, 12, True)
    one = frame.backends[0]
    assert (one.running, one.waiting, one.kv_share) == (6, 6, 0.5)
    assert [bucket.waiting for bucket in frame.buckets] == [2, 4]


@pytest.mark.parametrize("colour", [True, False])
def test_a_frame_fits_80_columns(colour: bool) -> None:
    full = {"in_flight": 512, "backlog_s": 123.4, "kv_reserved_tokens": 1000, "prefills": 99}
    gone = {"up": False, "state": "half_open", "kv_tokens": None}
    told = status(
        backend("gpu0", **full), backend("gpu1", **full, **gone), shedding_classes=2, mode="observe"
    )
    console = Console(width=80, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as captured:
        console.print(rendered(frame_of(TimedScene(0.0, Scene(told, [], counters(1.0)))), ADMIN))
    text = captured.get()
    assert ("\x1b[31m" in text) is colour
    plain = [line for line in text.splitlines() if "\x1b" not in line]
    assert all(len(line.rstrip()) <= 80 for line in plain)
    for words in (
        "observes only",
        "rejects 2 of 3",
        "512/512",
        "half-open",
        "100%",
        "2 document for gpu0: kv full",
    ):
        assert words in text


def test_a_server_on_trial_is_not_shown_as_up() -> None:
    """It takes one request at a time, so /status has it as up."""
    told = status(backend("gpu0", state="half_open"))
    assert frame_of(TimedScene(0.0, Scene(told, []))).backends[0].state == "half_open"


async def test_a_frame_of_a_running_proxy() -> None:
    async with on_stage(None) as (on, _):
        for _ in range(3):
            await on.read({"prompt": "x", "stream": True})
        told = await on.told("/status")
        samples = samples_of(on.proxy.metrics.text().decode())
        last = (await on.told("/history"))["minute"]
        frame = frame_of(TimedScene(0.0, Scene(told, [], samples), last))
        assert [one.name for one in frame.backends] == ["b0"]
        assert frame.buckets[0].requests_per_s * frame.over_s == pytest.approx(3.0)
        assert frame.buckets[0].ttft_p50_s is not None


def minute() -> dict[str, Any]:
    line = {"requests": 60, "rejected": 30, "left": 7, "failed": 9, "prompt_tokens": 60_000,
            "ttft_p50_s": 0.2, "ttft_p95_s": 1.5, "ttft_p99_s": 1.9}  # fmt: skip
    return {"seconds": 60.0, "buckets": [{**line, "name": "chat"}],
            "models": [{**line, "name": "llama"}],
            "tenants": [{**line, "name": "acme"}]}  # fmt: skip


def test_models_and_tenants_are_named() -> None:
    frame = frame_of(TimedScene(0.0, Scene(status(), [], []), minute()))
    (acme,) = frame.tenants
    assert (acme.left, acme.failed) == (7, 9)
    chat, document = frame.buckets
    assert (chat.left, chat.ttft_p50_s, chat.ttft_p99_s) == (7, 0.2, 1.9)
    assert (document.left, document.ttft_p50_s) == (0, None)
    assert (acme.name, acme.requests_per_s, acme.share, acme.rejected_per_s) == ("acme", 1, 1, 0.5)
    console = Console(width=80, highlight=False)
    with console.capture() as captured:
        console.print(rendered(frame, ADMIN))
    text = captured.get()
    assert "Models, last minute; TTFT: answered requests only" in text
    assert "acme" in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


def test_the_first_frame_looks_at_a_window() -> None:
    """Of 300 requests 200 came in the last 40 s; the mean since the start would be 5 a second."""
    then = [sample("snapshot_age_seconds", 40.0), *counters(1.0)]
    now = TimedScene(1_000.0, Scene(status(), [], counters(3.0)))
    frame = frame_of(now, earlier(now, then))
    assert (frame.over_s, frame.buckets[0].requests_per_s) == (40.0, 5.0)
    assert earlier(now, []) is None  # the proxy is younger


@contextmanager
def admin_port() -> Iterator[str]:
    """What looks like the admin port of a proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metrics = b"# TYPE forebay_x gauge\nforebay_x 1.0\n"
            body = metrics if self.path.startswith("/metrics") else json.dumps(status()).encode()
            if self.path == "/history":
                body = json.dumps({"minute": minute()}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_command_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with admin_port() as url:
        assert main(["top", "--admin", url, "--once"]) == 0
        said = capsys.readouterr()
        assert (said.out.splitlines()[0].endswith("ready, 6 active, up 50 s"), said.err) == (
            True,
            "",
        )
        assert main(["top", "--admin", url]) == 0
        assert "no terminal: one frame" in capsys.readouterr().err
        assert main(["top", "--admin", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["backends"][0]["name"] == "gpu0"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_q_ends_it_in_a_terminal() -> None:
    import pty

    with admin_port() as url:
        ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "forebay.proxy", "top", "--admin", url]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        with subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
        ) as process:
            os.close(theirs)
            shown = b""
            while b"gpu0" not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, b"q")
            assert process.stderr is not None
            assert (process.wait(timeout=30), process.stderr.read()) == (0, b"")
        os.close(ours)
