"""Tell at a glance which pieces of a chunked event stream can go on as they stand.

Nearly all that comes is whole chunks of whole events that mean nothing for the request, alike but
for one short text: `"content":" the"`. What cannot be told from the bytes alone, framing written in
an unusual way too, is left to the parser and the scanner.
"""

import re

from forebay.proxy.http1.sse import EventScanner, means_nothing

CHUNK_BYTES = 4096  # of a chunk with its framing; longer ones are the parser's
# Of at most 64 bytes, which bounds what is remembered.
_TEXT = re.compile(rb'"(?:content|reasoning|reasoning_content|text)":"([^"\n]{0,64})"')


def _chunk_heads() -> tuple[bytes, ...]:
    """What a chunk of so many bytes in all begins with: its size, as nearly every server writes it.

    Where there is none, something that no such chunk can begin with.
    """
    heads = [b"-" * CHUNK_BYTES] * CHUNK_BYTES
    for size in range(1, CHUNK_BYTES):
        head = b"%x\r\n" % size
        if (whole := len(head) + size + 2) < CHUNK_BYTES:
            heads[whole] = head
    return tuple(heads)


CHUNK_HEADS = _chunk_heads()


class TokenChunks:
    """Looks at what begins where a chunk begins; `scanner` is shown all that is not plain."""

    def __init__(self, scanner: EventScanner) -> None:
        self._held = scanner.held
        # Of the last event that was looked through: what stands before and behind its text.
        self._around = (b"", b"")
        self._after = b""
        self._begin: dict[int, bytes] = {}  # with the framing, by the length of the chunk

    def plain(self, piece: bytes) -> bool:
        """It is whole chunks of whole `data` events, none of which means anything."""
        size = len(piece)
        begin = self._begin.get(size)
        if begin is not None and not self._held:
            # Slices cost less than startswith and endswith, which parse arguments.
            at, after = len(begin), self._after
            if (
                piece[:at] == begin
                and piece[-len(after) :] == after
                and piece.find(b'"', at) == size - len(after)  # the text ends where it did
                and piece.find(b"\n", at) == size - 4  # and the event nowhere before
            ):
                return True
        return self._looked_through(piece)

    def _looked_through(self, piece: bytes) -> bool:
        start, find = 0, piece.find
        while start < len(piece):
            end = find(b"\n\n\r\n", start) + 4
            if not 4 <= end - start < CHUNK_BYTES:
                return False
            if not piece.startswith(CHUNK_HEADS[end - start] + b"data: ", start):
                return False
            start = end
        if self._held or not means_nothing(piece):
            return False
        if find(b"\n\n\r\n") + 4 == len(piece):
            self._remember(piece)
        return True

    def _remember(self, chunk: bytes) -> None:
        start, text = len(CHUNK_HEADS[len(chunk)]), _TEXT.search(chunk)
        if text is None or chunk[start : start + 7] != b"data: {":  # [DONE] is none
            return
        around = chunk[start : text.start(1)], chunk[text.end(1) :]
        if around != self._around:
            self._around, self._after = around, around[1]
            self._begin.clear()
        self._begin[len(chunk)] = chunk[: text.start(1)]
