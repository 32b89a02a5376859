"""An operator takes one backend out of use: it empties, and comes back when asked."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    Call,
    RawBackend,
    Stage,
    by_request,
    chunk,
    on_stage,
    stage,
)

from forebay.proxy.cli import main
from forebay.proxy.config.sources import load_config
from forebay.proxy.diagnose import admin_client
from forebay.proxy.log_events import LogEvent
from forebay.proxy.operate import drain_cli


async def tell(on: Stage, path: str, method: str = "POST") -> tuple[int, dict[str, Any]]:
    async with on.client.request(method, on.proxy.admin_url + path) as response:
        return response.status, json.loads(await response.read())


async def test_a_drained_backend_empties_and_comes_back() -> None:
    goes_on = asyncio.Event()

    async def slow(call: Call) -> None:
        if b'"stream": true' in call.body:
            await call.send(STREAM_HEAD + chunk(EVENT))
            await goes_on.wait()
            await call.send(chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n")
        else:
            await by_request(call)

    async with AsyncExitStack() as stack:
        one, two = RawBackend(slow), RawBackend(slow)
        for backend in (one, two):
            await stack.enter_async_context(backend.running())
        urls = [one.url, two.url]

        def load() -> Any:
            backends = [{"name": f"b{i}", "url": url} for i, url in enumerate(urls)]
            return load_config(None, {"backends": backends}, {})

        on = await stack.enter_async_context(stage(urls, load=load))

        async def served() -> set[int]:
            """The backends that eight requests and four embeddings reach."""
            before = len(one.calls), len(two.calls)
            for number in range(12):
                path = "/v1/embeddings" if number % 3 == 0 else "/v1/completions"
                assert await on.status({"prompt": f"{number}" * 99}, path=path) == 200
            after = len(one.calls), len(two.calls)
            return {i for i in (0, 1) if after[i] > before[i]}

        assert await served() == {0, 1}
        streams = [
            await stack.enter_async_context(on.post({"prompt": f"{n}" * 99, "stream": True}))
            for n in range(4)
        ]
        running = len(on.proxy.driver.shaper.backends["b0"].in_flight)
        assert running > 0
        status, answer = await tell(on, "/backends/b0/drain")
        assert (status, answer) == (
            200, {"backend": "b0", "draining": True, "in_flight": running}
        )  # fmt: skip
        assert await served() == {1}
        await asyncio.sleep(30)  # its health checks pass all the while
        assert await served() == {1}
        await on.proxy.reloader.reload()
        assert await served() == {1}
        _, shown = await tell(on, "/status", "GET")
        assert [b["draining"] for b in shown["backends"]] == [True, False]
        assert [b["up"] for b in shown["backends"]] == [False, True]
        goes_on.set()
        for stream in streams:
            assert b"[DONE]" in await stream.read()
        assert (await tell(on, "/backends/b0/drain"))[1]["in_flight"] == 0
        status, answer = await tell(on, "/backends/b0/ready")
        assert (status, answer["draining"]) == (200, False)
        assert await served() == {0, 1}
        lines = [
            line
            for event, line in zip(on.said.events, on.said, strict=True)
            if event[0] is LogEvent.BACKEND_DRAINING
        ]
        assert lines == [
            "backend b0 is draining: it gets no new work",
            "backend b0 takes work again",
        ]
        status, answer = await tell(on, "/backends/nobody/drain")
        assert (status, answer["error"]["code"]) == (404, "unknown_backend")
        assert "There are: b0, b1." in answer["error"]["message"]
        status, answer = await tell(on, "/backends/b0/drain", "GET")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        on.assert_nothing_held()


async def test_a_backend_that_is_down_stays_down_when_it_is_taken_back() -> None:
    async with on_stage(None) as (on, (backend,)):
        await tell(on, "/backends/b0/drain")
        assert await on.status() == 503
        backend.healthy = False
        await asyncio.sleep(10)
        await tell(on, "/backends/b0/ready")
        assert not on.proxy.backends.links["b0"].up
        backend.healthy = True
        await asyncio.sleep(10)
        assert await on.status() == 200


class Admin:
    """Answers of an admin port, one for each question."""

    def __init__(self, *in_flight: int) -> None:
        self.left = list(in_flight)
        self.asked: list[str] = []

    def __call__(self, admin: str, target: str, body: bytes | None = None) -> bytes:
        assert body is not None  # a POST
        self.asked.append(target)
        count = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        draining = "drain" in target
        return json.dumps({"backend": "g 0", "draining": draining, "in_flight": count}).encode()


@pytest.mark.parametrize(
    ("words", "in_flight", "status", "says"),
    [
        ([], [2, 1, 0], 0, "g 0 is drained: nothing runs there"),
        (["--now"], [2, 1, 0], 0, "g 0 is drained: nothing runs there"),
        (["--timeout", "0s"], [2], 1, "g 0 gets no new work; 2 of its requests still run"),
        (["--undo"], [2], 0, "g 0 takes work again"),
    ],
)
def test_the_command_waits_until_it_is_empty(
    words: list[str],
    in_flight: list[int],
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    admin = Admin(*in_flight)
    monkeypatch.setattr(admin_client, "ask", admin)
    monkeypatch.setattr(drain_cli, "LOOK_S", 0.0)
    assert main(["drain", "g 0", *words]) == status
    assert says in capsys.readouterr().err
    state = "ready" if "--undo" in words else "drain?now" if "--now" in words else "drain"
    assert set(admin.asked) == {f"/backends/g%200/{state}"}
    assert main(["drain", "g 0", *words, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["backend"] == "g 0"


def test_a_wrong_timeout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "gpu0", "--timeout", "soon"]) == 2
    assert "--timeout soon" in capsys.readouterr().err
