"""Invariants for any bytes: checked by hypothesis in the tests, by atheris in `make fuzz`."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import orjson
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

from forebay.proxy.api.body import ReadSettings, read_fields
from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.api.json_body import parse
from forebay.proxy.api.media_tokens import VIDEO_TOKENS
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.server.byte_budget import ByteBudget, RequestMemory
from forebay.proxy.http1.server.client_body import read_client_body
from forebay.traces.ground.sse import EventScanner, MalformedStream, parse_event

EVENT_LIMIT = 256
BODY_LIMIT, BUDGET = 200, 300
BLOCK_BYTES = 256
BODY_STATUSES = {400, 408, 413, 415, 429}
_LONE_CR_OR_LF = re.compile(rb"\r\n|\r|\n")

Events = list[tuple[bytes, bytes]]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut `data` into parts; some may be empty."""
    at = sorted(min(max(0, c), len(data)) for c in cuts)
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def check_sse(data: bytes, cuts: list[int]) -> None:
    """Events do not depend on how the stream was cut, and hold every byte of it once."""
    whole, _, _ = _scan([data], 1 << 40)
    events, held, malformed = _scan(cut(data, cuts), EVENT_LIMIT)
    assert events == whole[: len(events)]
    if malformed:
        assert len(held) > EVENT_LIMIT
    else:
        assert events == whole
        assert b"".join(raw for raw, _ in events) + held == data
        assert len(held) <= EVENT_LIMIT
    for raw, payload in events:
        assert len(payload) <= len(raw)
        assert payload == _payload_by_the_book(raw)
        if payload:
            event = parse_event(payload)
            assert event.done == (payload == b"[DONE]")
            assert event.usage is None or isinstance(event.usage, dict)


def _scan(pieces: list[bytes], limit: int) -> tuple[Events, bytes, bool]:
    """The events, what was held at the end, and whether an event was too long."""
    scanner = EventScanner(limit)
    events: Events = []
    size = given = 0
    for piece in pieces:
        size += len(piece)
        try:
            found = scanner.events(piece)
        except MalformedStream:
            # Events that ended in the same piece are lost with it: they were not given on.
            return events, b"".join(pieces)[given:], True
        events += found
        given += sum(len(raw) for raw, _ in found)
        assert scanner.mid_event == bool(b"".join(pieces)[given:size].strip())
    return events, b"".join(pieces)[given:], False


def _payload_by_the_book(raw: bytes) -> bytes:
    """The data of one event as the WHATWG's rules have it, line by line."""
    lines = [line for line in _LONE_CR_OR_LF.split(raw) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def check_body(
    pieces: list[bytes], headers: list[tuple[str, str]], stated: int | None, taken: int
) -> None:
    """A body equals the sum of its parts, or is a documented error; all memory is released."""
    for here in (False, True):  # whether all of it has come with the head
        _check_body(pieces, headers, stated, taken, here)


def _check_body(
    pieces: list[bytes],
    headers: list[tuple[str, str]],
    stated: int | None,
    taken: int,
    here: bool,
) -> None:
    body = b"".join(pieces)
    budget = ByteBudget(BUDGET)
    budget.held = taken
    most = taken
    waiting = iter(pieces)

    async def readany() -> bytes:
        nonlocal most
        most = max(most, budget.held)
        return next((piece for piece in waiting if piece), b"")

    async def write(data: bytes) -> None:
        assert data == b"HTTP/1.1 100 Continue\r\n\r\n"

    request = SimpleNamespace(
        headers=CIMultiDictProxy(CIMultiDict(headers)),
        content_length=stated,
        version=HttpVersion11,
        can_read_body=bool(body),
        writer=SimpleNamespace(write=write, output_size=25),
        content=SimpleNamespace(
            readany=readany, is_eof=lambda: here, read_nowait=lambda: b"".join(pieces)
        ),
    )

    async def read() -> bytes:
        with RequestMemory(budget) as memory:
            got = await read_client_body(cast(web.BaseRequest, request), BODY_LIMIT, 10.0, memory)
            assert budget.held == taken + max(len(got), stated or 0)
            return got

    try:
        got = _loop().run_until_complete(read())
    except ApiError as error:
        check_error(error, BODY_STATUSES)
    else:
        assert got == body
        assert len(got) <= BODY_LIMIT
    assert budget.held == taken
    assert most <= BUDGET


def check_prompt(body: bytes, chat: bool) -> None:
    """Any bytes are understood, or rejected as malformed; sizes stay in bounds."""
    try:
        asked = read_fields(
            ReadSettings(estimate=TokenEstimate(4.0), block_bytes=BLOCK_BYTES),
            parse(body),
            body,
            {},
            id_="x",
            dialect=CHAT if chat else COMPLETIONS,
        )
    except ApiError as error:
        check_error(error, {400})
        return
    request = asked.request
    assert isinstance(orjson.loads(body), dict)
    media = VIDEO_TOKENS * body.count(b"{")  # each such part is an object
    assert 1 <= request.prompt_tokens <= max(16, 4 * len(body)) + media
    assert 0 <= request.output_tokens <= 1 << 20
    assert len(request.blocks) * BLOCK_BYTES <= max(16, 8 * len(body))
    assert request.block_tokens >= 0


def check_error(error: ApiError, statuses: set[int]) -> None:
    """One of these, and what is sent of it is the four keys, briefly."""
    assert error.status in statuses, error
    fields: dict[str, Any] = orjson.loads(error.body())
    assert set(fields) == {"error"}
    assert set(fields["error"]) == {"message", "type", "param", "code"}
    assert len(error.message) < 200


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all runs: making one costs more than a run."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


def close() -> None:
    while _LOOPS:
        _LOOPS.pop().close()
