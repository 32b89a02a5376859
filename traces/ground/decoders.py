"""Decompress gzip under the interface that the decoders of other formats have."""

import sys
import zlib
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZstdError = zstd.ZstdError


class Decoder(Protocol):
    """The interface of the decompressors for bzip2, xz and zstd, which keep unread bytes."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class GzipMember:
    """Decompresses one member of a gzip file."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return the next bytes, at most `max_length`. Raises zlib.error."""
        piece = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self.needs_input = not self._stream.unconsumed_tail and len(piece) < max_length
        return piece


def zstd_decoder(window_log: int) -> Decoder:
    """Decompress a frame of zstd whose window has at most 2 ** `window_log` bytes."""
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
