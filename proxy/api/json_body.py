"""Parse a JSON body, a large body in steps, so that the event loop is never blocked for long.

orjson takes 1.5 to 3 ms per MB, without a pause and without releasing the GIL. Nearly all of a
large body is long strings. They are cut out, parsed in pieces, and put back. Any other body, and
invalid JSON, is parsed as a whole, so the result is always orjson's. Therefore values outside of
strings are counted first: a MB of `[],` takes 0.1 s and 20 MB of memory.
"""

import asyncio
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from json import detect_encoding
from secrets import choice, token_hex
from typing import Any

import orjson
from jiter import from_json

from forebay.proxy.api.block_hashes import LARGE_BYTES
from forebay.proxy.http1.errors import ApiError, invalid_type

BYTE_ORDER_MARK, UTF_16_MARKS = BOM_UTF8, (BOM_UTF16_BE, BOM_UTF16_LE)  # UTF-32 has NULs
CUT_BYTES = 512  # longer strings are cut out
LONG_BYTES = 256 << 10  # bytes of strings that are parsed without a pause
SHORT_BYTES = 1 << 20  # bound of the body without long strings, which is parsed at once
PUT_AT_ONCE = 1 << 10  # values that are visited without a pause, when the strings are put back
SPANS_AT_ONCE = 100  # a tenth of a millisecond, or two thirds if all quotes are escaped
ESCAPED_BYTES = 512  # searched by a pattern after an escaped quote, because others are near
LONGEST_UNIT = 12  # bytes that must not be cut: at most two escapes, for one character
COUNTED_AT_ONCE = 256 << 10  # bytes
FEW_BYTES = 64  # searched for backslashes before a quote: more of them are rare

# Each bound stands for 50 to 150 ms. A batch of 16,384 chat messages reaches a fifth of them.
MOST_CONTAINERS = 1 << 17  # lists and objects
MOST_STRINGS = 1 << 18  # keys too
MOST_VALUES = 1 << 22  # 16 MiB of token ids have about 2.5 million


# Keys that decisions depend on. Of two equal keys the last counts here and in Python, but a backend
# may take the first.
ONCE = frozenset(
    (
        "model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "n",
        "prompt", "messages", "system", "input", "instructions", "previous_response_id",
    )
)  # fmt: skip
LONGEST_KEY = 6 * max(map(len, ONCE))  # bytes, each character as an escape

_STRIDE = choice((61, 67, 71, 73, 79, 83, 89, 97))  # random: no body can avoid it
_COLON = re.compile(rb"\s*+:")
# The inside of a string, up to a quote or to an escape that is cut.
_ESCAPED = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class LongText:
    """A long string as UTF-8 in pieces, because copying 16 MB at once takes 10 ms."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def __str__(self) -> str:
        return b"".join(self.pieces).decode()


class FaultyJson(ValueError):
    """The body is not JSON. The place is not given: finding it means parsing the whole at once."""


class TooMuchJson(ValueError):
    """The body has more values than any sensible request. The message names the kind."""


class RepeatedKey(ValueError):
    """The body has a key in ONCE twice. The message names it."""


def as_utf8(body: bytes) -> bytes:
    """Return JSON in UTF-8 without a byte order mark, as servers read any Unicode encoding.

    Bytes that are not text stay as they are, and cannot be parsed.
    """
    if body.startswith(BYTE_ORDER_MARK):
        return body[len(BYTE_ORDER_MARK) :]
    if b"\0" not in body[:4] and not body.startswith(UTF_16_MARKS):
        return body
    try:
        return body.decode(detect_encoding(body)).encode()
    except UnicodeError:
        return body


async def parse_any(body: bytes, *, in_pieces: bool = False) -> dict[str, Any]:
    """Parse a body, in steps if it takes long or has a key twice. Raises ApiError 400.

    A small body is parsed by jiter, which finds repeated keys in the same pass.

    Args:
        in_pieces: return each very long string of a large body as a LongText.
    """
    large = len(body) >= LARGE_BYTES
    if not large and not is_dense(body):
        try:
            fields = from_json(
                body, allow_inf_nan=True, cache_mode="keys", catch_duplicate_keys=True
            )
        except ValueError:
            parse(body)  # names the place, unless it is only a repeated key or deep nesting
        else:
            return _fields(fields)
    try:
        return _fields(await loads_in_steps(body, in_pieces=in_pieces and large))
    except TooMuchJson as error:
        raise ApiError(400, "too_many_items", f"The body holds {error}.") from None
    except RepeatedKey as repeated:
        key = str(repeated)
        message = f"The body has {key} more than once."
        raise ApiError(400, "repeated_key", message, param=key) from None
    except FaultyJson:
        raise ApiError(400, "invalid_json", "The body is not valid JSON.") from None
    except orjson.JSONDecodeError as error:
        raise _not_json(error) from None


def parse(body: bytes) -> dict[str, Any]:
    """Parse a small body. Raises ApiError 400."""
    try:
        return _fields(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise _not_json(error) from None


def _not_json(error: orjson.JSONDecodeError) -> ApiError:
    # The decoder's message may quote the prompt, so only the place is reported.
    where = f"line {error.lineno}, column {error.colno}"
    return ApiError(400, "invalid_json", f"The body is not valid JSON ({where}).")


def _fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise invalid_type("body", "a JSON object", None)
    return fields


def is_dense(body: bytes) -> bool:
    """True if a small body may take long for its length.

    This looks at a sample, because counting all of a 400 KB prompt would cost as much as parsing
    it. The sample includes strings, so it may be wrong. Then `loads_in_steps` counts exactly.
    """
    if len(body) < 2 * MOST_CONTAINERS:  # a container has two brackets
        return False
    sample = body[::_STRIDE]
    return (sample.count(b"{") + sample.count(b"[")) * _STRIDE > MOST_CONTAINERS // 2


@dataclass(slots=True)
class _Counts:
    """Counts values outside of strings. Raises TooMuchJson above the bounds.

    Attributes:
        depth: number of lists and objects that are open now.
    """

    depth: int = 0
    containers: int = 0
    strings: int = 0
    values: int = 0

    def add(self, body: bytes, start: int, end: int) -> None:
        if end - start == 1 and body[start] == 0x3A:  # a colon: half of the calls
            return
        opened = body.count(b"{", start, end) + body.count(b"[", start, end)
        self.depth += opened - body.count(b"}", start, end) - body.count(b"]", start, end)
        self.containers += opened
        self.values += body.count(b",", start, end)
        if self.containers > MOST_CONTAINERS:
            raise TooMuchJson(f"more than {MOST_CONTAINERS:,} lists and objects")
        if self.strings > MOST_STRINGS:
            raise TooMuchJson(f"more than {MOST_STRINGS:,} strings")
        if self.values > MOST_VALUES:
            raise TooMuchJson(f"more than {MOST_VALUES:,} values")


async def loads_in_steps(body: bytes, *, in_pieces: bool = False) -> Any:
    """Parse JSON as `orjson.loads` does, with pauses.

    Raises TooMuchJson and RepeatedKey. Invalid JSON raises FaultyJson or, where the whole was
    parsed at once, orjson's JSONDecodeError.

    Args:
        in_pieces: return each string of LONG_BYTES and more as a LongText.
    """
    cut = await _cut_out(body)
    if cut is None:
        return _loaded(body)
    try:
        return await _put_together(body, *cut, in_pieces)
    except orjson.JSONDecodeError as error:  # it names a place in the piece, not in the body
        raise FaultyJson from error


def _loaded(data: bytes) -> Any:
    """Parse JSON at once, with NaN and Infinity as numbers, as Python's parser reads them.

    Raises orjson's JSONDecodeError.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if b"NaN" in data or b"Infinity" in data:
            with suppress(ValueError):
                return from_json(data, allow_inf_nan=True)
        raise


async def _cut_out(body: bytes) -> tuple[bytes, dict[str, tuple[int, int]]] | None:
    """Return the body with a name in place of each long string, and the spans of these strings.

    Returns None if the rest is not short enough. Raises TooMuchJson, RepeatedKey.
    """
    parts: list[bytes] = []
    keys: set[str] = set()
    spans: dict[str, tuple[int, int]] = {}
    mark, last = token_hex(8), 0
    counts, counted = _Counts(), 0
    strings = _strings(body)
    while some := list(islice(strings, SPANS_AT_ONCE)):
        for start, end in some:
            if not end:  # a part of a string with escaped quotes
                continue
            # Count the values between the string before and this string.
            counts.strings += 1
            if start - counted > COUNTED_AT_ONCE:
                counted = await _count_far(counts, body, counted, start - 1)
            counts.add(body, counted, start - 1)
            counted = end + 1
            may_be_key = counts.depth == 1 and end - start <= LONGEST_KEY
            if may_be_key and _COLON.match(body, end + 1):
                _add_key(keys, body[start:end])
            # Keys stay in the body, however long: only values can be put back.
            if end - start >= CUT_BYTES and body[end + 1 : end + 64].lstrip()[:1] != b":":
                name = f"{mark}{len(spans)}"
                spans[name] = start, end
                parts += [body[last:start], name.encode()]
                last = end
        await asyncio.sleep(0)
    counted = await _count_far(counts, body, counted, len(body))
    counts.add(body, counted, len(body))
    parts.append(body[last:])
    short = b"".join(parts)
    return (short, spans) if spans and len(short) < SHORT_BYTES else None


def _backslashes(body: bytes, start: int, end: int) -> int:
    """Return the number of backslashes before `end`, without copying the text before them."""
    for begin in (max(start, end - FEW_BYTES), start):
        count = end - begin - len(body[begin:end].rstrip(b"\\"))
        if count < end - begin:
            break
    return count


def _add_key(keys: set[str], name: bytes) -> None:
    """Add a key of the outermost object. Raises RepeatedKey."""
    key = orjson.loads(b'"%b"' % name) if b"\\" in name else name.decode("latin-1")
    if key in ONCE:
        if key in keys:
            raise RepeatedKey(key)
        keys.add(key)


async def _count_far(counts: _Counts, body: bytes, start: int, end: int) -> int:
    """Count from `start` in whole steps, and return the place before `end` that was reached."""
    while end - start > COUNTED_AT_ONCE:
        counts.add(body, start, start + COUNTED_AT_ONCE)
        start += COUNTED_AT_ONCE
        await asyncio.sleep(0)
    return start


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans of strings without their quotes, and (0, 0) for work in between."""
    start = body.find(b'"') + 1
    while start:
        seen, end = start, body.find(b'"', start)
        while end >= 0 and _backslashes(body, seen, end) % 2:
            yield 0, 0
            match = _ESCAPED.match(body, end + 1, end + ESCAPED_BYTES)
            assert match is not None  # it may be empty
            seen = match.end()
            end = body.find(b'"', seen)
        if end < 0:
            return
        yield start, end
        start = body.find(b'"', end + 1) + 1


async def _put_together(
    body: bytes, short: bytes, spans: dict[str, tuple[int, int]], in_pieces: bool
) -> Any:
    """Parse a body without its long strings, and put each string back in place of its name."""
    whole = [_loaded(short)]  # in a list, because the whole body may be a single string
    nodes: list[Any] = [whole]
    at_once = passed = 0
    while nodes:
        node = nodes.pop()
        # Values are replaced while they are passed over, keys are not.
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            passed += 1
            if not passed % PUT_AT_ONCE:
                await asyncio.sleep(0)
            if not isinstance(value, str):
                if isinstance(value, dict | list):
                    nodes.append(value)
                continue
            if not (span := spans.get(value)):
                continue
            # A very long string is parsed in steps of its own, others until they add up.
            start, end = span
            if end - start >= LONG_BYTES:
                text = await _decoded(body, start, end)
                node[key] = text if in_pieces else str(text)
                continue
            node[key] = _piece(body, start, end, 1)[0]
            at_once += end - start
            if at_once >= LONG_BYTES:
                at_once = 0
                await asyncio.sleep(0)
    return whole[0]


async def _decoded(body: bytes, start: int, end: int) -> LongText:
    text = LongText()
    while start < end:
        stop = min(end, start + LONG_BYTES)
        piece, start = _piece(body, start, stop, 1 if stop == end else LONGEST_UNIT)
        text.pieces.append(piece.encode())
        await asyncio.sleep(0)
    return text


def _piece(body: bytes, start: int, stop: int, tries: int) -> tuple[str, int]:
    """Parse a piece that ends at `stop` or a little before, and return it with its end.

    A piece that can be parsed has not cut a character in two.
    """
    while True:
        try:
            return str(orjson.loads(b'"%b"' % body[start:stop])), stop
        except orjson.JSONDecodeError:
            tries -= 1
            stop -= 1
            if not tries:
                raise
