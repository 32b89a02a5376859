"""Define the one exception for bad input, and what makes its text safe to print."""


class InputError(Exception):
    """Input that cannot be used.

    The message names the file, line or option, and the fix. Commands print it as one line and exit
    with status 2. Its text has no control characters, whatever a file or its name holds.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


def escaped(text: str) -> str:
    """Escape what a terminal would act on or cannot show, such as ESC and half a surrogate pair."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )
