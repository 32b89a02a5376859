"""Recognise chunks of an event stream that can be sent on as they are, without parsing them.

Nearly everything that comes is whole chunks of whole events that differ in one short text only:
`"content":" the"`. Anything else, such as unusual framing, is left to the parser and the scanner.
"""

import re

from forebay.proxy.http1.sse import EventScanner, output_only

CHUNK_BYTES = 4096  # bound of a chunk with its framing; longer ones go to the parser
# At most 64 bytes, which bounds the memory of `TokenChunks._begin`.
_TEXT = re.compile(rb'"(?:content|reasoning|reasoning_content|text)":"([^"\n]{0,64})"')


def _chunk_heads() -> tuple[bytes, ...]:
    """Return the head (size line) of a chunk by the length of the whole chunk.

    Sizes are written as nearly every server writes them. A length that no chunk can have gets a
    text that no chunk begins with.
    """
    heads = [b"-" * CHUNK_BYTES] * CHUNK_BYTES
    for size in range(1, CHUNK_BYTES):
        head = b"%x\r\n" % size
        if (whole := len(head) + size + 2) < CHUNK_BYTES:
            heads[whole] = head
    return tuple(heads)


CHUNK_HEADS = _chunk_heads()


class TokenChunks:
    """Recognises chunks by comparing them with the last parsed chunk.

    `scanner` gets everything that is not recognised.

    Attributes:
        more_events: events recognised beyond one in each call of `plain`.
    """

    def __init__(self, scanner: EventScanner) -> None:
        self.more_events = 0
        self._partial = scanner.partial
        # Before and after the text of the last event that was searched.
        self._around = (b"", b"")
        self._after = b""
        # By chunk length: the bytes before the text, their number, and where the text ends.
        self._begin: dict[int, tuple[bytes, int, int]] = {}

    def plain(self, piece: bytes) -> bool:
        """True if `piece` is whole chunks of whole `data` events that carry output only."""
        size = len(piece)
        last = self._begin.get(size)
        if last is not None and not self._partial:
            begin, at, end = last
            # Slices cost less than startswith and endswith, which parse arguments.
            if (
                piece[:at] == begin
                and piece[end:] == self._after
                and piece.find(b'"', at) == end  # the text ends at the same place
                and piece.find(b"\n", at) == size - 4  # and no event ends before
            ):
                return True
        return self._searched(piece)

    def _searched(self, piece: bytes) -> bool:
        start = last = 0
        size, find = len(piece), piece.find
        while start < size:
            end = find(b"\n\n\r\n", start) + 4
            if not 4 <= end - start < CHUNK_BYTES:
                return False
            if not piece.startswith(CHUNK_HEADS[end - start] + b"data: ", start):
                return False
            last, start = start, end
        if self._partial or not output_only(piece):
            return False
        self.more_events += piece.count(b"\n\n") - 1
        if not last:  # one chunk
            self._remember(piece)
        return True

    def _remember(self, chunk: bytes) -> None:
        start, text = len(CHUNK_HEADS[len(chunk)]), _TEXT.search(chunk)
        if text is None or chunk[start : start + 7] != b"data: {":  # not [DONE]
            return
        around = chunk[start : text.start(1)], chunk[text.end(1) :]
        if around != self._around:
            self._around, self._after = around, around[1]
            self._begin.clear()
        at, end = text.span(1)
        self._begin[len(chunk)] = chunk[:at], at, end
