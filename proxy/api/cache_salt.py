"""Keep tenants from detecting each other's prompts by the timing of vLLM's prefix cache.

A cached prompt gets its first token sooner, so a tenant could test which prompts others have sent
(arXiv 2409.20002, 2502.07776). vLLM hashes `cache_salt` into the first block, so only requests with
equal salts share a cache. Each tenant or trust group gets a salt that no client can produce.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping, MutableMapping
from hmac import digest as hmac_digest
from secrets import token_bytes, token_hex

from forebay.traces.ground.errors import InputError

SECRET = "FOREBAY_CACHE_SECRET"
LEAST_SECRET = 16  # characters
RANDOM = "random-"  # begins a secret that only the workers of one machine share
_SALT_CHARACTERS = 22  # 132 bits


class CacheSalts:
    """Makes the salt of each tenant, or of its trust group."""

    def __init__(self, secret: bytes, groups: Mapping[str, str]) -> None:
        self._secret = secret
        # A tenant's name holds no colon, so no tenant can be taken for a group.
        self._holders = {tenant: f"group:{group}" for tenant, group in groups.items()}
        self._plain: dict[str, str] = {}  # for requests without a salt of the client: nearly all

    def salt(self, tenant: str, client_salt: str | None = None) -> str:
        """Return base64url(HMAC-SHA256(secret, tenant || 0 || client_salt))[:22].

        A client's own salt still separates its users from each other within the tenant.
        """
        if client_salt:
            return self._made(tenant, client_salt)
        salt = self._plain.get(tenant)
        if salt is None:
            salt = self._plain[tenant] = self._made(tenant, "")
        return salt

    def _made(self, tenant: str, client_salt: str) -> str:
        message = f"{self._holders.get(tenant, tenant)}\0{client_salt}".encode()
        code = hmac_digest(self._secret, message, "sha256")
        return urlsafe_b64encode(code)[:_SALT_CHARACTERS].decode()


def cache_secret(environ: Mapping[str, str]) -> bytes:
    """Return the key of the salts: FOREBAY_CACHE_SECRET, else random. Raises InputError.

    Proxies in front of the same backends need the same secret, to share the backends' caches.
    """
    secret = environ.get(SECRET)
    if secret is None:
        return token_bytes(32)
    if len(secret) < LEAST_SECRET:
        raise InputError(
            f"{SECRET}: give {LEAST_SECRET} characters or more; try `openssl rand -hex 32`"
        )
    return secret.encode("utf-8", "surrogateescape")


def share_cache_secret(environ: MutableMapping[str, str]) -> None:
    """Set a random secret for processes that will be started, unless the operator has set it."""
    environ.setdefault(SECRET, RANDOM + token_hex(32))


def share_key(environ: Mapping[str, str]) -> bytes:
    """Return the key of messages between proxies, b"" unless the operator has set the secret.

    Raises InputError.
    """
    if environ.get(SECRET, RANDOM).startswith(RANDOM):
        return b""
    return hmac_digest(cache_secret(environ), b"messages between proxies", "sha256")
