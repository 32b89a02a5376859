"""Whole chunks go on with the backend's framing: none is lost, doubled or let through unseen."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.api.dialects.continuation import MOST_TEXT_BYTES, SentText
from forebay.proxy.http1.client.backend_errors import BrokenAnswer, UpstreamFault
from forebay.proxy.http1.client.connection import Connection
from forebay.proxy.http1.server.read_turns import ReadTurns
from forebay.proxy.relay.token_chunks import CHUNK_BYTES, TokenChunks
from forebay.traces.ground.sse import EventScanner
from forebay.traces.ground.token_forms import MOST_LENGTHS

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


def event(text: bytes, rest: bytes = b"null") -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":%b}]}\n\n' % (text, rest)


WORDS = (b'"usage"', b'"error"', b'"abort"', b"[DONE]")
TOKEN = event(b" the")
LOUD = event(b"", b'"abort"')
LETTERS = event(b"x" * (0xAA - len(event(b""))))


async def poured(
    pieces: list[bytes], wanted: Callable[[bytes], bool] = lambda _: True
) -> tuple[bytes, list[bytes], bool]:
    """Decoded bytes of both sinks in order, chunks passed on whole, and if the answer ended."""
    scanner = EventScanner()
    chunks = TokenChunks(scanner)
    loop = asyncio.get_running_loop()
    connection = Connection(loop, lambda _: None, ReadTurns(loop))
    connection.connection_made(Wire())
    answer = connection.send(b"", b"")
    connection.data_received(HEAD)
    got, whole = bytearray(), []

    def sink(piece: bytes) -> bool:
        got.extend(piece)
        if not scanner.plain(piece):
            scanner.feed(piece)
        return True

    def chunk_sink(one: bytes) -> bool:
        if not wanted(one) or not chunks.plain(one):
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
    payloads=st.lists(
        st.one_of(
            st.sampled_from(
                [TOKEN, event(b" to"), LOUD, event(b'say \\"'), TOKEN + TOKEN, b": x\n\n"]
            ),
            st.binary(max_size=70).map(event),
            st.binary(min_size=1, max_size=300),
        ),
        min_size=1,
        max_size=8,
    ),
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
    for piece in whole:
        assert decoded(piece) in b"".join(payloads)
        for _, payload in EventScanner().events(decoded(piece)):
            # In a text that is one of the words it means nothing.
            assert not any(word in payload.replace(b'"content":"', b"") for word in WORDS)


def test_chunks_are_offered_once_the_parser_stands_between_two() -> None:
    one, other = chunk(TOKEN), chunk(event(b" reservoir"))
    got, whole, ended = asyncio.run(poured([one, one, one + other, other, LAST]))
    assert whole == [one, one + other, other]  # the first shows where the parser stands
    assert got == TOKEN + TOKEN + TOKEN + event(b" reservoir") * 2
    assert ended


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"%x;x=y\r\n%b\r\n" % (len(TOKEN), TOKEN), id="extension"),
        pytest.param(b"0%x\r\n%b\r\n" % (len(TOKEN), TOKEN), id="leading zero"),
        pytest.param(b"%X\r\n%b\r\n" % (len(LETTERS), LETTERS), id="capital"),
        pytest.param(chunk(TOKEN[:9]) + chunk(TOKEN[9:]), id="an event in two"),
        pytest.param(chunk(event(b"x" * CHUNK_BYTES)), id="long"),
    ],
)
def test_other_framing_is_left_to_the_parser(odd: bytes) -> None:
    got, whole, ended = asyncio.run(poured([chunk(TOKEN), odd, LAST]))
    assert (got, whole, ended) == (TOKEN + decoded(odd), [], True)


@pytest.mark.parametrize("size", [b"0x%x", b"-%x", b" %x", b"+%x"])
def test_bad_framing_is_never_passed_on(size: bytes) -> None:
    bad = size % len(TOKEN) + b"\r\n" + TOKEN + b"\r\n"
    got, whole, ended = asyncio.run(poured([chunk(TOKEN), chunk(TOKEN), bad, LAST]))
    assert whole == [chunk(TOKEN)]
    assert not ended
    assert got == TOKEN * 2  # what is before the fault is the stream's


def test_a_chunk_of_another_size_than_it_says_is_never_passed_on() -> None:
    bad = b"%x\r\n%b\r\n" % (len(TOKEN) - 1, TOKEN)
    got, whole, ended = asyncio.run(poured([chunk(TOKEN), chunk(TOKEN), bad, LAST]))
    assert (whole, ended) == ([chunk(TOKEN)], False)
    assert got in (TOKEN * 2, TOKEN * 2 + TOKEN[:-1])


def test_bytes_that_look_like_a_chunk_inside_a_chunk_are_its_content() -> None:
    inner = chunk(TOKEN)
    outer = chunk(inner + inner)
    size = len(outer) - len(inner) * 2 - 2
    pieces = [chunk(TOKEN), outer[:size], inner, inner, b"\r\n", LAST]
    got, whole, ended = asyncio.run(poured(pieces))
    assert (got, whole, ended) == (TOKEN + inner + inner, [], True)


class TestWhatIsLikeTheLastOne:
    def of(self, *seen: bytes) -> TokenChunks:
        chunks = TokenChunks(EventScanner())
        for one in seen:
            assert chunks.plain(chunk(one))
        return chunks

    @pytest.mark.parametrize("word", WORDS)
    def test_a_word_that_means_something_is_seen_behind_the_same_text(self, word: bytes) -> None:
        loud = event(b" the", word)
        like = event(b" the", b"1" * len(word))
        assert not self.of(like, like).plain(chunk(loud))

    def test_nothing_hides_in_a_text(self) -> None:
        hidden = b"\n\ndata: [DONE]\n\n"
        like = event(b"x" * len(hidden))
        assert not self.of(like, like).plain(chunk(event(hidden)))

    def test_another_size_with_the_same_length_is_no_chunk(self) -> None:
        wrong = b"%x\r\n%b\r\n" % (len(TOKEN) + 1, TOKEN)
        assert not self.of(TOKEN, TOKEN).plain(wrong)

    def test_a_text_that_is_a_word_means_nothing(self) -> None:
        assert self.of(event(b"other")).plain(chunk(event(b"usage")))

    def test_the_rest_of_an_event_is_none(self) -> None:
        scanner = EventScanner()
        chunks = TokenChunks(scanner)
        assert chunks.plain(chunk(TOKEN))
        scanner.feed(b"data: ")
        assert not chunks.plain(chunk(TOKEN))

    @given(
        words=st.lists(
            st.lists(st.one_of(st.text(max_size=9), st.sampled_from([" the", '"', "\\", "é"])),
                     min_size=1, max_size=4), max_size=9),
    )  # fmt: skip
    def test_their_text_is_kept(self, words: list[list[str]]) -> None:
        sent = SentText()
        chunks = TokenChunks(EventScanner(), sent)
        for texts in words:
            events = [event(json.dumps(text)[1:-1].encode()) for text in texts]
            assert chunks.plain(b"".join(map(chunk, events)))
        assert not sent.lost
        assert json.loads(b'"%b"' % bytes(sent.text)) == "".join(map("".join, words))

    def test_a_text_that_is_too_long_is_not_kept(self) -> None:
        sent, word = SentText(), event(b"x" * 60)
        chunks = TokenChunks(EventScanner(), sent)
        for _ in range(MOST_TEXT_BYTES // 60 + 2):
            assert chunks.plain(chunk(word))
        assert sent.lost
        assert chunks.plain(chunk(word) * 3)
        assert not sent.text

    def test_little_is_remembered(self) -> None:
        chunks = self.of(*(event(b"x" * size) for size in range(1000)))
        for size in range(1000):
            chunks.plain(chunk(TOKEN + event(b"x" * size)))
        assert chunks._forms is not None
        assert len(chunks._forms) <= MOST_LENGTHS


GZIP = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 9\r\n\r\n"


def _takes(piece: bytes) -> bool:
    return True


def _breaks(piece: bytes) -> bool:
    raise KeyError


@pytest.mark.parametrize(
    ("head", "body", "sink", "error"),
    [
        (HEAD, b"nonsense", _takes, BrokenAnswer),
        (GZIP, b"no gzip!!", _takes, BrokenAnswer),
        (HEAD, chunk(b"x"), _breaks, KeyError),  # a fault of ours: the backend is not to blame
    ],
)
def test_a_fault_is_told(
    head: bytes, body: bytes, sink: Callable[[bytes], bool], error: type[Exception]
) -> None:
    async def broken() -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, lambda _: None, ReadTurns(loop))
        connection.connection_made(Wire())
        answer = connection.send(b"", b"")
        connection.data_received(head)
        loop.call_soon(connection.data_received, body)
        await answer.pour(sink, None)

    with pytest.raises(error):
        asyncio.run(broken())
