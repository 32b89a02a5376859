"""Certificates made for a test, and a proxy that serves with them."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme
from stages.proxy_stage import RawBackend, Stage, on_stage

CA = trustme.CA()


def write(folder: Path, certificate: trustme.LeafCert) -> dict[str, str]:
    """The files of a certificate, as the configuration's `tls`."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.unlink(missing_ok=True)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    certificate.private_key_pem.write_to_path(key)
    return {"cert": str(cert), "key": str(key)}


def trusting(**options: Any) -> ssl.SSLContext:
    context = ssl.create_default_context()
    CA.configure_trust(context)
    for name, value in options.items():
        setattr(context, name, value)
    return context


@asynccontextmanager
async def on_tls(folder: Path, **keys: Any) -> AsyncIterator[tuple[Stage, RawBackend]]:
    """A proxy that serves with a certificate of CA, and its backend."""
    tls = write(folder, CA.issue_cert("127.0.0.1", "localhost"))
    async with on_stage(None, tls=tls, **keys) as (on, (backend,)):
        assert on.url.startswith("https://")
        yield on, backend
