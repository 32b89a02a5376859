"""Check signed tokens: signature, times, audience and issuer. A claim names the tenant.

Checking a signature takes up to half a millisecond with each key. So a valid token is remembered
until it expires or the keys change, and a bad one for a while.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from itertools import islice
from typing import Any, Final

from forebay.proxy.config.tenants import NAME, JwtConfig
from forebay.proxy.identity.jwks import KeySet, jwt_module

LEEWAY_S: Final = 30.0  # between our clock and the provider's
MOST_KNOWN: Final = 4_096  # tokens, and as many bad ones
BAD_S: Final = 10.0  # a bad token is not looked at again: it may have come before its time
MOST_TRIED: Final = 4  # keys, for a token that names none
MOST_TOKEN: Final = 16_384  # characters
_TENANT = re.compile(NAME)


class JwtVerifier:
    """Returns the tenant of a token.

    Args:
        keys: the keys of the provider, which may change at any time.
        now: returns the time in seconds since 1970.
    """

    def __init__(
        self, config: JwtConfig, keys: KeySet, now: Callable[[], float] = time.time
    ) -> None:
        self._jwt = jwt_module()
        self._config = config
        self._keys = keys
        self._now = now
        # The tenant of each token, or None, and until when it is known.
        self._known = OrderedDict[bytes, tuple[str, float]]()
        self._bad = OrderedDict[bytes, tuple[None, float]]()
        self._of_keys = keys.changed

    def remembered(self, token: str) -> tuple[str | None] | None:
        """Return the tenant of a token that was checked before, or None if it must be checked.

        The tenant is in a tuple: it is None for a bad token.
        """
        if token.count(".") != 2 or len(token) > MOST_TOKEN:
            return (None,)
        if self._of_keys != self._keys.changed:
            self._known.clear()
            self._bad.clear()
            self._of_keys = self._keys.changed
        digest = _digest(token)
        entry = self._known.get(digest) or self._bad.get(digest)
        return entry[:1] if entry is not None and self._now() < entry[1] else None

    def tenant(self, token: str) -> str | None:
        """Return the tenant that a token names, or None for any other text."""
        if (remembered := self.remembered(token)) is not None:
            return remembered[0]
        digest = _digest(token)
        try:
            tenant, until = self._checked(token)
        # A stranger chooses the bytes of the text, and may nest its JSON deeply.
        except (self._jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            self._bad[digest] = None, self._now() + BAD_S
            if len(self._bad) > MOST_KNOWN:
                self._bad.popitem(last=False)
            return None
        self._known[digest] = tenant, until
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return tenant

    def _checked(self, token: str) -> tuple[str, float]:
        """Return the tenant of a sound token, and when it ends. Raises one of the errors above."""
        claims = self._claims(token)
        tenant = claims.get(self._config.tenant_claim)
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            raise ValueError("no tenant")
        return tenant, float(claims["exp"]) + LEEWAY_S

    def _claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a sound token. {}, or one of the errors above, for any other."""
        jwt, config = self._jwt, self._config
        header = jwt.get_unverified_header(f"{token.partition('.')[0]}..")  # not all of a long text
        key_id, algorithm = str(header.get("kid") or ""), header.get("alg")
        may = (k for k in self._keys.for_token(key_id) if algorithm in k.algorithms)
        for key in islice(may, MOST_TRIED):
            try:
                claims: dict[str, Any] = jwt.decode(
                    token, key.key, algorithms=list(key.algorithms), audience=config.audience,
                    issuer=config.issuer, leeway=LEEWAY_S, options={"require": ["exp", "aud"]},
                )  # fmt: skip
            except jwt.InvalidSignatureError:
                continue  # without a key id, another key may have signed it
            return claims
        return {}


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
