"""Give responses ids that name their tenant and their server, so that nothing is remembered.

vLLM takes the id of a response from `request_id` in the body of the request. A client that knew an
id of another tenant could continue that conversation, or replace it by sending the same id.
"""

import re
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from secrets import token_hex
from typing import Final

FIELD: Final = "request_id"
_OURS = re.compile(r"resp_([0-9a-f]{16}([0-9a-f]{8}))([0-9a-f]{24})")


class ResponseIds:
    """Makes ids that are signed for a tenant, and checks them.

    Args:
        secret: key that all proxies in front of the same backends share.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, tenant: str, backend: str) -> str:
        """Return the id of a new response of this backend."""
        number = token_hex(8) + _short(backend)
        return f"resp_{number}{self._mark(tenant, number)}"

    def owns(self, tenant: str, id_: str) -> bool:
        """True if an id was made for this tenant."""
        match = _OURS.fullmatch(id_)
        return match is not None and compare_digest(match[3], self._mark(tenant, match[1]))

    def home(self, tenant: str, id_: str, backends: Iterable[str]) -> str:
        """Return the backend that an id of this tenant names, or ""."""
        match = _OURS.fullmatch(id_)
        if match is None or not self.owns(tenant, id_):
            return ""
        return next((name for name in backends if _short(name) == match[2]), "")

    def _mark(self, tenant: str, number: str) -> str:
        message = f"response\0{tenant}\0{number}".encode()
        # Without keys all clients are one: the id must last longer than a random secret.
        return hmac_digest(self._secret if tenant else b"", message, "sha256").hex()[:24]


def _short(backend: str) -> str:
    return sha256(backend.encode()).hexdigest()[:8]
