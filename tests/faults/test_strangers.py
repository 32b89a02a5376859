"""Clients without a key, or without sense, take little of the proxy's time from all others."""

import asyncio
import time

import pytest
from aiohttp.streams import StreamReader
from said import Said
from stages.proxy_stage import chunk, settle
from stages.raw_client import BODY, CLOSE, HOST, POST, ask, before_oracle, connected, post

from forebay.proxy.config.sections import Limits
from forebay.proxy.http1.server.server import MOST_CHUNKS
from forebay.proxy.runtime.load_shedding import Protection
from forebay.traces.ground.event_loop import background

CHUNKED = b"Transfer-Encoding: chunked\r\n"


class TestShortChunks:
    @pytest.mark.parametrize(
        ("path", "most"), [(b"/v1/completions", 3 * MOST_CHUNKS), (b"/no", MOST_CHUNKS // 2)]
    )
    async def test_parsing_them_ends_soon(
        self, path: bytes, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A body that is read, and one that is dropped unparsed after a rejection."""
        parsed = 0
        ended = StreamReader.end_http_chunk_receiving

        def counted(self: StreamReader) -> None:
            nonlocal parsed
            parsed += 1
            ended(self)

        monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", counted)

        async with before_oracle() as (on, _):
            async with connected(on) as (reader, writer):
                head = POST.replace(b"/v1/completions", path) + HOST + CHUNKED + b"\r\n"
                writer.write(head + chunk(b"x") * 100_000)
                try:
                    got = await asyncio.wait_for(reader.read(), 20)
                except ConnectionResetError:
                    got = b""
                assert b"200 OK" not in got
            await settle()
            assert parsed < most
            assert (await ask(on, post())).status == 200

    async def test_the_client_is_told(self) -> None:
        async with before_oracle() as (on, oracle):
            data = POST + HOST + CHUNKED + b"\r\n" + chunk(b"x") * (MOST_CHUNKS + 100)
            answer = await ask(on, data)
            assert (answer.status, answer.error["code"]) == (400, "bad_http")
            assert "short chunks" in answer.error["message"]
            assert answer.closes
            assert not oracle.requests

    async def test_as_many_as_a_json_encoder_writes_are_taken(self) -> None:
        """Python's iterencode yields one piece for each value, bracket and comma."""
        body = b'{"max_tokens":1,"prompt":"' + b"x" * 50_000 + b'"}'
        pieces = [bytes([byte]) for byte in body[:1000]]
        pieces += [body[start : start + 70] for start in range(1000, len(body), 70)]

        async with before_oracle(buckets=[{"name": "any", "up_to": 10_000_000}]) as (on, oracle):
            data = b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
            answer = await ask(on, POST + HOST + CLOSE + CHUNKED + b"\r\n" + data)
            assert answer.status == 200
            assert oracle.requests[0].body == body

    async def test_each_body_is_counted_for_itself(self) -> None:
        async with before_oracle() as (on, _):
            one = b"".join(chunk(bytes([byte])) for byte in BODY) + b"0\r\n\r\n"
            request = POST + HOST + CHUNKED + b"\r\n" + one
            async with connected(on) as (reader, writer):
                for _ in range(2 * MOST_CHUNKS // len(BODY)):
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 ")
                    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                    await reader.readexactly(length)


class TestWhoseLoad:
    @pytest.mark.parametrize("strangers", [False, True])
    @pytest.mark.real_time
    async def test_work_for_strangers_is_no_reason_to_shed(self, strangers: bool) -> None:
        """A loop that is always 80 ms late: shedding helps if known clients make it so."""
        spent = 0.0
        protection = Protection(Limits(loop_lag=0.01), Said(), lambda _: None)
        async with background(protection.run()):
            if strangers:
                protection.strangers_s = lambda: spent
            for _ in range(8):
                began = time.process_time()
                while time.process_time() - began < 0.08:
                    pass
                spent += time.process_time() - began
                await asyncio.sleep(0)
            protection.decide()
            protection.decide()
            assert protection.shed == (0 if strangers else 2)

    async def test_seconds_of_parsing_and_rejecting_are_counted(self) -> None:
        async with before_oracle() as (on, _):
            port, public = on.proxy.app._port, on.proxy.listeners[0][1]
            assert (await ask(on, post())).status == 200
            assert port.rejecting_s == 0.0
            parsing_s = public.parsing_s
            assert parsing_s > 0.0
            assert (await ask(on, post(path=b"/no"))).status == 404
            assert port.rejecting_s > 0.0
            assert public.parsing_s > parsing_s
            seen = on.proxy.protection.strangers_s()
            assert seen == port.rejecting_s + public.parsing_s
