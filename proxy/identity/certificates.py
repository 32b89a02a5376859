"""Check client certificates (mutual TLS): a name in the certificate names the tenant.

TLS checks the chain, the times and the purpose during the handshake, with the authorities of
`tenants.client_ca`. A connection may outlive its certificate and the file of authorities, so both
are looked at again with each request.
"""

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from forebay.proxy.config.tenants import UNLISTED, Tenants
from forebay.proxy.http1.tls import Handshake, PublicContext

SUBJECT_NAMES: Final = frozenset(("DNS", "URI", "email"))
"""Kinds of names in `subjectAltName` that may name a tenant, besides the common name."""


class CertificateTenants:
    """Returns the tenant of a connection. Immutable.

    Args:
        authorities: certificates of the authorities in force, in DER.
        tenants: tenants by the names in their certificates.
        now: returns the time in seconds since 1970.

    Attributes:
        tenants: the tenants that a certificate may name.
    """

    def __init__(
        self,
        authorities: frozenset[bytes],
        tenants: Mapping[str, str],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._authorities = authorities
        self._tenants = tenants
        self._now = now
        self.tenants = dict.fromkeys(tenants.values()).keys()

    def tenant(self, handshake: ssl.SSLObject | None) -> str | None:
        """Return the tenant of the client of a connection, or None.

        None without a certificate, after its end, for one whose names belong to no tenant or to
        several, and if an authority that the handshake trusted counts no more.
        """
        if not isinstance(handshake, Handshake):
            return None
        context = handshake.context
        trusted = context.authorities if isinstance(context, PublicContext) else frozenset()
        if not trusted or not trusted <= self._authorities:
            return None
        certificate = handshake.certificate
        if certificate is None:
            certificate = handshake.certificate = dict(handshake.getpeercert() or {})
        if not certificate or ssl.cert_time_to_seconds(certificate["notAfter"]) < self._now():
            return None
        tenants = {self._tenants[name] for name in names_of(certificate) if name in self._tenants}
        return tenants.pop() if len(tenants) == 1 else None


def names_of(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a certificate, as `SSLObject.getpeercert` returns it."""
    for part in certificate.get("subject", ()):
        for kind, value in part:
            if kind == "commonName":
                yield value
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in SUBJECT_NAMES:
            yield value


def certificate_names(tenants: Tenants) -> dict[str, str]:
    """Return the tenant of each name that a certificate may have."""
    if tenants.client_ca is None:
        return {}
    return {
        name: tenant
        for tenant, entry in tenants.known.items()
        for name in entry.certificates or (tenant,)
        if tenant != UNLISTED
    }
