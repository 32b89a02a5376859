"""`forebay tune URL`: a running proxy is asked for its traffic and its set-up."""

import asyncio
from math import inf
from pathlib import Path
from typing import Any

import pytest
from stages.proxy_stage import Call, RawBackend, answer, by_request, stage, stream

from forebay.analysis.tune.traffic import observed_of, read_traffic, running_proxy
from forebay.proxy.telemetry.logs.capture import SALT
from forebay.traces.ground.errors import InputError


@pytest.mark.real_time
async def test_a_running_proxy_tells_traffic_and_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SALT, "a secret of the tests")
    keys: Any = {"capture": {"path": str(tmp_path / "traffic.jsonl")}, "mode": "observe"}
    async with (
        RawBackend(by_request).running() as one,
        RawBackend(by_request).running() as other,
        stage([one.url, other.url], **keys) as on,
    ):
        one.serve = other.serve = stream

        async def send(count: int) -> None:
            for number in range(count):
                body = {"prompt": f"question {number}", "max_tokens": 9, "stream": True}
                async with on.post(body) as response:
                    await response.read()

        await send(20)
        with pytest.raises(InputError, match=r"has only 20 requests in 0 s, 100 are needed; come"):
            await asyncio.to_thread(read_traffic, on.proxy.admin_url, inf, None, 10**6)
        await send(100)
        traffic = await asyncio.to_thread(read_traffic, on.proxy.admin_url, inf, None, 10**6)
        assert traffic.proxy is not None
        assert (traffic.proxy.mode, traffic.proxy.routing) == ("observe", "least_connections")
        assert (traffic.proxy.servers, traffic.servers()) == (2, 2)
        assert [row.input_tokens for row in traffic.rows] == [7] * 120
        observed = observed_of(traffic.rows)
        assert observed is not None
        assert observed.done.all()
        # A part that is asked for wrongly, and a part beyond the end.
        for offset, status in (("x", 400), ("99999999", 200)):
            async with on.client.get(f"{on.proxy.admin_url}/capture?offset={offset}") as response:
                assert response.status == status


@pytest.mark.real_time
async def test_a_proxy_without_capture_says_what_to_do() -> None:
    async with RawBackend(by_request).running() as backend, stage([backend.url]) as on:
        with pytest.raises(InputError, match=r"keeps no traffic; set capture\.path"):
            await asyncio.to_thread(running_proxy, on.proxy.admin_url)
        async with on.client.get(on.proxy.admin_url + "/capture") as response:
            assert response.status == 400


@pytest.mark.real_time
async def test_a_vllm_is_no_admin_port() -> None:
    async def not_found(call: Call) -> None:
        await call.send(answer(404, b'{"detail":"Not Found"}'))

    async with RawBackend(not_found, version=b'{"version":"0.32.0"}').running() as server:
        with pytest.raises(InputError, match=r"is a vLLM server \(0\.32\.0\) or the public port"):
            await asyncio.to_thread(running_proxy, server.url)
    with pytest.raises(InputError, match="no answer"):
        await asyncio.to_thread(running_proxy, server.url)
