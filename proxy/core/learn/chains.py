"""Binary searches in chained hashes: where one block is there, or equal, all before it are."""

from collections.abc import Sequence
from typing import TypeVar

V = TypeVar("V")


def leading_run(held: dict[int, V], chain: Sequence[int]) -> int:
    """How many leading links of `chain` are in `held`, which has no gaps."""
    if not chain or chain[0] not in held:
        return 0
    first, beyond = 1, len(chain)
    while first < beyond:
        middle = (first + beyond) // 2
        if chain[middle] in held:
            first = middle + 1
        else:
            beyond = middle
    return first


def common_run(chain: Sequence[int], other: Sequence[int], known: int = 0) -> int:
    """The length of their common beginning, which is at least `known`."""
    first, beyond = known, min(len(chain), len(other))
    while first < beyond:
        middle = (first + beyond) // 2
        if chain[middle] == other[middle]:
            first = middle + 1
        else:
            beyond = middle
    return first
