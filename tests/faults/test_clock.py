"""The wall clock jumps by hours, both ways; no decision depends on it."""

import asyncio
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    Call,
    Stage,
    by_request,
    chunk,
    on_stage,
    silent,
)

from forebay.replay.clock.virtual_loop import run

KEYS = "acme: key-of-acme-0123456789\nzeta: key-of-zeta-0123456789\n"
BUCKETS = [{"name": "chat", "up_to": 5000, "max_queue": 4, "max_wait": "30s"}]
STREAMED = {"prompt": "hello", "max_tokens": 20, "stream": True}
JUMPS_S = (7200.0, -10_800.0, 86_400.0, -3600.0, 31_536_000.0, -63_072_000.0)

Log = list[tuple[Any, ...]]


async def slowly(call: Call) -> None:
    """Stream twenty tokens in ten seconds; then stall if the prompt contains `stall`."""
    await call.send(STREAM_HEAD)
    for _ in range(20):
        await call.send(chunk(EVENT))
        await asyncio.sleep(0.5)
    if b"stall" in call.body:
        await call.hung_up()
    await call.send(chunk(DONE) + b"0\r\n\r\n")


def played(keys: Path) -> Log:
    """Answers and log lines of a run, each with its moment on the loop's clock."""
    log: Log = []

    async def ask(on: Stage, name: str, tenant: str = "zeta", **options: Any) -> None:
        body = options.pop("body", STREAMED)
        key = {"authorization": f"Bearer key-of-{tenant}-0123456789"}
        headers = {**key, **options.pop("headers", {})}
        async with on.post(body, headers=headers) as response:
            data = b""
            try:
                async for piece in response.content.iter_any():
                    data += piece
            except Exception as error:
                data += type(error).__name__.encode()
            queued, again = (response.headers.get(h) for h in ("x-forebay-queue-ms", "retry-after"))
            log.append((name, moment(), response.status, queued, again, data))

    def moment() -> float:
        return round(asyncio.get_running_loop().time(), 1)

    async def main() -> None:
        limited = {"tokens_per_s": 10, "burst_tokens": 1000}
        async with on_stage(
            slowly,
            slots=1,
            buckets=BUCKETS,
            tenants={"keys": str(keys), "known": {"acme": limited}},
            timeouts={"first_token": "20s", "idle": "15s", "keep_alive": "0s"},
        ) as (on, (backend,)):
            # One streams, others queue behind it: one in time, one past its own deadline.
            tasks = [asyncio.create_task(ask(on, "first"))]
            await asyncio.sleep(0.2)
            tasks.append(asyncio.create_task(ask(on, "second")))
            await asyncio.sleep(0.2)
            hasty = {"x-request-timeout": "0.5"}
            tasks.append(asyncio.create_task(ask(on, "hasty", headers=hasty)))
            await asyncio.gather(*tasks)
            # A quota runs out, and comes back with the seconds that really passed.
            backend.serve = by_request
            large = {"prompt": "x" * 3600}
            for name in ("quota", "no quota"):
                await ask(on, name, "acme", body=large)
            await asyncio.sleep(20)
            await ask(on, "not yet", "acme", body=large)
            await asyncio.sleep(100)
            await ask(on, "again", "acme", body=large)
            # A stream stalls; a backend is silent until the first token is overdue.
            backend.serve = slowly
            await ask(on, "stalled", body={**STREAMED, "prompt": "stall"})
            backend.serve = silent
            await ask(on, "silent")
            # It goes down, and comes back.
            backend.serve, backend.healthy = by_request, False
            await asyncio.sleep(5)
            await ask(on, "down")
            backend.healthy = True
            await asyncio.sleep(3)
            await ask(on, "up")
            log.append(("said", moment(), *on.said))

    run(main())
    return log


def jumping() -> Callable[[], float]:
    """A wall clock that is somewhere else each time that it is read."""
    real, jumps = time.time, cycle(JUMPS_S)
    return lambda: real() + next(jumps)


def test_hours_forwards_and_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    steady = played(keys)
    clock, reads = jumping(), 0

    def read() -> float:
        nonlocal reads
        reads += 1
        return clock()

    with monkeypatch.context() as stepped:
        stepped.setattr(time, "time", read)
        stepped.setattr(time, "time_ns", lambda: int(read() * 1e9))
        jumped = played(keys)
    assert reads  # logs and certificates have moments, too: it is really in force
    assert jumped == steady
    outcomes = {entry[0]: entry[2] for entry in steady[:-1]}
    assert outcomes == {
        "first": 200, "second": 200, "hasty": 429, "quota": 200, "no quota": 429, "not yet": 429,
        "again": 200, "stalled": 200, "silent": 504, "down": 503, "up": 200,
    }  # fmt: skip
    assert b"upstream_stream_error" in next(e for e in steady if e[0] == "stalled")[-1]
    assert any("is down" in line for line in steady[-1][2:])
