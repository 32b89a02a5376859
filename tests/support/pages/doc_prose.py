"""The sentences of a Markdown page, without code, tables, headings and links."""

import re
from collections.abc import Iterator
from statistics import median

_FENCED = re.compile(r"^ {0,8}```.*?^ {0,8}```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SKIPPED = re.compile(r"^\s*(\||#|!!!|\?\?\?|<|={3,}|-{3,}|\[\w|\^)")
_ITEM = re.compile(r"^\s*([-*+]|\d+\.)\s+|^\s*>\s*")


def without_code(text: str) -> str:
    """Return a page with its tables, but without code blocks and comments."""
    return _COMMENT.sub("", _FENCED.sub("\n\n", text))


def prose(text: str) -> str:
    """Return the text that a reader reads as sentences, a line for each paragraph or item."""
    return "\n".join(_paragraphs(without_code(text)))


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = bool(_ITEM.match(line))
        if not line.strip() or starts or _SKIPPED.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not _SKIPPED.match(line):
            lines.append(_plain(_ITEM.sub("", line)))


def _plain(line: str) -> str:
    line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", line.strip())
    return re.sub(r"`[^`]*`", "CODE", line).replace("**", "").replace("*", "")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page."""
    texts = []
    for paragraph in prose(text).splitlines():
        parts = re.split(r"(?<=[.!?:])\s+(?=[\"'(A-Z0-9])", paragraph)
        texts += [part for part in parts if len(part.split()) > 1]
    return texts


def median_words(text: str) -> float:
    """Return the median number of words in a sentence, 0 for a page without sentences."""
    return median([len(sentence.split()) for sentence in sentences(text)] or [0])
