"""The one exception for bad input: its text is the line the user reads; the exit status is 2."""


class InputError(Exception):
    """Input that cannot be used; the message names the file, line or option and the fix."""
