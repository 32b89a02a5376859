"""Check signed tokens: signature, times, audience and issuer. A claim names the tenant.

Checking a signature takes up to a tenth of a millisecond, so a valid token is remembered until it
expires or the keys change.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from forebay.proxy.config.tenants import NAME, JwtConfig
from forebay.proxy.identity.jwks import KeySet, jwt_module

LEEWAY_S: Final = 30.0  # between our clock and the provider's
MOST_KNOWN: Final = 4_096  # tokens
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
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._of_keys = keys.changed

    def tenant(self, token: str) -> str | None:
        """Return the tenant that a token names, or None for a foreign or expired token."""
        if token.count(".") != 2 or len(token) > MOST_TOKEN:
            return None
        if self._of_keys != self._keys.changed:
            self._known.clear()
            self._of_keys = self._keys.changed
        digest, now = sha256(token.encode()).digest(), self._now()
        remembered = self._known.get(digest)
        if remembered is not None and now < remembered[1]:
            return remembered[0]
        claims = self._claims(token)
        tenant = claims.get(self._config.tenant_claim) if claims else None
        if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
            return None
        self._known[digest] = tenant, float(claims["exp"]) + LEEWAY_S
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return tenant

    def _claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a sound token, {} for any other."""
        jwt, config = self._jwt, self._config
        try:
            header = jwt.get_unverified_header(token)
            for key in self._keys.for_token(str(header.get("kid") or "")):
                if header.get("alg") not in key.algorithms:
                    continue
                try:
                    claims: dict[str, Any] = jwt.decode(
                        token, key.key, algorithms=list(key.algorithms), audience=config.audience,
                        issuer=config.issuer, leeway=LEEWAY_S, options={"require": ["exp", "aud"]},
                    )  # fmt: skip
                except jwt.InvalidSignatureError:
                    continue  # without a key id, another key may have signed it
                return claims
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
            pass
        return {}
