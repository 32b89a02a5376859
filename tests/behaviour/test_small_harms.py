"""Small harms that one client, server or plug-in could do to all others; each has one test."""

import asyncio
import os
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.faulty_backends import sends
from fakes.tenant_keys import key_of, keys_of
from said import Said
from stages.proxy_stage import SHARED_LOOP, RawBackend, error_of, on_stage, stage, whole

from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.api.unshaped_body import prepared
from forebay.proxy.backends.failures import MALFORMED
from forebay.proxy.backends.models import Models
from forebay.proxy.config.paths import FORMS, ROUTED, may_be_form
from forebay.proxy.config.routes import CheckedRoute
from forebay.proxy.config.sources import load_config
from forebay.proxy.core.model import Request
from forebay.proxy.core.policy.routing import Affinity, Option
from forebay.proxy.log_events import LogEvent
from forebay.proxy.routing import GuardedRoute
from forebay.proxy.share.redis_link import MOST_BYTES, bounded_parser
from forebay.proxy.telemetry.logs.capture import Capture, Rows, memory_of
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.errors import InputError

KEY = key_of("acme")
SALTS = CacheSalts(b"a secret of the tests", {})
FORM = {"content-type": "multipart/form-data; boundary=b"}


# The path decides whether a body may be a form.


async def test_json_under_the_header_of_a_form_is_charged_and_salted(tmp_path: Path) -> None:
    known = {"acme": {"tokens_per_s": 10, "burst_tokens": 1_000}}

    tenants = {"keys": keys_of(tmp_path, "acme"), "known": known, "isolate_cache": True}
    async with on_stage(None, tenants=tenants) as (on, backends):

        async def ask() -> int:
            body = {"input": "x" * 3_600}
            return await on.status(body, "/v1/embeddings", headers=KEY | FORM)

        assert [await ask() for _ in range(20)] == [200, *[429] * 19]
        (call,) = backends[0].calls
        assert b'"cache_salt"' in call.body


def test_a_form_elsewhere_must_be_one() -> None:
    assert [path for path in ROUTED if may_be_form(path)] == list(FORMS)
    assert may_be_form("/v1/images/edits")  # a path of `routes`

    def prepare(body: bytes) -> bytes:
        sent, _ = asyncio.run(
            prepared(body, FORM["content-type"], "acme", SALTS, Models(), form=True)
        )
        return sent

    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    assert prepare(form) == form
    assert b'"cache_salt"' in prepare(b' {"input": "--b"}')


# A plug-in cannot end the proxy, or take away its list.


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException]
)
def test_no_exception_of_a_policy_ends_more_than_its_choice(error: type[BaseException]) -> None:
    def choose(request: Request, engines: Any, now: float) -> Option:
        assert isinstance(engines, tuple)
        raise error

    said, option = Said(), Option("a", 0.0, 0.0, 1.0, 1.0, 0, 0.0)
    route = GuardedRoute(CheckedRoute("mine", choose), said)
    assert route(Request("r", 1), [option], Affinity(), 0.0) is option
    assert error.__name__ in said[0]


# Memory.


@pytest.mark.real_time
async def test_a_large_message_on_the_channel_is_not_read() -> None:
    from redis.exceptions import InvalidResponse

    reader = asyncio.StreamReader()
    parser = bounded_parser()(32_768)
    encoder = SimpleNamespace(decode=lambda value: value)
    parser.on_connect(SimpleNamespace(_reader=reader, encoder=encoder))
    reader.feed_data(b"$3\r\nabc\r\n")
    assert await parser.read_response() == b"abc"
    reader.feed_data(b"$%d\r\n" % (MOST_BYTES + 1))
    with pytest.raises(InvalidResponse):
        await parser.read_response()


def record(number: int, blocks: int) -> RequestRecord:
    made = RequestRecord(f"r{number}", float(number))
    made.request = Request(f"r{number}", 600, 30, tuple(range(blocks)))
    return made


def test_rows_behind_a_long_stream_wait_within_bytes() -> None:
    """Prompts of 8 MB have 4,096 blocks. The row of the stream is written before it ends."""
    one = memory_of(record(0, 4_096).request)
    rows = Rows(b"salt", 2048, 4.0, 10 * one)
    stream, *others = [record(number, 4_096) for number in range(100)]
    for each in (stream, *others):
        rows.started(each)
    due = [len(rows.finished(each, 200, 900.0)) for each in others]
    assert due == [*[0] * 10, 12, *[1] * 88]  # with the eleventh, all are let go
    assert rows.finished(stream, 200, 900.0) == []
    assert rows.rest() == []


def test_rows_for_a_slow_disk_wait_within_bytes(tmp_path: Path) -> None:
    said, one = Said(), memory_of(record(0, 4_096).request)
    with (tmp_path / "x").open("wb") as file:
        capture = Capture(Rows(b"salt", 2048, 4.0), tmp_path / "x", file, inf, said, 3 * one)
        capture._queue.get = lambda: asyncio.run(asyncio.sleep(60))  # type: ignore[method-assign,misc,assignment]
        waiting = [record(number, 4_096) for number in range(50)]
        for each in waiting:
            capture.started(each)
            capture.finished(each, 200, 900.0)
        assert capture.dropped >= 46
        assert [event[0] for event in said.events] == [LogEvent.CAPTURE_DROPS]


# Servers that lie.

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LIES = {
    "bad_http": b"HTTP/0.9 200 OK\r\n\r\n{}",
    "large_head": HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n{}",
    "bad_status": b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}",
    "transfer_coding": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "encoding": HEAD + b"content-encoding: br\r\ncontent-length: 2\r\n\r\n{}",
    "redirect": b"HTTP/1.1 302 X\r\nlocation: http://x/\r\ncontent-length: 0\r\n\r\n",
    "empty": HEAD + b"content-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_lie_of_a_server_is_named_once_a_minute(kind: str) -> None:
    async with on_stage(sends(LIES[kind], end="reset")) as (on, _):
        for _ in range(5):
            async with on.post() as response:
                assert response.status == (200 if kind == "empty" else 502)
                if kind != "empty":
                    assert (await error_of(response))["code"] == "upstream_error"
            await asyncio.sleep(10)
        lines = [
            line
            for event, line in zip(on.said.events, on.said, strict=True)
            if event[0] is LogEvent.BACKEND_MALFORMED
        ]
        assert len(lines) == 1
        assert lines[0] == f"backend b0 sent a malformed answer: {MALFORMED[kind]}"
        text = on.proxy.metrics.text().decode()
        assert f'forebay_upstream_errors_total{{backend="b0",kind="{kind}"}}' in text


# Endings and files.


@pytest.mark.parametrize("key", ["usage", "metrics"])
async def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path, key: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    settings = {"usage": {"path": str(pipe)}, "metrics": {"hlog": str(pipe)}}

    with pytest.raises(InputError, match=r"cannot write .*pipe \(it is a pipe that nobody reads\)"):
        async with on_stage(whole, **{key: settings[key]}):
            raise AssertionError("it has started")


def test_the_ledger_can_be_a_pipe_that_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    made = record(1, 1)
    made.written = True
    with UsageLedger(pipe, Said()) as ledger:
        ledger.finished(made, 200, 1.0)
    assert os.read(reader, 4096).startswith(b'{"time"')
    os.close(reader)


async def test_reloads_without_a_change_fill_no_log() -> None:
    async with RawBackend().running() as backend:
        backends = [{"name": "b0", "url": backend.url, "max_concurrency": 64}]
        keys = {"listen": {"port": 0, "admin_port": 0}, "backends": backends}

        def load() -> Any:
            return load_config(None, keys | {"limits": SHARED_LOOP}, {})

        async with stage([backend.url], load=load) as on:
            await on.proxy.reloader.reload()  # it differs from the stage's own
            for _ in range(200):
                assert await on.proxy.reloader.reload() == "unchanged"
            assert on.said.count("configuration unchanged") == 1
            await asyncio.sleep(61)
            await on.proxy.reloader.reload()
            assert on.said.count("configuration unchanged") == 2
