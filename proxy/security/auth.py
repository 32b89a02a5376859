"""Authenticate: a key, token or client certificate names a tenant, else the request is rejected.

Wrong keys are counted by address. Beyond the allowance they get a 429, but a valid key is never
rejected because of them: behind a load balancer all clients share one address, and a stranger could
lock all of them out. So the allowance bounds work and noise. Against guessing, long keys help.

A token that names the tenant of a key or a certificate is rejected, too: users may choose their
names at an identity provider, and would spend another client's budget.

Checking the signature of a new token is dear. It is charged to the address, and beyond the
allowance it waits for a turn, as a long body does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, IPv6Network
from math import ceil

from aiohttp import web

from forebay.proxy.http1.errors import LOAD, ApiError, retry_headers
from forebay.proxy.http1.server.server import client_of
from forebay.proxy.identity.certificates import CertificateTenants
from forebay.proxy.identity.jwt_tokens import JwtVerifier
from forebay.proxy.runtime.turns import LoopTurns
from forebay.proxy.security.keys import KeyRing

FAILURES_AT_ONCE = 20.0
FAILURES_PER_S = 1.0
ADDRESSES = 4096
SEND_A_KEY = "Send a valid key: `Authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`."
KEY_HEADERS = ("x-api-key", "api-key")  # Anthropic's clients, Azure's clients


@dataclass(slots=True)
class Failures:
    """Counts wrong keys by address, each in a leaky bucket. The table is bounded."""

    at_once: float = FAILURES_AT_ONCE
    per_s: float = FAILURES_PER_S
    addresses: int = ADDRESSES
    # In order of the last failure.
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.levels)

    def count(self, address: str, now: float) -> float:
        """Count a failure. Returns 0 within the allowance, else the seconds until it has room."""
        network, level = _network(address), self._level(address, now)
        self.levels.pop(network, None)
        over = level + 1.0 - self.at_once
        if over <= 0:
            level += 1.0
        self.levels[network] = (level, now)
        if len(self.levels) > self.addresses:
            del self.levels[next(iter(self.levels))]
        return max(0.0, over / self.per_s)

    def beyond(self, address: str, now: float) -> bool:
        """True if the next failure is beyond the allowance."""
        return bool(self.levels) and self._level(address, now) + 1.0 > self.at_once

    def _level(self, address: str, now: float) -> float:
        level, at = self.levels.get(_network(address), (0.0, now))
        return max(0.0, level - (now - at) * self.per_s)


class Authenticator:
    """Maps requests to tenants. Without keys, tokens and certificates all clients are one."""

    def __init__(self) -> None:
        self._failures = Failures()
        self.swap(None)

    def tenants(self) -> tuple[str, ...] | None:
        """Return all possible tenants, or None if tokens may name any tenant."""
        if self._verifier is not None:
            return None
        of_keys = self.ring.tenants if self.ring is not None else ()
        of_certificates = self._certificates.tenants if self._certificates is not None else ()
        return tuple(dict.fromkeys((*of_keys, *of_certificates)))

    def swap(
        self,
        ring: KeyRing | None,
        verifier: JwtVerifier | None = None,
        certificates: CertificateTenants | None = None,
    ) -> None:
        """Use these from the next request on."""
        self.ring = ring
        self._verifier = verifier
        self._certificates = certificates

    async def tenant(self, request: web.BaseRequest, now: float, turns: LoopTurns) -> str:
        """Return the tenant of a request, or "" without keys. Raises ApiError 401 or 429.

        A valid key counts before the certificate of the connection.

        Args:
            turns: run the checks of signatures.
        """
        ring, verifier, certificates = self.ring, self._verifier, self._certificates
        if ring is None and verifier is None and certificates is None:
            return ""
        why = ""
        for key in given_keys(request.headers):
            tenant = ring.tenant(key) if ring is not None else None
            if tenant is None and verifier is not None:
                tenant = await self._of_token(verifier, key, request, now, turns)
                if tenant is not None and self._has_other_proof(tenant):
                    tenant, why = None, "The token names a tenant that has a key or a certificate."
            if tenant is not None:
                return tenant
        if certificates is not None and request.transport is not None:
            tenant = certificates.tenant(request.transport.get_extra_info("ssl_object"))
            if tenant is not None:
                return tenant
        raise self._rejection(request, now, why)

    def _has_other_proof(self, tenant: str) -> bool:
        """True if a key or a certificate names this tenant."""
        proofs = (self.ring, self._certificates)
        return any(tenant in proof.tenants for proof in proofs if proof is not None)

    async def _of_token(
        self,
        verifier: JwtVerifier,
        token: str,
        request: web.BaseRequest,
        now: float,
        turns: LoopTurns,
    ) -> str | None:
        """Return the tenant of a token, which takes a turn if its signature must be checked."""
        if (remembered := verifier.remembered(token)) is not None:
            return remembered[0]
        long = self._failures.beyond(request.remote or "", now)
        return await turns.take(client_of(request), 0, _check(verifier, token), long=long)

    def _rejection(self, request: web.BaseRequest, now: float, why: str) -> ApiError:
        wait_s = self._failures.count(request.remote or "", now)
        if wait_s:
            return ApiError(
                429, "too_many_failures", "Too many requests with a wrong API key.", LOAD,
                headers={**retry_headers(float(ceil(wait_s))), "x-should-retry": "false"},
            )  # fmt: skip
        ways = []
        if self.ring is not None or self._verifier is not None:
            ways.append(why or SEND_A_KEY)
        if self._certificates is not None:
            ways.append("Connect with a valid client certificate of a tenant.")
        return ApiError(
            401, "invalid_api_key", " Or: ".join(ways),
            headers={"WWW-Authenticate": "Bearer"},
            close=self._certificates is not None,  # the next connection may have a better one
        )  # fmt: skip


async def _check(verifier: JwtVerifier, token: str) -> str | None:
    return verifier.tenant(token)


def given_keys(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the keys of a request, at most one for each header.

    A client that is logged in elsewhere sends a foreign bearer token next to its key, so each
    header counts. OpenAI's clients send `Authorization: Bearer KEY`, and some omit the scheme.
    """
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        if token := token.strip():
            yield token
    elif scheme and not token:
        yield scheme
    for name in KEY_HEADERS:
        if key := headers.get(name, "").strip():
            yield key


def _network(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 address: one client owns all of it."""
    if ":" not in address:
        return address
    whole = IPv6Address(address.partition("%")[0])
    if whole.ipv4_mapped:  # an IPv4 client at a socket for both families
        return str(whole.ipv4_mapped)
    return str(IPv6Network((whole, 64), strict=False))
