"""Keep tenants from seeing each other's prompts in vLLM's prefix cache.

A cached prefix answers sooner, so whoever shares a cache can ask what others asked (arXiv
2409.20002, 2502.07776). vLLM hashes `cache_salt` into the first block: only equal salts share. Each
tenant, or named trust group, gets a salt that nobody else can make, whatever the client sends.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping, MutableMapping
from hmac import digest as hmac_digest
from secrets import token_bytes, token_hex

from forebay.traces.errors import InputError

SECRET = "FOREBAY_CACHE_SECRET"
LEAST_SECRET = 16  # characters
FIELD = "cache_salt"
_SALT_CHARACTERS = 22  # 132 bits


class CacheSalts:
    """The salt of each tenant, or of the trust group it is in."""

    def __init__(self, secret: bytes, groups: Mapping[str, str]) -> None:
        self._secret = secret
        # A tenant's name holds no colon, so no tenant can be taken for a group.
        self._holders = {tenant: f"group:{group}" for tenant, group in groups.items()}
        self._plain: dict[str, str] = {}  # of tenants whose clients give no salt: nearly all

    def salt(self, tenant: str, client_salt: str | None = None) -> str:
        """base64url(HMAC-SHA256(secret, tenant || 0 || client_salt))[:22]

        A client's own salt still parts its users from each other, within what is its tenant's.
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


def with_salt(body: bytes, salt: str, *, empty: bool = False) -> bytes:
    """`body`, a valid JSON object (`empty`: without members), with the salt as its last member.

    The last of several equal keys counts, for the parsers of vLLM as for ours, so this overrides
    what a client wrote, however it was spelt, without a second pass over a long prompt.
    """
    end = len(body) - 1
    while body[end] != 0x7D:  # white space may follow the brace
        end -= 1
    member = f'{"" if empty else ","}"{FIELD}":"{salt}"}}'
    return b"".join((memoryview(body)[:end], member.encode()))  # copied once


def cache_secret(environ: Mapping[str, str]) -> bytes:
    """The key of the salts: FOREBAY_CACHE_SECRET, else random; raises InputError if it is short.

    Proxies in front of the same backends need the same secret, or they cannot use what the
    backends cached for each other.
    """
    given = environ.get(SECRET)
    if given is None:
        return token_bytes(32)
    if len(given) < LEAST_SECRET:
        raise InputError(
            f"{SECRET}: give {LEAST_SECRET} characters or more; try `openssl rand -hex 32`"
        )
    return given.encode("utf-8", "surrogateescape")


def share_cache_secret(environ: MutableMapping[str, str]) -> None:
    """Give processes that are about to be started one secret, unless there is one."""
    environ.setdefault(SECRET, token_hex(32))
