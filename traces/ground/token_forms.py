"""Recognise a chunk with one token by its bytes: most tokens of a stream differ only in their text.

So the bytes around the text are learned from one parsed token. A chunk with the same bytes around a
text that is not empty and has no quote also has one token.
"""

import re

MOST_TEXT_BYTES = 64  # longest text to recognise by its bytes
MOST_LENGTHS = 256  # remembered forms, and lengths that no form has
_TEXT = re.compile(rb'"(?:content|reasoning|reasoning_content|text)":"([^"\n]*)"')


class TokenForms(dict[int, tuple[slice, bytes, slice, bytes, slice]]):
    """{length of a chunk: place and bytes of its two fixed parts, and the place of its text}.

    The first part has the line with the size of the chunk, which its length decides.
    """

    __slots__ = ("_end", "_start")

    def __init__(self, start: bytes, end: bytes) -> None:
        super().__init__()
        self._start, self._end = start, end

    def same(self, other: "TokenForms") -> bool:
        """True if the bytes around the text are equal."""
        return (self._start, self._end) == (other._start, other._end)

    def fit(self, event: bytes) -> bool:
        """True if an event, without the framing of its chunk, has one token."""
        start, end = self._start, self._end
        text = event[len(start) : -len(end)]
        return (
            bool(text)
            and 34 not in text
            and event[: len(start)] == start
            and event[-len(end) :] == end
        )

    def __missing__(self, length: int) -> tuple[slice, bytes, slice, bytes, slice]:
        form = self._form(length)
        if len(self) < MOST_LENGTHS:
            self[length] = form
        return form

    def _form(self, length: int) -> tuple[slice, bytes, slice, bytes, slice]:
        end = self._end + b"\r\n"
        most = (length.bit_length() + 3) // 4
        for digits in (most, most - 1):
            size = length - digits - 4  # each of the two lines ends in two bytes
            text_bytes = size - len(self._start) - len(self._end)
            if 0 < text_bytes <= MOST_TEXT_BYTES and len(b"%x" % size) == digits:
                start = b"%x\r\n%b" % (size, self._start)
                first, last = slice(len(start)), slice(-len(end), None)
                return first, start, last, end, slice(len(start), -len(end))
        return _NONE


_NONE = (slice(1), b"no chunk", slice(1), b"", slice(1))


def token_forms(event: bytes) -> TokenForms | None:
    """Make the forms of an event with one token.

    Returns None if bytes cannot delimit its text, or if there are several events.
    """
    match = _TEXT.search(event)
    if match is None or match[1].endswith(b"\\") or b"\n\n" in event.rstrip(b"\n"):
        return None
    return TokenForms(event[: match.start(1)], event[match.end(1) :])
