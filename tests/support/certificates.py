"""Certificates made for a test, and a proxy that serves with them."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trustme
from proxy_stage import RawBackend, Stage, settle, stage

from forebay.replay.clock.virtual_loop import run

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


def on_tls(
    scene: Callable[[Stage, RawBackend], Awaitable[None]], folder: Path, **keys: Any
) -> None:
    tls = write(folder, CA.issue_cert("127.0.0.1", "localhost"))

    async def main() -> None:
        async with RawBackend().running() as backend, stage([backend.url], tls=tls, **keys) as on:
            assert on.url.startswith("https://")
            await scene(on, backend)
            await settle()
            on.assert_nothing_held()

    run(main())
