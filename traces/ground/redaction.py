"""Mask the user and password of URLs in text that is shown."""

import re

STANDS_FOR = "***"
# Up to the last @ before a space or a quote: a password may contain @ and slashes.
_USER_INFO = re.compile(r"(?<=//)[^\s'\"]*(?=@)")


def without_user_info(text: str) -> str:
    """Return `text` with the user and password of every URL masked."""
    return _USER_INFO.sub(STANDS_FOR, text)
