"""Define the one exception for bad input."""


class InputError(Exception):
    """Input that cannot be used.

    The message names the file, line or option, and the fix. Commands print it as one line and exit
    with status 2.
    """
