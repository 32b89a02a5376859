"""Chained hashes of the blocks of a prompt, by which the policy recognises equal prefixes."""

from xxhash import xxh3_64_intdigest

LARGE_BYTES = 1 << 20  # a body of this size is parsed in steps, so that other requests go on


def first_hash(salt: str | None) -> int:
    """Return the seed that the first block is chained to."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def chain(prompt: "bytes | BlockHashes", block_bytes: int, salt: str | None) -> tuple[int, ...]:
    """Return chained hashes of the full blocks, the first of them chained to the cache salt."""
    if isinstance(prompt, BlockHashes):
        return prompt.hashes()
    before, size, digest = first_hash(salt), block_bytes, xxh3_64_intdigest
    # A view is slower than copying a block within the CPU's cache, and faster beyond it.
    text = prompt if len(prompt) < LARGE_BYTES else memoryview(prompt)
    starts = range(0, len(prompt) - size + 1, size)
    return tuple([before := digest(text[start : start + size], before) for start in starts])


def identity(prompt: "bytes | BlockHashes", block_bytes: int, hashes: tuple[int, ...]) -> int:
    """Return a hash of the whole prompt, from the hashes of its full blocks and the rest."""
    rest = prompt.rest if isinstance(prompt, BlockHashes) else prompt[len(hashes) * block_bytes :]
    return xxh3_64_intdigest(rest, hashes[-1] if hashes else 0)


class BlockHashes:
    """The hashes of a large prompt, which is not kept, because a copy of 16 MB takes 10 ms.

    `len` is the number of all bytes so far.

    Attributes:
        rest: bytes after the last full block.
    """

    def __init__(self, block_bytes: int, salt: str | None) -> None:
        self._block_bytes = block_bytes
        self.rest = bytearray()
        self._hashes: list[int] = []
        self._before = first_hash(salt)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def write(self, data: bytes, /) -> None:
        """Add bytes."""
        size, rest = self._block_bytes, self.rest
        self._length += len(data)
        begin = size - len(rest) if rest else 0
        if begin > len(data):
            rest += data
            return
        text = memoryview(data)
        if begin:
            rest += text[:begin]
            self._add(rest)
        end = len(data) - (len(data) - begin) % size
        for start in range(begin, end, size):
            self._add(text[start : start + size])
        self.rest = bytearray(text[end:])

    def _add(self, block: bytes | bytearray | memoryview) -> None:
        self._before = xxh3_64_intdigest(block, self._before)
        self._hashes.append(self._before)

    def hashes(self) -> tuple[int, ...]:
        return tuple(self._hashes)
