"""Text that may be shown: what stands before the host of a URL may be a password."""

import re

STANDS_FOR = "***"
# To the last @ before a space or a quote: a password may hold an @ or a slash itself.
_USER_INFO = re.compile(r"(?<=//)[^\s'\"]*(?=@)")


def without_user_info(text: str) -> str:
    """`text` with the user and password of every URL in it masked."""
    return _USER_INFO.sub(STANDS_FOR, text)
