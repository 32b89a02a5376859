"""Give each tenant ids of responses that no other tenant can use, without remembering them.

vLLM takes the id of a response from `request_id` in the body of the request. A client that knew an
id of another tenant could continue that conversation, or replace it by sending the same id.
"""

import re
from hmac import compare_digest
from hmac import digest as hmac_digest
from secrets import token_hex
from typing import Final

FIELD: Final = "request_id"
_OURS = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{24})")


class ResponseIds:
    """Makes ids that are signed for a tenant, and checks them.

    Args:
        secret: key that all proxies in front of the same backends share.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, tenant: str) -> str:
        """Return the id of a new response."""
        number = token_hex(12)
        return f"resp_{number}{self._mark(tenant, number)}"

    def owns(self, tenant: str, id_: str) -> bool:
        """True if an id was made for this tenant. Without keys no client owns an id."""
        match = _OURS.fullmatch(id_)
        if not tenant or match is None:
            return False
        return compare_digest(match[2], self._mark(tenant, match[1]))

    def _mark(self, tenant: str, number: str) -> str:
        message = f"response\0{tenant}\0{number}".encode()
        return hmac_digest(self._secret, message, "sha256").hex()[:24]
