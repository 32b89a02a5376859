"""Parse a large JSON body in steps, so that the event loop is never held for long.

orjson takes 1.5 to 3 ms a MB, and neither stops in between nor lets other threads run. Nearly all
of a large body is a few long strings: they are cut out, parsed in pieces and put back. Whatever
does not fit that picture, or is no valid JSON, is parsed as a whole: the result is always orjson's.
"""

import asyncio
from collections.abc import Iterator
from itertools import islice
from secrets import token_hex
from typing import Any

import orjson

LONG_BYTES = 256 << 10  # a string of so many is cut out, and parsed in pieces of so many
SHORT_BYTES = 256 << 10  # of what is left, at most: it is parsed at once
QUOTES_AT_ONCE = 2000  # about a millisecond
LONGEST_UNIT = (
    12  # bytes of the longest thing that cannot be cut: two escapes that are one character
)


async def loads_in_steps(body: bytes) -> Any:
    """What `orjson.loads` gives; raises orjson.JSONDecodeError."""
    try:
        cut = await _cut_out(body)
        if cut is not None:
            return await _put_together(body, *cut)
    except orjson.JSONDecodeError:
        pass  # it was said of a piece: where the fault is shows the whole
    return orjson.loads(body)


async def _cut_out(body: bytes) -> tuple[bytes, dict[str, tuple[int, int]]] | None:
    """The body with a name in place of each long string, and where these strings are.

    None if that does not make it short.
    """
    parts: list[bytes] = []
    spans: dict[str, tuple[int, int]] = {}
    mark, last = token_hex(8), 0
    strings = _strings(body)
    while some := list(islice(strings, QUOTES_AT_ONCE)):
        for start, end in some:
            if end - start >= LONG_BYTES and body[end + 1 : end + 64].lstrip()[:1] != b":":
                name = f"{mark}{len(spans)}"
                spans[name] = start, end
                parts += [body[last:start], name.encode()]
                last = end
        await asyncio.sleep(0)
    parts.append(body[last:])
    short = b"".join(parts)
    return (short, spans) if spans and len(short) < SHORT_BYTES else None


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Where strings begin and end, without their quotes; an empty span for each escaped quote."""
    start = body.find(b'"') + 1
    while start:
        seen, end = start, body.find(b'"', start)
        while end >= 0 and (end - seen - len(body[seen:end].rstrip(b"\\"))) % 2:
            yield end, end
            seen, end = end + 1, body.find(b'"', end + 1)
        if end < 0:
            return
        yield start, end
        start = body.find(b'"', end + 1) + 1


async def _put_together(body: bytes, short: bytes, spans: dict[str, tuple[int, int]]) -> Any:
    whole = [orjson.loads(short)]  # in a list, should it be one string
    nodes: list[Any] = [whole]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict | list):
            continue
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(value, str) and (span := spans.get(value)):
                node[key] = await _decoded(body, *span)
            else:
                nodes.append(value)
    return whole[0]


async def _decoded(body: bytes, start: int, end: int) -> str:
    parts = []
    while start < end:
        stop = min(end, start + LONG_BYTES)
        piece, stop = _piece(body, start, stop, 1 if stop == end else LONGEST_UNIT)
        parts.append(piece)
        start = stop
        await asyncio.sleep(0)
    return "".join(parts)


def _piece(body: bytes, start: int, stop: int, tries: int) -> tuple[str, int]:
    """A piece that ends at `stop` or a little before, and where: what parses was not cut in two."""
    while True:
        try:
            return str(orjson.loads(b'"%b"' % body[start:stop])), stop
        except orjson.JSONDecodeError:
            tries -= 1
            stop -= 1
            if not tries:
                raise
