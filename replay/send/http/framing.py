"""Take HTTP/1.1 answers out of their framing, as far as streams of tokens need it. Pure.

This module reads answers in chunks, which are nearly all. llhttp (httptools) reads all others.
"""

from functools import lru_cache

MAX_LINE_BYTES = 64 << 10  # longest line with the size of a chunk, and longest trailer
KEPT = frozenset(
    {b"content-type", b"content-length", b"transfer-encoding", b"x-forebay-backend"}
    | {b"x-forebay-queue-ms", b"retry-after", b"retry-after-ms"}
)
_BETWEEN = -1  # the size of the next chunk has not arrived


class MalformedAnswer(Exception):
    """The bytes of an answer are not HTTP."""


def plain_head(data: bytes) -> tuple[int, dict[str, str]] | None:
    """Return the size of the head of a chunked answer with status 200, and its `KEPT` headers.

    None: another answer, an incomplete head, or a `connection` header other than keep-alive.
    """
    size = data.find(b"\r\n\r\n") + 4
    headers = _headers(data[:size]) if size > 3 else None
    return None if headers is None else (size, headers)


@lru_cache(maxsize=64)  # the heads of most answers are equal
def _headers(head: bytes) -> dict[str, str] | None:
    if head[:13] != b"HTTP/1.1 200 ":
        return None
    headers = {}
    for line in head[:-4].split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in KEPT:
            headers[name.decode("ascii")] = value.strip().decode("latin-1")
        elif name == b"connection" and value.strip().lower() != b"keep-alive":
            return None
    if headers.get("transfer-encoding") != "chunked" or "content-length" in headers:
        return None
    return headers


class ChunkedBody:
    """The body of a chunked answer.

    Attributes:
        ended: True if the last chunk has arrived.
        surplus: True if bytes have arrived after it.
    """

    def __init__(self) -> None:
        self.ended = self.surplus = False
        self._left = _BETWEEN  # bytes of this chunk that have not arrived
        self._held = b""  # the start of an incomplete line

    @property
    def between(self) -> bool:
        """True if the next byte is the first byte of a chunk."""
        return self._left == _BETWEEN and not self._held

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces of the body in `data` (MalformedAnswer: not chunks)."""
        if self._held:
            data = self._held + data
        pieces: list[bytes] = []
        at, left = 0, self._left
        while at < len(data):
            # Read the size of a chunk. Size 0 ends the body.
            if left == _BETWEEN:
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                left = _size(data[at:line])
                if not left:
                    end = data.find(b"\r\n\r\n", line)
                    if end >= 0:
                        self.ended, self.surplus = True, end + 4 < len(data)
                        return pieces
                    left = _BETWEEN
                    break
                at = line + 2
            # Take the bytes of the chunk that are here, then its line end.
            stop = at + left
            if left:
                pieces.append(data[at:stop])
            if stop + 2 > len(data):  # the chunk or its line end is incomplete
                left = max(0, stop - len(data))
                at = min(stop, len(data))
                break
            if data[stop : stop + 2] != b"\r\n":
                raise MalformedAnswer("a chunk is longer than its size")
            at, left = stop + 2, _BETWEEN
        self._left, self._held = left, data[at:]
        if len(self._held) > MAX_LINE_BYTES:
            raise MalformedAnswer("a line is too long")
        return pieces


def _size(line: bytes) -> int:
    """Read the size of a chunk from the line before it."""
    try:
        size = int(line.partition(b";")[0] if 59 in line else line, 16)  # a semicolon
    except ValueError:
        size = -1
    if size < 0:
        raise MalformedAnswer("a chunk has no size")
    return size
