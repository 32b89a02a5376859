"""Events come out the same however the network cut them."""

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.traces.ground.sse import (
    EventScanner,
    EventTooLarge,
    MalformedStream,
    StreamEvent,
    event_body,
    parse_event,
    read_object,
)

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'
    b"event: x\ndata: 1\ndata:2\n\n"
    b"data: [DONE]\n\n"
)
PAYLOADS = [
    b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
    b'{"choices":[{"delta":{"content":"a"}}]}',
    b"1\n2",
    b"[DONE]",
]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    scanner, got, edges = EventScanner(), list[bytes](), [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        got += scanner.feed(STREAM[start:end])
    assert got == PAYLOADS
    assert not scanner.mid_event


def test_a_cut_event_is_noticed() -> None:
    scanner = EventScanner()
    assert scanner.feed(b'data: {"choi') == []
    assert scanner.mid_event


def test_an_event_without_end_is_bounded() -> None:
    scanner = EventScanner(limit=100)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        scanner.feed(b"data: " + b"x" * 200)


@pytest.mark.parametrize("text", [b": a comment with data: in it", b"x", b"event: x\n"])
def test_bytes_that_are_no_event_are_bounded_and_not_called_an_event(text: bytes) -> None:
    scanner = EventScanner(limit=100)
    with pytest.raises(MalformedStream, match="100 bytes and no event") as raised:
        scanner.feed(text * 200)
    assert type(raised.value) is MalformedStream


def choice(**delta: object) -> dict[str, object]:
    return {"choices": [{"delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("body", "event"),
    [
        (choice(role="assistant", content=""), StreamEvent()),
        (choice(content="x"), StreamEvent(has_output=True)),
        (choice(reasoning_content="x"), StreamEvent(has_output=True)),
        (choice(reasoning="x"), StreamEvent(has_output=True)),
        (choice(tool_calls=[{"index": 0}]), StreamEvent(has_output=True)),
        ({"choices": [{"text": ""}]}, StreamEvent()),
        ({"choices": [{"text": "x"}]}, StreamEvent(has_output=True)),
        ({"choices": [{"finish_reason": "stop"}]}, StreamEvent(finish_reason="stop")),
        ({"choices": [], "usage": {"a": 1}}, StreamEvent(usage={"a": 1})),
        ({"error": {"code": 503}}, StreamEvent(error={"code": 503})),
        ({"choices": "odd", "usage": None}, StreamEvent()),
    ],
)
def test_an_event_has_its_fields(body: dict[str, object], event: StreamEvent) -> None:
    assert parse_event(orjson.dumps(body)) == event


def test_done() -> None:
    assert parse_event(b"[DONE]").done


@pytest.mark.parametrize("payload", [b"{", b"[1]", b"7", b"\xff"])
def test_an_event_without_a_json_object_says_nothing(payload: bytes) -> None:
    assert read_object(payload) is None
    assert parse_event(payload) == StreamEvent()
    with pytest.raises(MalformedStream):
        event_body(payload)


@pytest.mark.parametrize("payload", [
    b'{"usage":{"a":1},"logprob":NaN}', b'{"usage":{"a":1},"logprob":-Infinity}',
    b'\xef\xbb\xbf{"usage":{"a":1}}',
])  # fmt: skip
def test_json_that_only_lenient_parsers_read(payload: bytes) -> None:
    assert parse_event(payload).usage == {"a": 1}
