"""The numbers of pooled prompts: they depend on the prompt alone, and mean nothing."""

import math
import struct
from random import Random

from xxhash import xxh3_64_intdigest

from forebay.replay.engine.tokenizer import Prompt


def vector_of(prompt: Prompt, size: int) -> list[float]:
    """Return a vector of length 1, as vLLM's embeddings are, in numbers of 32 bits."""
    digest = xxh3_64_intdigest(prompt.data)
    numbers = struct.unpack(f"<{size}i", Random(digest).randbytes(4 * size))
    length = math.sqrt(sum(number * number for number in numbers)) or 1.0
    return single([number / length for number in numbers])


def cosine(first: list[float], second: list[float]) -> float:
    """Return the similarity that vLLM gives two embeddings."""
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return single([product / math.hypot(*first) / math.hypot(*second)])[0]


def label_of(prompt: Prompt) -> float:
    """Return the score that a classifier gives a prompt, from 0 to 1."""
    return single([xxh3_64_intdigest(prompt.data) / 2**64])[0]


def single(numbers: list[float]) -> list[float]:
    """Round to 32 bits, as vLLM's numbers are."""
    return list(struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}f", *numbers)))
