"""Undo the compression of a request's body: today's agents compress their requests.

The servers get the body plain, as vLLM reads no other.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Final

from multidict import CIMultiDictProxy

from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.traces.ground.decoders import Decoder, GzipMember, ZstdError, zstd_decoder

PIECE_BYTES: Final = 64 << 10  # decompressed in one step, a fraction of a millisecond
READ_BYTES: Final = 16 << 10  # read in one step: blocks without content take as long as others
MOST_SILENT: Final = 1 << 20  # bytes of a body that may be read without any output
MOST_MEMBERS: Final = 1_000  # files of gzip, or frames of zstd, one after another in a body
WINDOW_LOG: Final = 23  # window of zstd: 8 MiB, the most that a sender may ask for (RFC 9659)


class _Brotli:
    """Decompresses brotli. The library is an extra, imported when it is needed."""

    unused_data = b""  # bytes after the end are a fault

    def __init__(self) -> None:
        self._stream = import_module("brotli").Decompressor()
        self._more = False  # more output is left of bytes that were read

    @property
    def eof(self) -> bool:
        return bool(self._stream.is_finished())

    @property
    def needs_input(self) -> bool:
        return not self._more and bool(self._stream.can_accept_more_data())

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return the next bytes, about `max_length` of them at most. Raises EOFError."""
        try:
            piece = bytes(self._stream.process(data, output_buffer_limit=max_length))
        except import_module("brotli").error as error:
            raise EOFError from error
        self._more = len(piece) >= max_length
        return piece


_DECODERS: Final[dict[str, Callable[[], Decoder]]] = {
    "gzip": GzipMember,
    "x-gzip": GzipMember,
    "zstd": partial(zstd_decoder, WINDOW_LOG),
    "br": _Brotli,
}


def coding_of(headers: CIMultiDictProxy[str]) -> str:
    """Return the compression of a request's body, or "". Raises ApiError 415."""
    if "content-encoding" not in headers:
        return ""
    codings = {coding.strip().lower() for coding in headers.getall("content-encoding")}
    codings.discard("identity")
    if not codings:
        return ""
    coding = codings.pop()
    taken = ["gzip", "zstd", *(["br"] if has_brotli() else [])]
    if codings or coding not in (*taken, "x-gzip"):
        names = f"{', '.join(taken[:-1])} or {taken[-1]}"
        raise ApiError(
            415, "unsupported_encoding", f"Send the body uncompressed, or in {names}.",
            param="content-encoding", headers={"Accept-Encoding": ", ".join(taken)}, close=True,
        )  # fmt: skip
    return coding


def has_brotli() -> bool:
    """True if the library of the extra `brotli` is installed."""
    return find_spec("brotli") is not None


async def decompressed(body: bytes, coding: str, limit: int, memory: RequestMemory) -> bytes:
    """Return a body without its compression.

    Raises ApiError 400 for a body that is cut or wrong, or has no content for MOST_SILENT bytes,
    413 for a body that becomes larger than `limit` bytes, and the error of a full budget. No more
    than `limit` bytes are decompressed.

    Args:
        coding: as `coding_of` returns it.
        memory: holds the compressed body, and gets the decompressed body.
    """
    whole, size, silent = BytesIO(), 0, 0
    try:
        for read, piece in _pieces(body, _DECODERS[coding]):
            size += len(piece)
            silent = 0 if piece else silent + read
            if silent > MOST_SILENT:
                raise EOFError
            if size > limit:
                message = f"The body is larger than {limit} bytes when decompressed."
                raise ApiError(413, "request_too_large", message)
            memory.reach(len(body) + size)
            whole.write(piece)
            if read >= READ_BYTES or len(piece) >= PIECE_BYTES:
                await asyncio.sleep(0)
    except (zlib.error, ZstdError, EOFError):
        message = f"The body is not valid {coding}, which its content-encoding says."
        raise ApiError(400, "invalid_encoding", message, param="content-encoding") from None
    memory.shrink(size)
    return whole.getvalue()


def _pieces(body: bytes, new_decoder: Callable[[], Decoder]) -> Iterator[tuple[int, bytes]]:
    """Yield the content of a body in pieces, each after the number of bytes that were read for it.

    A step reads at most READ_BYTES, and yields about PIECE_BYTES at most.

    Raises zlib.error, ZstdError, and EOFError for a body that ends too early or has too many
    members.
    """
    decoder, members = new_decoder(), 1
    for start in range(0, len(body), READ_BYTES):
        data, more = body[start : start + READ_BYTES], True
        while more:
            if decoder.eof:
                decoder, members = new_decoder(), members + 1
                if members > MOST_MEMBERS:
                    raise EOFError
            yield len(data), decoder.decompress(data, PIECE_BYTES)
            data = decoder.unused_data if decoder.eof else b""
            more = bool(data) if decoder.eof else not decoder.needs_input
    if body and not decoder.eof:
        raise EOFError
