"""`forebay tune URL`: a running proxy is asked for its traffic and its set-up."""

import asyncio
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
from made_captures import captured_lines, chats_beside_documents, truth
from stages.proxy_stage import Call, RawBackend, answer, by_request, stage, stream

from forebay.analysis.tune import traffic
from forebay.analysis.tune.cli import largest_gain
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
                await on.read(body)

        await send(20)
        with pytest.raises(InputError, match=r"has only 20 requests in 0 s, 100 are needed; come"):
            await asyncio.to_thread(read_traffic, on.proxy.admin_url, inf, None, 10**6)
        await send(100)
        read = await asyncio.to_thread(read_traffic, on.proxy.admin_url, inf, None, 10**6)
        assert read.proxy is not None
        assert (read.proxy.mode, read.proxy.routing) == ("observe", "least_connections")
        assert (read.proxy.servers, read.servers()) == (2, 2)
        late = (tmp_path / "traffic.jsonl").stat().st_size - read.proxy.captured_bytes
        assert 0 <= late < 1_000  # the last rows are counted once they are written
        assert [row.input_tokens for row in read.rows] == [7] * 120
        observed = observed_of(read.rows)
        assert observed is not None
        assert observed.done.all()
        # A part that is asked for wrongly, and a part beyond the end.
        for offset, status in (("x", 400), ("99999999", 200)):
            async with on.client.get(f"{on.proxy.admin_url}/capture?offset={offset}") as response:
                assert response.status == status


def captured(
    monkeypatch: pytest.MonkeyPatch, lines: list[bytes], model: str = "llama-3-8b"
) -> None:
    """Let a proxy in mode observe have captured these lines."""
    content = b"".join(lines)
    backend = {"scheduler": "vllm", "long_prefill_token_threshold": None, "models": [model]}
    capture = {"path": "c.jsonl", "bytes": len(content)}
    status = {"mode": "observe", "routing": "least_connections", "backends": [backend]}

    def ask(admin: str, target: str) -> bytes:
        offset = int(target.removeprefix("/capture?offset="))
        return content[offset : offset + 200_000]

    monkeypatch.setattr(traffic, "ask", ask)
    monkeypatch.setattr(traffic, "ask_json", lambda *_: status | {"capture": capture})


class TestLargestGain:
    """What `forebay doctor` says of the requests that a proxy has captured."""

    ADMIN = "http://127.0.0.1:9090"

    def test_a_flag_that_would_have_helped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        captured(monkeypatch, captured_lines(chats_beside_documents(300, 10, 0.4), truth(1)))
        gain = largest_gain(self.ADMIN, inf, None)
        assert gain is not None
        text, remedy = gain
        assert text.startswith("the present set-up with ")
        assert re.search(r"chat first tokens' p95 [\d.]+ m?s instead of [\d.]+ m?s", text)
        assert text.endswith(" (300 captured requests, played; the twin is off by 3%)")
        assert re.match(
            "start vLLM with (--long-prefill-token-threshold 2048|--scheduler-cls .*Scheduler) and "
            "give it to each backend in the proxy's file", remedy,
        )  # fmt: skip

    def test_servers_that_are_slower_than_the_twin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = chats_beside_documents(120, 10, 0.8)
        captured(monkeypatch, captured_lines(rows, truth(1, slower=2.5)))
        gain = largest_gain(self.ADMIN, inf, None)
        assert gain is not None
        assert "instead of" in gain[0]

    @pytest.mark.parametrize(
        ("every", "keep", "model"),
        [
            pytest.param(1_000, slice(None), "llama-3-8b", id="chats alone gain nothing"),
            pytest.param(8, slice(None, None, 2), "llama-3-8b", id="half is not captured"),
            pytest.param(10, slice(90), "llama-3-8b", id="too few requests"),
            pytest.param(10, slice(None), "a name of their own", id="an unknown model"),
        ],
    )
    def test_nothing_is_said(
        self, every: int, keep: slice, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = captured_lines(chats_beside_documents(400, every, 0.35), truth(1))
        captured(monkeypatch, lines[keep], model)
        assert largest_gain(self.ADMIN, inf, None) is None

    def test_only_the_end_of_a_long_capture_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A capture of days has gigabytes, and doctor would read all of it."""
        lines = captured_lines(chats_beside_documents(300, 10, 0.4), truth(1))
        captured(monkeypatch, lines)
        end = sum(map(len, lines[-120:])) + 7  # a part of the line before, too
        read = read_traffic(self.ADMIN, inf, None, 1_000, last_bytes=end)
        assert len(read.rows) == 120
        assert read.remarks == ()


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
