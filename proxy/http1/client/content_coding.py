"""Undo the compression of a response: proxies in front of a backend compress without being asked.

A compressed body could not be checked, searched for usage, or cut into events.
"""

import zlib
from collections.abc import Iterator

CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_EITHER_FORMAT = 32 + zlib.MAX_WBITS  # zlib tells gzip and deflate apart by their first bytes
_PIECE_BYTES = 64 << 10
MOST_PIECES = 256  # most output pieces of one received piece: 16 MiB in all


class ContentDecoder:
    """Decompresses a body as it comes."""

    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_EITHER_FORMAT)

    @property
    def ended(self) -> bool:
        """The compressed body is whole, and nothing follows it."""
        return self._stream.eof and not self._stream.unused_data

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes that `data` adds to the body. Raises zlib.error."""
        for _ in range(MOST_PIECES):
            if not data:
                return
            if piece := self._stream.decompress(data, _PIECE_BYTES):
                yield piece
            data = self._stream.unconsumed_tail
        raise zlib.error("too much in too few bytes")
