"""Memory of requests: bodies and answers share one budget, and no holder gets all of it."""

import asyncio
import ctypes
import subprocess
import sys
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request
from fakes.faulty_backends import answers, sends
from stages.proxy_stage import answer, chunk, on_stage, settle
from stages.raw_client import BODY, HOST, POST, ask, before_oracle, connected, post

from forebay.proxy.api.dialects.usage import usage_tokens
from forebay.proxy.api.json_body import parse_any
from forebay.proxy.config.sections import Limits
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.server.byte_budget import SMALL_BYTES, ByteBudget, RequestMemory
from forebay.proxy.http1.server.client_body import read_client_body
from forebay.proxy.relay.whole_answer import WHOLE_BYTES
from forebay.proxy.runtime.memory import cgroup_limit, memory_limit, request_bytes

MIB = 1 << 20
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def held_by(budget: ByteBudget, holder: str, size: int) -> RequestMemory:
    memory = RequestMemory(budget)
    memory.holder = holder
    memory.reach(size)
    return memory


def fill(budget: ByteBudget, holder: str, size: int) -> None:
    """Hold pieces of `size` until there is no room; raises the ApiError of that."""
    while True:
        held_by(budget, holder, size)


class TestShares:
    def test_a_holder_leaves_a_third_for_others(self) -> None:
        budget = ByteBudget(90 * MIB)
        with pytest.raises(ApiError) as refused:
            fill(budget, "greedy", MIB)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert budget.held == 60 * MIB
        held_by(budget, "good", 16 * MIB)

    def test_under_pressure_all_get_the_same(self) -> None:
        """Whoever came first: what the first has given back is not its own again."""
        budget = ByteBudget(90 * MIB)
        first = [held_by(budget, "first", MIB) for _ in range(60)]
        for _ in range(20):
            held_by(budget, "second", MIB)
        for memory in first[:30]:
            memory.shrink(0)
        with pytest.raises(ApiError):
            fill(budget, "second", MIB)
        assert budget.by_holder["second"] >= 36 * MIB  # two fifths of 90

    def test_there_is_room_for_small_requests_of_who_has_too_much(self) -> None:
        budget = ByteBudget(90 * MIB)
        for _ in range(60):
            held_by(budget, "one", MIB)
        for _ in range(100):
            held_by(budget, "one", SMALL_BYTES)
        with pytest.raises(ApiError):
            fill(budget, "one", SMALL_BYTES)  # small ones cannot take all either
        held_by(budget, "other", MIB)

    def test_nothing_is_kept_of_who_holds_nothing(self) -> None:
        budget = ByteBudget(MIB)
        with RequestMemory(budget) as memory:
            memory.holder = "a"
            memory.reach(1000)
            memory.shrink(500)
            assert (budget.held, budget.by_holder["a"]) == (500, 500)
        assert (budget.held, len(budget.by_holder)) == (0, 0)


V1, V2 = "5:cpu,cpuacct:/\n4:memory:/docker/1\n", "0::/a.slice/f.service\n"
CGROUPS: dict[str, tuple[str, dict[str, str], float]] = {
    "version 2: the lowest of all around it": (
        V2,
        {
            "a.slice/memory.max": str(512 * MIB),
            "a.slice/f.service/memory.max": "max",
            "memory.max": str(900 * MIB),
        },
        512 * MIB,
    ),
    "version 2: a container that sees itself as the root": (
        "0::/../x/docker-1.scope\n", {"memory.max": str(512 * MIB)}, 512 * MIB,
    ),
    "version 1": (
        V1,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/docker/1/memory.limit_in_bytes": str(300 * MIB),
        },
        300 * MIB,
    ),
    "no limit": (V2, {"a.slice/f.service/memory.max": "max"}, float("inf")),
    "no such files": (V2, {}, float("inf")),
}  # fmt: skip


@pytest.mark.parametrize("name", CGROUPS)
def test_the_limit_of_a_cgroup(name: str, tmp_path: Path) -> None:
    line, limits, limit = CGROUPS[name]
    for file, text in {"proc/self/cgroup": line, **limits}.items():
        path = tmp_path / (file if file.startswith("proc/") else f"sys/fs/cgroup/{file}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" * (file in limits))
    assert cgroup_limit(tmp_path) == limit


def test_a_quarter_of_it_is_for_requests() -> None:
    assert request_bytes(Limits(memory=512 * MIB)) == 128 * MIB
    assert request_bytes(Limits(memory=64 << 30)) == 192 * MIB
    assert request_bytes(Limits(memory=512 * MIB, queue_bytes=MIB)) == MIB
    assert memory_limit(Limits()) > 64 * MIB


class TestUploads:
    async def test_uploads_that_stop_keep_nobody_out(self) -> None:
        """Large bodies, all but their last byte: small requests are served, of the same address."""
        async with (
            before_oracle(limits={"queue_bytes": 2_000_000}) as (on, _),
            AsyncExitStack() as stack,
        ):
            for _ in range(20):
                _, writer = await stack.enter_async_context(connected(on))
                writer.write(POST + HOST + CHUNKED + b"\r\n" + chunk(b"x" * 99_999))
            await settle()
            assert on.proxy.app._budget.held <= 2_000_000 * 2 / 3
            for _ in range(5):
                assert (await ask(on, post())).status == 200

    async def test_a_fast_beginning_buys_no_time_for_silence(self) -> None:
        async with before_oracle() as (on, _):
            began = asyncio.get_running_loop().time()
            head = POST + HOST + b"Content-Length: 10000001\r\n\r\n"
            refused = await ask(on, head + b"x" * 10_000_000)
            assert (refused.status, refused.error["code"]) == (408, "request_timeout")
            assert asyncio.get_running_loop().time() - began < 15  # not 100 s at 100 KB/s
            assert on.proxy.app._budget.held == 0


USAGE_AT_END = b'"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


@pytest.mark.parametrize("count", [1 << 25, 10**15, -1, 1.5, "7", None])
def test_an_impossible_usage_is_no_usage(count: object) -> None:
    """A capture writes a number for each 512 tokens of a prompt."""
    details = {"cached_tokens": count}
    known = {"prompt_tokens": 7, "completion_tokens": 3}
    assert usage_tokens({**known, "prompt_tokens": count}) == (0, None, 0)
    assert usage_tokens({**known, "completion_tokens": count}) == (7, None, 0)
    assert usage_tokens({**known, "prompt_tokens_details": details}) == (7, None, 3)


async def test_large_bodies_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes four times the size of a body."""
    parsing, most, parse = 0, 0, parse_any

    async def counted(body: bytes, **how: Any) -> dict[str, Any]:
        nonlocal parsing, most
        parsing += 1
        most = max(most, parsing)
        try:
            return await parse(body, **how)
        finally:
            parsing -= 1

    monkeypatch.setattr("forebay.proxy.app.parse_any", counted)
    large_body = b'{"max_tokens":1,"prompt":"' + b"x" * 2_000_000 + b'"}'

    buckets = [{"name": "any", "up_to": 10_000_000, "max_wait": "1h"}]
    async with before_oracle(buckets=buckets) as (on, _):
        answers = await asyncio.gather(*(ask(on, post(body=large_body)) for _ in range(5)))
        assert [answer.status for answer in answers] == [200] * 5
        assert most == 1


def printed(script: str) -> int:
    """Return the number that a Python program prints after `keep_large_apart`."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library is not glibc")
    first = "from forebay.proxy.runtime.memory import keep_large_apart\nkeep_large_apart()\n"
    words = [sys.executable, "-c", first + dedent(script)]
    return int(subprocess.run(words, capture_output=True, check=True).stdout)


def test_large_objects_have_mappings_of_their_own() -> None:
    """Also after one was freed: glibc's default then puts the next ones where they cannot grow."""
    script = """
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

        count = ctypes.CDLL(None).mallinfo2
        count.restype = Info
        large = bytes(24 << 20)
        del large
        before = count().d
        large = bytes(2 << 20)
        print(count().d - before)
    """
    assert printed(script) == 1


def test_memory_of_bodies_of_400_kb_is_used_again() -> None:
    """A fixed threshold of mappings would return each one to the kernel, which clears it again."""
    script = """
        import resource

        for body in range(101):
            if body == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            parts = [bytes(400_000), bytes(400_000)]
            del parts
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    assert printed(script) < 2_000  # 100 pairs of bodies have 19,600 pages


@pytest.mark.real_time
async def test_a_large_body_is_not_copied_once_it_has_come() -> None:
    """A copy of 16 MB would hold up everybody else for 8 ms."""
    size, part = 8 * MIB, b"x" * 65_536

    stream = StreamReader(Mock(), 2**16, loop=asyncio.get_running_loop())
    request = make_mocked_request("POST", "/", payload=stream)
    memory = RequestMemory(ByteBudget(100 * MIB))
    reading = asyncio.create_task(read_client_body(request, 2 * size, 10.0, memory))
    tracemalloc.start()
    try:
        for _ in range(size // len(part)):
            stream.feed_data(part)
            await asyncio.sleep(0)
        tracemalloc.reset_peak()
        stream.feed_eof()
        body = await reading
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body == part * (size // len(part))
    assert most < 1.5 * size


def large(size: int, end: bytes = USAGE_AT_END) -> bytes:
    begin = b'{"choices":[{"index":0,"message":{"content":"'
    return begin + b"x" * (size - len(begin) - len(end)) + end


def in_chunks(body: bytes) -> bytes:
    head = answer(200, b"").partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    parts = [chunk(body[start : start + 100_000]) for start in range(0, len(body), 100_000)]
    return head + b"".join(parts) + b"0\r\n\r\n"


class TestAnswers:
    @pytest.mark.parametrize("framing", ["length", "chunks"])
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
    async def test_a_large_one_is_passed_on_as_it_comes(self, framing: str, path: str) -> None:
        """It is whole at the client, and never in the proxy; its usage is learned."""
        body = large(8 * MIB)
        most = 0
        serves = {"length": answers(200, body), "chunks": sends(in_chunks(body), end="keep")}
        async with on_stage(serves[framing]) as (on, _):
            chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            async with on.post(chat, path) as response:
                assert response.status == 200
                assert response.headers["x-request-id"]
                got = bytearray()
                async for piece in response.content.iter_any():
                    got += piece
                    most = max(most, on.proxy.app._budget.held)
            assert got == body
            assert most <= WHOLE_BYTES + 1000
            used = on.proxy.metrics.prompt_tokens.of[("b0",)]._value
            assert used == (7 if path.endswith("completions") else 0)

    @pytest.mark.parametrize("how", ["lost", "aborted", "too long"])
    async def test_a_failure_in_the_middle_breaks_the_framing(self, how: str) -> None:
        whole = answer(200, large(2 * MIB, b'"},"finish_reason":"abort"}]}'))
        serves = {
            "lost": sends(whole[:MIB], end="reset"),
            "aborted": sends(whole, end="keep"),
            "too long": sends(in_chunks(large(4 * MIB)), end="keep"),
        }
        async with on_stage(serves[how], limits={"answer": "3MiB"}) as (on, _):
            async with connected(on) as (reader, writer):
                writer.write(POST + HOST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
                got = await asyncio.wait_for(reader.read(), 10)
            assert got.startswith(b"HTTP/1.1 200 ")
            assert not got.endswith((b"}", b"0\r\n\r\n"))
            length = b"content-length: %d" % (2 * MIB)
            assert (length in got.lower()) == (how != "too long")
            assert len(got) < 4 * MIB
