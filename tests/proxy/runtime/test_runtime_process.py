"""The process: an output that nobody reads, signals, and workers without a parent."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from logging import INFO
from pathlib import Path

import aiohttp
import pytest
from fakes.faulty_backends import streams
from stages.proxy_processes import proxy_process, ready
from stages.proxy_stage import DONE, EVENT, Call, RawBackend
from stages.started import PATIENCE_S

from forebay.proxy.config.sections import Logs
from forebay.proxy.log_events import LogEvent
from forebay.proxy.telemetry.logs import log_queue
from forebay.proxy.telemetry.logs.access_log import LOGGER, configure_logs, say

pytestmark = pytest.mark.real_time

LONG = {"prompt": "hello", "max_tokens": 3, "stream": True}


def test_lines_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "MOST_LINES", 100)
    monkeypatch.setattr(log_queue, "CLOSE_S", 0.1)
    monkeypatch.setattr(LOGGER, "level", INFO)
    before, out = LOGGER.handlers[:], os.pipe()
    handler = log_queue.QueuedLines(out[1])
    LOGGER.handlers[:] = [handler]
    try:
        for _ in range(2_000):
            say(LogEvent.LISTENING, "x" * 1_000)
        assert 1_000 < log_queue.dropped_lines(LOGGER) < 2_000
        handler.close()  # at once, though the thread still waits
        assert os.read(out[0], 1_001) == b"x" * 1_000 + b"\n"
    finally:
        LOGGER.handlers[:] = before
        os.close(out[0])  # ends the thread


def test_waiting_lines_are_written_at_the_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = LOGGER.handlers[:]
    with os.fdopen(os.dup(1), "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        configure_logs(Logs())
        (handler,) = LOGGER.handlers
        for number in range(500):
            say(LogEvent.LISTENING, f"line {number}.")
        handler.close()
        assert "line 499." in capfd.readouterr().out
    LOGGER.handlers[:] = before


def slow_stream() -> Callable[[Call], Awaitable[None]]:
    return streams(EVENT, EVENT + DONE, every_s=1.5)


async def streamed(client: aiohttp.ClientSession, url: str) -> bytes:
    async with client.post(url + "/v1/completions", json=LONG) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT"])
async def test_a_signal_cuts_no_stream(name: str) -> None:
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend(slow_stream()).running())
        process, url, admin = await stack.enter_async_context(
            proxy_process("--backend", backend.url)
        )
        await ready(admin)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        asked = asyncio.create_task(streamed(client, url))
        await asyncio.sleep(0.7)
        process.send_signal(signal.Signals[name])
        assert await asked == EVENT + EVENT + DONE
        if name == "SIGQUIT":
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0
        else:
            assert await streamed(client, url) == EVENT + EVENT + DONE


async def test_an_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yaml"
    config.write_text("logs: {level: debug, sample: 1.0}\n")

    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend().running())
        port = backend.url.rpartition(":")[2]
        read, write = os.pipe()
        stack.callback(os.close, read)
        own = 20_000 + os.getpid() % 20_000
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forebay.proxy", "proxy", "--config", str(config),
            "--port", str(own), "--admin-port", "0", "--backend", f"http://127.0.0.1:{port}",
            stdout=write,
        )  # fmt: skip
        os.close(write)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{own}"
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with client.get(url + "/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.1)
            for _ in range(600):
                async with client.post(
                    url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}
                ) as response:
                    assert response.status == 200
            process.terminate()
            assert await process.wait() == 0


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
async def test_workers_end_with_their_parent() -> None:
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend(slow_stream()).running())
        words = ("--backend", backend.url, "--workers", "2")
        process, url, admin = await stack.enter_async_context(proxy_process(*words))
        await ready(admin)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        async with client.get(admin + "/status") as response:
            pids = [one["pid"] for one in (await response.json())["workers"]]
        assert len(pids) == 2
        asked = asyncio.create_task(streamed(client, url))
        await asyncio.sleep(0.5)
        process.kill()
        assert await asked == EVENT + EVENT + DONE
        async with asyncio.timeout(PATIENCE_S):
            while any(alive(pid) for pid in pids):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody waits for any more does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
