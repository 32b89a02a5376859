"""How far two texts, or two lists of blocks, are equal from the start."""

from collections.abc import Sequence


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
