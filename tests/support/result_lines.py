"""Files of results, one JSON object a line, packed where the name ends with .gz, and tables."""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path


def read_lines(path: Path) -> list[bytes]:
    """Return the lines, or an empty list without a file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def append_line(path: Path, line: bytes) -> None:
    """Add a line in one write, so that a killed process leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_packed(path, line + b"\n"))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table as Markdown."""
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _packed(path: Path, data: bytes) -> bytes:
    return gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
