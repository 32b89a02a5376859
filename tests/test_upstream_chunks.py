"""Chunks that come alone go on with the backend's framing: none is lost, doubled or let through."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.upstream import BrokenAnswer, Connection, UpstreamFault

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


class Wire(asyncio.Transport):
    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def decoded(body: bytes) -> bytes:
    """By the parser alone."""
    found: list[bytes] = []

    class Told:
        def on_body(self, data: bytes) -> None:
            found.append(data)

    httptools.HttpResponseParser(Told()).feed_data(HEAD + body)
    return b"".join(found)


async def poured(
    pieces: list[bytes], wanted: Callable[[bytes], bool]
) -> tuple[bytes, list[bytes], bool]:
    """What both sinks got, in order and decoded; the chunks taken whole; whether it ended."""
    connection = Connection(asyncio.get_running_loop(), lambda _: None)
    connection.connection_made(Wire())
    answer = connection.send(b"", b"")
    connection.data_received(HEAD)
    got, whole = bytearray(), []

    def sink(piece: bytes) -> bool:
        got.extend(piece)
        return True

    def chunk_sink(one: bytes) -> bool:
        if not wanted(one):
            return False
        whole.append(one)
        got.extend(decoded(one))
        return True

    pouring = asyncio.ensure_future(answer.pour(sink, chunk_sink))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    try:
        ended = await pouring
    except UpstreamFault:
        ended = False
    return bytes(got), whole, ended


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 2400), max_size=8),
    at_chunks=st.booleans(),
)
def test_however_it_is_cut_all_of_it_comes_once_and_in_order(
    payloads: list[bytes], cuts: list[int], at_chunks: bool
) -> None:
    body = b"".join(map(chunk, payloads)) + LAST
    edges = {0, len(body), *(cut for cut in cuts if cut < len(body))}
    if at_chunks:
        edges |= {len(b"".join(map(chunk, payloads[:n]))) for n in range(len(payloads) + 1)}
    at = sorted(edges)
    pieces = [body[a:b] for a, b in pairwise(at)]
    got, whole, ended = asyncio.run(poured(pieces, lambda one: len(one) % 3 > 0))
    assert got == b"".join(payloads)
    assert ended
    assert all(decoded(one) in payloads for one in whole)


def test_a_chunk_that_comes_alone_is_offered_once_the_parser_stands_between_chunks() -> None:
    one = chunk(b"token")
    got, whole, ended = asyncio.run(poured([one, one, one, LAST], lambda _: True))
    assert whole == [one, one]  # the first shows where the parser stands
    assert got == b"token" * 3
    assert ended


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"5;x=y\r\ntoken\r\n", id="extension"),
        pytest.param(b"05\r\ntoken\r\n", id="leading zero"),
        pytest.param(b"A\r\n0123456789\r\n", id="capital"),
        pytest.param(chunk(b"a") + chunk(b"b"), id="two at once"),
    ],
)
def test_other_framing_is_left_to_the_parser(odd: bytes) -> None:
    got, whole, ended = asyncio.run(poured([chunk(b"x"), odd, LAST], lambda _: True))
    assert (got, whole, ended) == (b"x" + decoded(odd), [], True)


@pytest.mark.parametrize("bad", [b"0x5\r\ntoken\r\n", b"5\r\ntokens\r\n", b"-5\r\ntoken\r\n"])
def test_bad_framing_is_never_passed_on(bad: bytes) -> None:
    got, whole, ended = asyncio.run(poured([chunk(b"x"), bad, LAST], lambda _: True))
    assert not whole
    assert not ended
    assert got in (b"x", b"xtoken")  # what is before the fault is the stream's


def test_what_looks_like_a_chunk_inside_of_one_is_its_content() -> None:
    inner = chunk(b"token")
    outer = chunk(inner + inner)
    size = len(outer) - len(inner) * 2 - 2
    pieces = [chunk(b"x"), outer[:size], inner, inner, b"\r\n", LAST]
    got, whole, ended = asyncio.run(poured(pieces, lambda _: True))
    assert (got, whole, ended) == (b"x" + inner + inner, [], True)


def test_a_fault_is_told() -> None:
    async def broken() -> None:
        connection = Connection(asyncio.get_running_loop(), lambda _: None)
        connection.connection_made(Wire())
        answer = connection.send(b"", b"")
        connection.data_received(HEAD + b"nonsense")
        await answer.pour(lambda _: True, lambda _: True)

    with pytest.raises(BrokenAnswer):
        asyncio.run(broken())
