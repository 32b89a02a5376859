"""TLS contexts: the certificate of the public port, and the check of backends' certificates.

A new certificate is used from the next handshake on, without a new listener: the listener's context
passes each handshake to the newest context. HTTP/2 is not offered. TLS 1.2 is the oldest version.

With authorities for clients' certificates it is TLS 1.3, without tickets. A session that is resumed
is not checked again, so a client of an authority that was removed would come back.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.traces.ground.errors import InputError

HANDSHAKE_S = 10.0


class Handshake(ssl.SSLObject):
    """The TLS of one connection.

    Attributes:
        certificate: the client's, as `getpeercert` returned it; None before it was asked for.
    """

    certificate: dict[str, Any] | None = None
    _failed: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Take a step of the handshake. Raises SSLError.

        asyncio and uvloop write what OpenSSL has to say only when it waits for the client. So a
        handshake that fails waits once more: then its alert is sent. A client that does not close
        after an alert is cut off by the limit of the handshake.
        """
        if self._failed is not None:
            raise self._failed
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            context = self.context
            if error.reason == "HTTP_REQUEST" and isinstance(context, ListenerContext):
                context.on_plain_http()
            if isinstance(context, PublicContext) and isinstance(
                error, ssl.SSLCertVerificationError
            ):
                context.on_bad_certificate(error.verify_message)
            if error.reason == "HTTP_REQUEST":
                raise  # it does not read TLS
            self._failed = error
            raise ssl.SSLWantReadError from error


class ListenerContext(ssl.SSLContext):
    """A context that reports clients which speak plain HTTP.

    Attributes:
        on_plain_http: called for each of them. Nothing else shows them to the proxy.
    """

    sslobject_class: type[ssl.SSLObject] = Handshake
    on_plain_http: Callable[[], None] = staticmethod(lambda: None)


class PublicContext(ssl.SSLContext):
    """A certificate of the public port.

    Attributes:
        authorities: certificates of authorities, in DER; none: clients are asked for nothing.
        on_bad_certificate: called with the reason when a client's certificate is refused.
    """

    authorities: frozenset[bytes] = frozenset()
    on_bad_certificate: Callable[[str], None] = staticmethod(lambda _: None)


class ServerTls:
    """The certificate of the public port. `context` is for the listener."""

    def __init__(self, newest: PublicContext) -> None:
        self.on_bad_certificate: Callable[[str], None] = lambda _: None
        self.context = ListenerContext(ssl.PROTOCOL_TLS_SERVER)
        self.swap(newest)
        # Called for each handshake, with or without a server name in it.
        self.context.sni_callback = self._choose

    def swap(self, newest: PublicContext) -> None:
        """Use another certificate, and other authorities, from the next handshake on."""
        self._newest = newest
        newest.on_bad_certificate = lambda why: self.on_bad_certificate(why)
        # A connection takes these settings from the context with which it begins.
        self.context.verify_mode = newest.verify_mode
        self.context.minimum_version = newest.minimum_version
        self.context.num_tickets = newest.num_tickets

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._newest


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> PublicContext:
    """Make a context with this certificate chain and private key (PEM). Raises InputError.

    Args:
        client_ca: authorities (PEM) of clients' certificates. A client without a certificate is
            let in, and a client with a bad certificate is not.
    """
    context = PublicContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("cert", cert), ("key", key)):
        _readable(path, f"tls.{name}")
    try:
        # Without a password function OpenSSL would ask at the terminal.
        context.load_cert_chain(cert, key, password=_no_password)
    except _Encrypted:
        raise InputError(f"tls.key: {key} is encrypted; give a key without a pass phrase") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"tls: the key {key} does not belong to {cert}") from None
        raise InputError(
            f"tls: {cert} and {key} are not a certificate and a private key in PEM "
            f"({error.reason or 'not understood'})"
        ) from None
    if client_ca is not None:
        _ask_for_certificates(context, client_ca)
    return context


def _ask_for_certificates(context: PublicContext, client_ca: Path) -> None:
    _readable(client_ca, "tenants.client_ca")
    try:
        context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise InputError(
            f"tenants.client_ca: {client_ca} holds no certificate in PEM "
            f"({error.reason or 'none found'})"
        ) from None
    context.authorities = frozenset(context.get_ca_certs(binary_form=True))
    if not context.authorities:
        raise InputError(
            f"tenants.client_ca: {client_ca} has no certificate of an authority; give the "
            "certificate that signs the clients' certificates"
        )
    context.verify_mode = ssl.CERT_OPTIONAL
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def client_context(ca: Path | None, verify: bool) -> ssl.SSLContext:
    """Make a context that checks backends with `ca` (PEM), or the system's authorities."""
    if not verify:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if ca is not None:
        _readable(ca, "upstream_tls.ca")
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise InputError(
            f"upstream_tls.ca: {ca} holds no certificate in PEM ({error.reason or 'none found'})"
        ) from None


class _Encrypted(Exception):
    pass


def _no_password() -> bytes:
    raise _Encrypted


def _readable(path: Path, key: str) -> None:
    """Raise InputError if the file cannot be read: OpenSSL does not name the file."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{key}: cannot read {path} ({error.strerror})") from None
