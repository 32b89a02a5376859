"""Choose the reader for a trace: by the name of its format, or by the file's first bytes."""

import sys
from collections.abc import Callable
from pathlib import Path

from forebay.traces.azure import read_azure
from forebay.traces.errors import InputError
from forebay.traces.jsonl import read_trace
from forebay.traces.mooncake import read_mooncake
from forebay.traces.reader import TraceReader

Importer = Callable[..., TraceReader]
"""Called as `importer(path, skip_bad=...)`."""

IMPORTERS: dict[str, Importer] = {"azure": read_azure, "mooncake": read_mooncake}
FOREBAY = "forebay"


def importer(name: str) -> Importer:
    """Return the importer called `name`; InputError lists the names."""
    if name not in IMPORTERS:
        raise InputError(f"no trace format {name!r}; one of: {', '.join(IMPORTERS)}")
    return IMPORTERS[name]


def detect(path: str | Path) -> str:
    """Detect the format of `path` by its first bytes; nothing of standard input (`-`) is consumed.

    An unknown format counts as Forebay's own, whose reader reports the error.
    """
    if str(path) == "-":
        # peek() is a BufferedReader's; a replaced standard input may lack it.
        peek = getattr(sys.stdin.buffer, "peek", None)
        head = peek(256)[:256] if peek else b""
    elif Path(path).is_file():  # reading here would take bytes from a pipe
        try:
            with open(path, "rb") as file:
                head = file.read(256)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    else:
        head = b""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"TIMESTAMP,"):
        return "azure"
    if head.startswith(b"{") and b'"id"' not in head[:8] and b'"timestamp"' in head:
        return "mooncake"
    return FOREBAY


def open_trace(
    path: str | Path, *, format_name: str | None = None, skip_bad: bool = False
) -> TraceReader:
    """Open a trace in the named format, or in the one that `detect` finds."""
    name = format_name or detect(path)
    if name == FOREBAY:
        return read_trace(path, skip_bad=skip_bad)
    return importer(name)(path, skip_bad=skip_bad)
