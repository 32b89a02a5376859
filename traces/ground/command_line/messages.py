"""Messages of a command: on standard error, and off with `--quiet`. Results in JSON: always.

Warnings and errors are not talk: they are always printed. Text from outside (names of models,
of files) is cleaned before it is printed or logged.
"""

import sys
from collections.abc import Iterable
from typing import Any, Final

from forebay.traces.ground.errors import escaped

SHOWN: Final = 10  # names of a list
NAME_LENGTH: Final = 128  # characters of a name in a list

_quiet = False


def printable(text: str) -> str:
    """Replace control and format characters, which could forge a line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """Clean each line of a text whose line breaks are ours."""
    return "\n".join(map(printable, text.split("\n")))


def all_printable(value: Any) -> Any:
    """Return a value of JSON with every text in it cleaned, also its keys."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): all_printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [all_printable(part) for part in value]
    return value


def shortlist(names: Iterable[str]) -> str:
    """Return the first names, cleaned, and the number of the others: `a, b and 4,000 more`."""
    all_names = list(names)
    shown = [printable(name[:NAME_LENGTH]) for name in all_names[:SHOWN]]
    more = f" and {len(all_names) - SHOWN:,} more" if len(all_names) > SHOWN else ""
    return ", ".join(shown) + more


def be_quiet(quiet: bool) -> None:
    """Stop all messages of this process from now on, or print them again."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    return _quiet


def print_json(value: Any) -> None:
    """Print the result of a command to standard output as indented JSON."""
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")
    sys.stdout.flush()


def talk(line: str) -> None:
    """Print a message to standard error, so that standard output can be a pipe of data."""
    if not _quiet:
        print("\n".join(map(escaped, line.split("\n"))), file=sys.stderr, flush=True)
