"""The simulated tokenizer: four bytes of UTF-8 are one token, and a prompt is its bytes.

A token's id is its four bytes as a little-endian number. Text, token ids and generated output thus
have one form, and a conversation that is sent back hits the prefix cache. A short last token is
padded with NUL. Chat messages never share a token: each is an eight-byte role mark and its text,
padded to whole tokens. The prompt ends with the mark of the assistant's turn.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4
ROLE_MARKS = {
    "user": b"<|user|>",
    "assistant": b"<|asst|>",
    "system": b"<|syst|>",
    "developer": b"<|devl|>",
    "tool": b"<|tool|>",
    "function": b"<|func|>",
}

# 256 pronounceable words of exactly one token each: generated text needs no escaping in JSON and
# tokenises back into itself.
WORDS = tuple(
    f" {first}{vowel}{last}".encode()
    for first in "bcdfghjklmnprstv"
    for vowel in "aeio"
    for last in "mnrt"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        data: four bytes for each token.
        text: False if the client sent token ids, which need no tokenizer.
    """

    data: bytes
    text: bool = field(default=True, compare=False)

    @property
    def tokens(self) -> int:
        return len(self.data) // BYTES_PER_TOKEN

    def token_ids(self) -> list[int]:
        return list(struct.unpack(f"<{self.tokens}I", self.data))

    def block_hashes(self, block_size: int = 16, salt: str | None = None) -> list[int]:
        """Return chained hashes of the full blocks, different for each `salt`."""
        width = block_size * BYTES_PER_TOKEN
        return chained_hashes(self.data[: len(self.data) // width * width], width, salt_seed(salt))


def chained_hashes(data: bytes, width: int, before: int = 0) -> list[int]:
    """Return the hash of each piece of `width` bytes, chained to the hash of the piece before."""
    digest, hashes = xxh3_64_intdigest, list[int]()
    for start in range(0, len(data), width):
        before = digest(data[start : start + width], before)
        hashes.append(before)
    return hashes


def salt_seed(salt: str | None) -> int:
    """Return the number that the first block's hash is chained to."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def encode_text(text: str) -> Prompt:
    """Return the prompt with the text `text`."""
    return Prompt(_whole_tokens(text.encode("utf-8", "surrogatepass")))


def encode_ids(ids: Sequence[int]) -> Prompt:
    """Return the prompt of these token ids (ValueError: an id outside 0..2**32-1)."""
    try:
        return Prompt(struct.pack(f"<{len(ids)}I", *ids), text=False)
    except struct.error as error:
        raise ValueError(str(error)) from error


def encode_chat(messages: Iterable[tuple[str, str]]) -> Prompt:
    """Return the prompt of (role, text) messages. An unknown role counts as the user's."""
    parts = []
    for role, text in messages:
        parts.append(ROLE_MARKS.get(role, ROLE_MARKS["user"]))
        parts.append(_whole_tokens(text.encode("utf-8", "surrogatepass")))
    parts.append(ROLE_MARKS["assistant"])
    return Prompt(b"".join(parts))


def decode_ids(ids: Sequence[int]) -> str:
    """Return the text of these token ids. Bytes that are not UTF-8 become U+FFFD."""
    return encode_ids(ids).data.replace(b"\0", b"").decode("utf-8", "replace")


def _whole_tokens(data: bytes) -> bytes:
    short = -len(data) % BYTES_PER_TOKEN
    return data + bytes(short) if short else data


class Generation:
    """The words of the answer to a prompt: the same for the same prompt and seed."""

    __slots__ = ("_first", "_second", "_third", "digest")

    def __init__(self, prompt: Prompt, seed: int = 0) -> None:
        self.digest = digest = xxh3_64_intdigest(prompt.data, seed & 0xFFFFFFFFFFFFFFFF)
        self._first = digest & 255
        self._second = (digest >> 8) & 255 | 1  # odd: all words come before one is repeated
        self._third = (digest >> 16) & 255 | 1

    def word(self, index: int) -> bytes:
        """Return output token `index` as text, leading space included."""
        return WORDS[(self._first + index * self._second + (index >> 8) * self._third) & 255]

    def words(self, start: int, stop: int) -> bytes:
        word = self.word
        return b"".join([word(index) for index in range(start, stop)])

    def length(self, max_tokens: int, min_tokens: int = 0) -> int:
        """Return the output length if the model may stop: 24 to 1,086 tokens, log-uniform."""
        share = (self.digest >> 24 & 0xFFFF) / 0x10000
        return min(max_tokens, max(min_tokens, 1, int(24 * 2.0 ** (5.5 * share))))


class OutputBlocks:
    """Prompt and output of a request: `EngineRequest(extend=..., content=...)`.

    A call returns the hash of a block with generated tokens.
    """

    __slots__ = ("_block_size", "_generation", "_prompt", "_salt", "_tail", "cache_salt")

    def __init__(
        self, prompt: Prompt, generation: Generation, block_size: int = 16, salt: str | None = None
    ) -> None:
        self._generation = generation
        self._block_size = block_size
        self._prompt = prompt
        full = prompt.tokens // block_size * block_size
        self._tail = prompt.data[full * BYTES_PER_TOKEN :]
        self.cache_salt = salt
        self._salt = salt_seed(salt)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return tokens `start`..`stop`, counted from the start of the prompt."""
        prompt, prompt_tokens = self._prompt, self._prompt.tokens
        data = prompt.data[start * BYTES_PER_TOKEN : stop * BYTES_PER_TOKEN]
        if stop > prompt_tokens:
            data += self._generation.words(max(start - prompt_tokens, 0), stop - prompt_tokens)
        return Prompt(data).token_ids()

    def __call__(self, before: int, index: int) -> int:
        start = index * self._block_size - self._prompt.tokens
        words = self._generation.words(max(start, 0), start + self._block_size)
        data = self._tail + words if start < 0 else words
        return xxh3_64_intdigest(data, before if index else self._salt)


def hashes_of_ids(
    ids: Sequence[int], block_tokens: int, prompt_tokens: int, block_size: int = 16
) -> list[int]:
    """Return engine block hashes of a trace's prompt from its block ids, without text.

    Equal leading ids give equal leading hashes. They never match the hashes of the same prompt sent
    as text, so a run must use one form. An engine block that begins and ends inside trace blocks is
    equal if all of these are. So two prompts may share a little more than their hashes say.
    """
    digest, per_id, before = xxh3_64_intdigest, block_tokens // block_size, 0
    hashes: list[int] = []
    full = prompt_tokens // block_size
    if block_tokens % block_size:
        for index in range(full):
            first, end = index * block_size // block_tokens, (index + 1) * block_size
            parts = ids[first : -(-end // block_tokens)]
            if end > len(ids) * block_tokens:
                break
            data = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
            before = digest(data, before)
            hashes.append(before)
        return hashes
    for block_id in ids:
        data = block_id.to_bytes(16, "little", signed=True)
        for _ in range(min(per_id, full - len(hashes))):
            before = digest(data, before)
            hashes.append(before)
    return hashes
