"""Code blocks of a page: find them, put free ports into them, compare their output."""

import re
from collections.abc import Sequence

from ports import free_ports

SHOWN_PORTS = ("8001", "8002", "8080", "9090")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every code block, in their order."""
    return [(language, content) for language, content in _BLOCK.findall(text)]


def block(text: str, holds: str) -> str:
    """The code block with a given text."""
    (match,) = [content for _, content in blocks(text) if holds in content]
    return match


def masked(line: str) -> str:
    """A line without its numbers and its widths.

    Where a percentile has too few samples, the highest allowed percentile stands in its
    place, as `p50 9`.
    """
    return " ".join(
        re.sub(r"\bp\d[\d.]* (?=\d)|\d[\d,.]*|–|\bno?ne\b|\b(?:ms|s)\b", "", line).split()
    )


class Ports:
    """The ports that the pages name, and others in their places: free ports by default."""

    def __init__(self, ports: Sequence[str] = ()) -> None:
        self.free = ports or [str(port) for port in free_ports(len(SHOWN_PORTS))]

    def __call__(self, text: str) -> str:
        free = dict(zip(SHOWN_PORTS, self.free, strict=True))
        # In one pass: a free port may have a shown one in it, as 18002 has 8002.
        return re.sub(rf"\b(?:{'|'.join(SHOWN_PORTS)})\b", lambda match: free[match[0]], text)
