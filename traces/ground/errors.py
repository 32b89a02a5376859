"""Define the only exception for bad input, and make its text safe to print."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """Input that cannot be used.

    The message names the file, line or option, and the fix. Commands print it as one line and exit
    with status 2. Its text has no control characters, even if a file or its name has some.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Raise InputError that names the file, if the system cannot read it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error})") from error


def escaped(text: str) -> str:
    """Escape characters that a terminal obeys or cannot show, such as ESC or a lone surrogate."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
