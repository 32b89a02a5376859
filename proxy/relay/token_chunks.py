"""Recognise chunks of an event stream that can be sent on as they are, without parsing them.

Nearly everything that comes is whole chunks of whole events that differ in one short text only:
`"content":" the"`. Anything else, such as unusual framing, is left to the parser and the scanner.
"""

from forebay.proxy.api.dialects.continuation import MOST_TEXT_BYTES, SentText
from forebay.traces.ground.sse import EventScanner, output_only
from forebay.traces.ground.token_forms import TokenForms, token_forms

CHUNK_BYTES = 4096  # bound of a chunk with its framing; longer ones go to the parser


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

    `scanner` gets everything that is not recognised. `sent` gets the text of the rest.

    Attributes:
        more_events: events recognised beyond one in each call of `plain`.
    """

    def __init__(self, scanner: EventScanner, sent: SentText | None = None) -> None:
        self.more_events = 0
        self._scanner = scanner
        self._partial = scanner.partial
        self._sent = sent
        self._text = None if sent is None else sent.text
        self._forms: TokenForms | None = None  # forms of the last searched event

    def plain(self, piece: bytes) -> bool:
        """True if `piece` is whole chunks of whole `data` events that carry output only."""
        if self._forms is not None and not self._partial:
            first, start, last, end, text = self._forms[len(piece)]
            if piece[first] == start and piece[last] == end:
                words = piece[text]
                if 34 not in words and 10 not in words:  # neither a quote nor a line end
                    if (all_words := self._text) is not None:
                        all_words += words
                        if len(all_words) > MOST_TEXT_BYTES:
                            self._keep(b"")
                    return True
            if self._several(piece, self._forms):
                return True
        return self._searched(piece)

    def _several(self, piece: bytes, forms: TokenForms) -> bool:
        """True if `piece` is several chunks with one token each, as a busy loop reads them."""
        texts, at = [], 0
        while at < len(piece):
            behind = piece.find(b"\n\n\r\n", at) + 4
            if behind < at:
                return False
            chunk = piece[at:behind]
            first, start, last, end, text = forms[behind - at]
            words = chunk[text]
            if chunk[first] != start or chunk[last] != end or 34 in words or 10 in words:
                return False
            texts.append(words)
            at = behind
        self.more_events += len(texts) - 1
        if self._text is not None:
            self._text += b"".join(texts)
            self._keep(b"")
        return True

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
        if self._text is not None:
            self._keep(piece)
        self._remember(piece[last:])
        return True

    def _keep(self, chunks: bytes) -> None:
        """Keep the text of whole chunks, as long as another backend could go on with it."""
        assert self._sent is not None
        for events in chunks.split(b"\r\n")[1::2]:
            for payload in self._scanner.feed(events):
                self._sent.add(payload)
        if not self._sent.bound():
            self._text = None

    def _remember(self, chunk: bytes) -> None:
        event = chunk[len(CHUNK_HEADS[len(chunk)]) : -2]
        forms = token_forms(event) if event.startswith(b"data: {") else None  # not [DONE]
        if forms is not None and not (self._forms is not None and self._forms.same(forms)):
            self._forms = forms
