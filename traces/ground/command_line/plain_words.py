"""Replace pydantic's messages about wrong values by the words of a user."""

import re

_WORDS = (
    (r"Input should be a valid integer.*", "give a whole number"),
    (r"Input should be a valid number.*", "give a number"),
    (r"Input should be a valid boolean.*", "give true or false"),
    (r"Input should be a valid string", "give text"),
    (r"Input should be a valid (tuple|list)", "give a list"),
    (r"Input should be a valid dictionary.*", "give keys and values"),
    (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
    (r"Input should be less than (\S+)", r"give less than \1"),
    (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
    (r"Input should be greater than (\S+)", r"give more than \1"),
    (r"Input should be (.+)", r"give \1"),
)


def plain_words(message: str) -> str:
    """Return a message with each sentence of pydantic replaced by a plain one."""
    for pattern, words in _WORDS:
        message, count = re.subn(pattern, words, message)
        if count:
            break
    return message
