"""Messages beside the result of a command: standard error, and nothing after `--quiet`.

Warnings and errors are not talk: they are always printed.
"""

import sys

from forebay.traces.errors import printable

_quiet = False


def be_quiet(quiet: bool) -> None:
    """Leave out all talk of this process from now on, or print it again."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    return _quiet


def talk(line: str) -> None:
    """Print a message to standard error, so that standard output can be a pipe of data."""
    if not _quiet:
        safe = "\n".join(map(printable, line.split("\n")))
        print(safe, file=sys.stderr, flush=True)
