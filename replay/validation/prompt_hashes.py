"""Make the engine's block hashes of a trace's prompts, so that equal prefixes hit its cache.

A prompt of block ids has exact hashes. A prompt of text or messages is cut into pieces of as many
bytes as a block has on average in this trace, because its real tokens are not known here.
"""

from collections.abc import Iterable

from forebay.replay.engine.tokenizer import chained_hashes, hashes_of_ids
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import shared_text


class PromptHashes:
    """Hashes for blocks of `block_size` tokens, of the prompts of one trace."""

    def __init__(self, rows: Iterable[TraceRequest], block_size: int) -> None:
        self._block_size = block_size
        texts = [(text, row.input_tokens) for row in rows if (text := _text_of(row)) is not None]
        tokens = sum(count for _, count in texts)
        length = sum(len(text.encode()) for text, _ in texts)
        self._bytes_per_block = max(1, round(block_size * length / tokens)) if tokens else 1

    def of(self, row: TraceRequest) -> list[int] | None:
        """Return the hashes of the row's full blocks, or None if only its length is known."""
        if row.blocks:
            return hashes_of_ids(row.blocks, row.block_tokens, row.input_tokens, self._block_size)
        text = _text_of(row)
        if text is None:
            return None
        data, width = text.encode(), self._bytes_per_block
        blocks = min(len(data) // width, row.input_tokens // self._block_size)
        return chained_hashes(data[: blocks * width], width)


def _text_of(row: TraceRequest) -> str | None:
    return None if row.blocks else shared_text(row)
