"""Compressed bodies: the server gets them plain, and nothing becomes larger than the limit."""

import asyncio
import gzip
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import orjson
import pytest
from stages.raw_client import ask, before_oracle, post

from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.server.byte_budget import ByteBudget, RequestMemory
from forebay.proxy.http1.server.request_coding import MOST_SILENT, READ_BYTES, decompressed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = b"/v1/chat/completions"
PLAIN = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 30_000}]})
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "ZSTD": zstd.compress,
}
with suppress(ImportError):  # an extra
    import brotli

    COMPRESS["br"] = partial(brotli.compress, quality=1)


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
async def test_compressed_bodies_reach_the_server_plain(coding: str, path: str) -> None:
    compress = COMPRESS[coding]

    async with before_oracle() as (on, oracle):
        header = b"Content-Encoding: " + coding.encode()
        cut = len(PLAIN) // 2
        two = compress(PLAIN[:cut]) + compress(PLAIN[cut:])
        bodies = [compress(PLAIN), compress(PLAIN) if coding == "br" else two]
        for body in bodies:  # brotli has no members
            assert (await ask(on, post(header, body=body, path=path.encode()))).status == 200
        for request in oracle.requests:
            assert request.body == PLAIN
            assert "content-encoding" not in request.headers
        assert len(oracle.requests) == 2


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize("how", ["cut", "other", "empty", "more", "members"])
async def test_compressed_bodies_that_are_wrong(coding: str, how: str) -> None:
    compressed = COMPRESS[coding](PLAIN)
    body = {
        "cut": compressed[:-5], "other": PLAIN, "empty": b"", "more": compressed + b"x",
        "members": COMPRESS[coding](b"") * 2_000,
    }[how]  # fmt: skip

    async with before_oracle() as (on, oracle):
        header = b"Content-Encoding: " + coding.encode()
        answer = await ask(on, post(header, body=body, path=CHAT))
        code = "invalid_json" if how == "empty" else "invalid_encoding"
        assert (answer.status, answer.error["code"]) == (400, code)
        assert not oracle.requests


@pytest.mark.parametrize("coding", COMPRESS)
async def test_a_little_that_becomes_very_much_takes_little_memory(coding: str) -> None:
    """200 MB of zeros, in a body of a few KB for zstd."""
    bomb = COMPRESS[coding](bytes(200_000_000))

    async with before_oracle(limits={"body": 1 << 20}) as (on, oracle):
        header = b"Content-Encoding: " + coding.encode()
        tracemalloc.start()
        try:
            answer = await ask(on, post(header, body=bomb, path=CHAT))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert most < 8 << 20
        assert not oracle.requests


async def test_a_window_of_zstd_that_takes_much_memory_is_refused() -> None:
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    compressor = zstd.ZstdCompressor(options=options)
    body = compressor.compress(PLAIN) + compressor.flush()

    async with before_oracle() as (on, _):
        answer = await ask(on, post(b"Content-Encoding: zstd", body=body, path=CHAT))
        assert (answer.status, answer.error["code"]) == (400, "invalid_encoding")


def without_content(coding: str, size: int) -> bytes:
    """A body with `size` bytes of blocks that are valid and empty, and a few of content."""
    head, block = {
        "gzip": (gzip.compress(b"")[:10], b"\0\0\0\xff\xff"),
        "zstd": (zstd.compress(b"")[:6], b"\0\0\0"),
        "br": (b"\x0c", b"\x06"),  # metadata
    }[coding]
    return head + block * (size // len(block))


@pytest.mark.parametrize("coding", [*sorted(COMPRESS.keys() & {"gzip", "br"}), "zstd"])
async def test_a_body_without_content_lets_others_run_and_is_not_read_to_its_end(
    coding: str,
) -> None:
    """15 MB of it were read in one go, in 0.1 to 0.4 s of processor time."""
    with RequestMemory(ByteBudget(1 << 30)) as memory:
        for size in (1 << 19, 15 << 20):
            body, turns = without_content(coding, size), 0
            reading = asyncio.ensure_future(decompressed(body, coding, 1 << 24, memory))
            while not reading.done():
                await asyncio.sleep(0)
                turns += 1
            with pytest.raises(ApiError, match="not valid"):
                await reading
            # Turns while up to 1 MiB is read, and none for the rest.
            read = min(len(body), MOST_SILENT)
            assert read // READ_BYTES - 2 <= turns <= read // READ_BYTES + 4
