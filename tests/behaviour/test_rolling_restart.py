"""A new proxy takes over from an old one without a failed request: real processes and sockets."""

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from ports import free_ports
from stages.proxy_processes import BODY, client, proxies, ready, write
from stages.proxy_stage import (
    DONE,
    EVENT,
    SHARED_LOOP,
    STREAM_HEAD,
    Call,
    RawBackend,
    by_request,
    chunk,
)

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(
        not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT on this system"
    ),
]


@pytest.mark.real_time
async def test_requests_throughout_a_rolling_restart(tmp_path: Path) -> None:
    """Kept connections and new ones, streams and whole answers, three restarts: none fails."""

    counts: Counter[str] = Counter()
    over = asyncio.Event()
    (port,) = free_ports(1)
    path = tmp_path / "proxy.yaml"
    async with RawBackend(slowly).running() as backend, proxies(path) as all_:

        def configure() -> None:
            write(
                path,
                backend.url,
                # The admin port differs, so that we can ask the right one whether it is ready.
                listen={"port": port, "admin_port": 0, "reuse_port": True},
                # Other tests may keep the machine busy: we, or our backend, may answer late.
                timeouts={"drain": "20s", "lame_duck": "20s"},
                health={"timeout": "30s"},
                limits=SHARED_LOOP,
            )

        configure()
        process, url, admin = await all_.start()
        await ready(admin)
        clients = [
            asyncio.create_task(client(url, kind, over, counts))
            for kind in ("kept", "new", "stream", "kept", "new")
        ]
        for _ in range(3):
            old = process
            process, _, admin = await all_.start()
            await ready(admin)
            before = counts["done"]
            old.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(old.wait(), 60) == 0
            assert counts["done"] > before
            counts["restarts"] += 1
        over.set()
        await asyncio.gather(*clients)
        assert process.returncode is None
    counts = counts
    print(dict(counts))
    assert counts["restarts"] == 3
    assert {name for name in counts if name not in ("done", "restarts")} == set()
    assert counts["done"] > 100


async def slowly(call: Call) -> None:
    if b'"stream": true' in call.body:
        await call.send(STREAM_HEAD + chunk(EVENT))
        await asyncio.sleep(0.3)
        await call.send(chunk(DONE) + b"0\r\n\r\n")
    else:
        await asyncio.sleep(0.005)
        await by_request(call)


async def test_streams_finish_and_hung_ones_are_given_up(tmp_path: Path) -> None:
    """SIGTERM: /health fails, short streams finish, hung ones are cut after `drain`."""
    end = asyncio.Event()

    async def serve(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(EVENT))
        if b"hangs" in call.body:
            await call.hung_up()
        await end.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    path = tmp_path / "proxy.yaml"
    async with RawBackend(serve).running() as backend, proxies(path) as all_:
        write(
            path,
            backend.url,
            listen={"port": 0, "admin_port": 0},
            timeouts={"drain": "10s"},
            logs={"format": "json"},
        )
        process, url, admin = await all_.start()
        await ready(admin)
        async with aiohttp.ClientSession() as session:
            short, hung = [
                await session.post(f"{url}/v1/completions", json={"prompt": prompt, "stream": True})
                for prompt in ("short", "hangs")
            ]
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            while b"draining" not in (line := await process.stdout.readline()):
                assert line
            assert json.loads(line)["message"].startswith("draining: 2 requests, up to 10 s")
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 503
                assert answer.headers["Connection"] == "close"
            async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "draining"
            end.set()
            assert (await short.read()).endswith(DONE)
            with pytest.raises(aiohttp.ClientError):
                await hung.read()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert b"ended 1 requests that took too long" in await process.stdout.read()


async def test_a_signal_reloads_and_systemd_is_told(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(60)

        async def heard() -> list[str]:
            data = await asyncio.to_thread(told.recv, 4096)
            return data.decode().split("\n")

        async with RawBackend().running() as backend, proxies(path) as all_:
            write(path, backend.url, listen={"port": 0, "admin_port": 0})
            process, _, admin = await all_.start(NOTIFY_SOCKET=str(tmp_path / "notify"))
            lines = await heard()
            assert lines[0] == "READY=1"
            assert f"MAINPID={process.pid}" in lines
            write(path, backend.url, listen={"port": 0, "admin_port": 0}, timeouts={"idle": "7s"})
            process.send_signal(signal.SIGHUP)
            lines = await heard()
            assert lines[0] == "RELOADING=1"
            assert int(lines[1].removeprefix("MONOTONIC_USEC=")) > 0
            lines = await heard()
            assert lines[:2] == ["READY=1", "STATUS=configuration reloaded (timeouts.idle)"]
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{admin}/drain") as answer,
            ):
                assert answer.status == 202
            assert (await heard())[0] == "STOPPING=1"
            assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_signals_that_come_as_the_process_ends_do_not_kill_it(
    tmp_path: Path, workers: int
) -> None:
    """`timeout` sends SIGTERM twice."""

    path = tmp_path / "proxy.yaml"
    async with proxies(path) as all_:
        write(path, "http://127.0.0.1:9", listen={"port": 0, "admin_port": 0})
        process, _, _ = await all_.start("--workers", str(workers))
        while process.returncode is None:
            with suppress(ProcessLookupError):  # send_signal() would take its status away
                os.kill(process.pid, signal.SIGTERM)
            await asyncio.sleep(0.0005)
        assert process.returncode == 0
