"""Client certificates name tenants: which count, on which connections, and at a reload."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from fakes.certificates import CA, trusting, write
from stages.proxy_stage import RawBackend, Stage, error_of, on_stage

from forebay.proxy.config.sources import load_config
from forebay.proxy.http1.tls import HANDSHAKE_S, Handshake, PublicContext
from forebay.proxy.identity.certificates import CertificateTenants
from forebay.proxy.log_events import LogEvent
from forebay.proxy.security.guards import WATCH_S, Security
from forebay.traces.ground.errors import InputError

CLIENTS, STRANGERS = trustme.CA(), trustme.CA()
KNOWN: dict[str, Any] = {
    "acme": {},
    "bolt": {"certificates": ["bolt.example.com", "ops@bolt.example.com", "Bolt Ltd, Berlin"]},
}
API_KEY = "key-of-lab-0123456789"


def holding(*names: str, by: trustme.CA = CLIENTS, **options: Any) -> ssl.SSLContext:
    """What a client with such a certificate connects with."""
    context = trusting()
    by.issue_cert(*names, **options).configure_cert(context)
    return context


@asynccontextmanager
async def on_mutual_tls(folder: Path, **tenants: Any) -> AsyncIterator[tuple[Stage, RawBackend]]:
    """A proxy that asks for certificates, and its backend."""
    tls = write(folder, CA.issue_cert("127.0.0.1"))
    CLIENTS.cert_pem.write_to_path(folder / "clients.pem")
    section = {"client_ca": str(folder / "clients.pem"), "known": KNOWN, **tenants}
    async with on_stage(None, tls=tls, tenants=section) as (on, (backend,)):
        yield on, backend


async def ask(on: Stage, context: ssl.SSLContext, **headers: str) -> int | str:
    """The status, or why there was no answer."""
    try:
        async with on.post(ssl=context, headers=headers) as response:
            await response.read()
            return int(response.status)
    except (aiohttp.ClientError, OSError) as error:
        return f"{error}"


def served(on: Stage, tenant: str) -> bool:
    line = f'forebay_tenant_requests_total{{status="200",tenant="{tenant}"}}'
    return line in on.proxy.metrics.text().decode()


@pytest.mark.parametrize(
    ("names", "common_name", "tenant"),
    [
        (["acme"], None, "acme"),
        ([], "acme", "acme"),
        (["bolt.example.com"], None, "bolt"),
        (["ops@bolt.example.com"], None, "bolt"),
        ([], "Bolt Ltd, Berlin", "bolt"),
        (["bolt.example.com", "other.example.com"], "x", "bolt"),
        (["bolt"], None, None),  # it lists other names
        (["other"], None, None),
        ([], "acme\n", None),
        (["*.example.com"], None, None),
        (["acme", "bolt.example.com"], None, None),  # names of two tenants
    ],
)
async def test_a_name_in_the_certificate_names_the_tenant(
    names: list[str], common_name: str | None, tenant: str | None, tmp_path: Path
) -> None:
    async with on_mutual_tls(tmp_path) as (on, backend):
        context = holding(*names, common_name=common_name)
        assert await ask(on, context) == (200 if tenant else 401)
        assert len(backend.calls) == (1 if tenant else 0)
        tenants = [name for name in ("acme", "bolt") if served(on, name)]
        assert tenants == ([tenant] if tenant else [])


async def test_caches_of_tenants_are_apart(tmp_path: Path) -> None:
    async with on_mutual_tls(tmp_path) as (on, backend):
        for name in ("acme", "bolt.example.com"):
            assert await ask(on, holding(name)) == 200
        assert all(b'"cache_salt"' in call.body for call in backend.calls)
        assert len({call.body for call in backend.calls}) == 2


async def test_without_a_certificate_there_is_401_and_health_checks_pass(tmp_path: Path) -> None:
    async with on_mutual_tls(tmp_path) as (on, backend):
        async with on.post(ssl=trusting()) as response:
            assert response.status == 401
            assert response.headers["connection"] == "close"
            error = await error_of(response)
        assert error["code"] == "invalid_api_key"
        assert error["message"] == "Connect with a valid client certificate of a tenant."
        assert await on.status_of(on.url + "/health", ssl=trusting()) == 200
        assert not backend.calls


def old(days: float) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (lambda: holding("acme", by=STRANGERS), "unable to get local issuer certificate"),
        (lambda: holding("acme", not_before=old(9), not_after=old(1)), "certificate has expired"),
        (lambda: holding("acme", not_before=old(-1)), "certificate is not yet valid"),
    ],
)
async def test_a_bad_certificate_ends_the_handshake_and_is_said_once_a_minute(
    context: Callable[[], ssl.SSLContext], why: str, tmp_path: Path
) -> None:
    async with on_mutual_tls(tmp_path) as (on, backend):
        for _ in range(3):
            assert await ask(on, context()) not in (200, 401)
        assert not backend.calls
        lines = [line for line in on.said if "client certificate" in line]
        assert lines == [f"a client certificate was refused: {why}"]
        assert LogEvent.BAD_CERTIFICATE in [event for event, *_ in on.said.events]
        assert await ask(on, holding("acme")) == 200  # others are served


@pytest.mark.parametrize(
    ("context", "alert"),
    [
        (lambda: holding("acme", not_after=old(1)), "CERTIFICATE_EXPIRED"),
        (lambda: holding("acme", by=STRANGERS), "UNKNOWN_CA"),
        (lambda: trusting(maximum_version=ssl.TLSVersion.TLSv1_2), "PROTOCOL_VERSION"),
    ],
)
async def test_a_client_is_told_why_its_handshake_failed(
    context: Callable[[], ssl.SSLContext], alert: str, tmp_path: Path
) -> None:
    async def connect(on: Stage) -> None:
        host, port = on.url.removeprefix("https://").split(":")
        reader, _ = await asyncio.open_connection(host, int(port), ssl=context())
        await reader.read()  # with TLS 1.3 a client is told after its own part of the handshake

    async with on_mutual_tls(tmp_path) as (on, backend):
        with pytest.raises(ssl.SSLError) as failed:
            await connect(on)
        assert "ALERT" in str(failed.value.reason)
        assert alert in str(failed.value.reason)
        assert not backend.calls


async def test_a_client_that_stays_after_an_alert_is_cut_off(tmp_path: Path) -> None:
    async with on_mutual_tls(tmp_path) as (on, _):
        host, port = on.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00")  # no ClientHello
        began = asyncio.get_running_loop().time()
        await reader.read()
        assert asyncio.get_running_loop().time() - began <= HANDSHAKE_S + 1
        writer.close()


async def test_a_certificate_for_servers_is_none_for_clients(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(CLIENTS.cert_pem.bytes())
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "acme")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(old(1))
        .not_valid_after(old(-1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=True)
        .sign(CLIENTS._private_key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + made.public_bytes(Encoding.PEM)
    )

    async with on_mutual_tls(tmp_path) as (on, backend):
        context = trusting()
        context.load_cert_chain(pem)
        assert await ask(on, context) not in (200, 401)
        assert not backend.calls


async def test_keys_count_beside_certificates_and_before_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"lab: {API_KEY}\n")

    async with on_mutual_tls(tmp_path, keys=str(keys)) as (on, _):
        key = {"authorization": f"Bearer {API_KEY}"}
        assert await ask(on, trusting(), **key) == 200
        assert served(on, "lab")
        assert not served(on, "acme")
        # Clients of OpenAI must send a key, though it is none.
        assert await ask(on, holding("acme"), authorization="Bearer none") == 200
        assert served(on, "acme")
        assert await ask(on, trusting(), authorization="Bearer none") == 401
        # A key counts before the certificate.
        before = on.proxy.metrics.text().decode()
        assert await ask(on, holding("acme"), **key) == 200
        after = on.proxy.metrics.text().decode()
        line = 'forebay_tenant_requests_total{status="200",tenant="lab"} '
        assert (line + "1.0" in before, line + "2.0" in after) == (True, True)


class Verified(Handshake):
    """A handshake that is over."""

    context = PublicContext(ssl.PROTOCOL_TLS_SERVER)

    def __new__(cls, *_: Any) -> "Verified":
        return object.__new__(cls)

    def __init__(self, certificate: Any, *authorities: bytes) -> None:
        self.certificate = certificate
        self.context = PublicContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.authorities = frozenset(authorities)


END = "Nov 27 10:00:00 2026 GMT"
ACME = {"subject": ((("commonName", "acme"),),), "notAfter": END}


def test_a_connection_outlives_neither_its_certificate_nor_its_authority() -> None:
    now = ssl.cert_time_to_seconds(END) - 1.0
    both = CertificateTenants(frozenset((b"a", b"b")), {"acme": "acme"}, now=lambda: now)
    assert both.tenant(Verified(ACME, b"a")) == "acme"
    assert both.tenant(Verified(ACME, b"a", b"b")) == "acme"
    assert both.tenant(Verified(ACME, b"a", b"gone")) is None
    now += 2.0
    assert both.tenant(Verified(ACME, b"a")) is None
    now -= 2.0
    assert both.tenant(Verified({}, b"a")) is None  # without a certificate
    assert both.tenant(Verified(ACME)) is None  # from before certificates were asked for
    assert both.tenant(None) is None  # plain HTTP


async def test_authorities_change_while_clients_ask(tmp_path: Path) -> None:
    """Another authority is added, then the first one is removed, and all in one keep-alive."""
    file = tmp_path / "clients.pem"

    async with on_mutual_tls(tmp_path) as (on, _):
        first, second = holding("acme"), holding("acme", by=STRANGERS)
        assert await ask(on, first) == 200
        assert await ask(on, second) not in (200, 401)
        # A half-written file changes nothing.
        file.write_bytes(CLIENTS.cert_pem.bytes()[:-40])
        await asyncio.sleep(3 * WATCH_S)
        assert [await ask(on, first) for _ in range(3)] == [200] * 3
        assert sum("tenants.client_ca" in line for line in on.said) == 1
        # Open connections stay good while their authority does.
        file.write_bytes(CLIENTS.cert_pem.bytes() + STRANGERS.cert_pem.bytes())
        await asyncio.sleep(3 * WATCH_S)
        assert [await ask(on, one) for one in (first, second, first)] == [200] * 3
        # Without it they end, and so does the session that they might resume.
        asking = [asyncio.create_task(ask(on, second)) for _ in range(10)]
        file.write_bytes(STRANGERS.cert_pem.bytes())
        on.proxy.security.reload(on.proxy.reloader.config)  # at the same moment
        assert set(await asyncio.gather(*asking)) <= {200, 401}
        assert await ask(on, second) == 200
        assert await ask(on, first) != 200
        assert await ask(on, first) != 200


async def test_tenants_that_are_removed_lose_their_certificates_at_once(tmp_path: Path) -> None:
    async with on_mutual_tls(tmp_path) as (on, _):
        context = holding("acme")
        assert await ask(on, context) == 200
        config = on.proxy.reloader.config
        known = {name: one for name, one in config.tenants.known.items() if name != "acme"}
        tenants = config.tenants.model_copy(update={"known": known})
        on.proxy.security.reload(config.model_copy(update={"tenants": tenants}))
        assert await ask(on, context) == 401


async def test_old_versions_of_tls_cannot_resume_a_session(tmp_path: Path) -> None:
    async with on_mutual_tls(tmp_path) as (on, _):
        context = holding("acme")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await ask(on, context) not in (200, 401)
        host, port = on.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=holding("acme"))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in await reader.readline()
        assert not writer.get_extra_info("ssl_object").session.has_ticket
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        ({"client_ca": "CA"}, "client_ca needs known"),
        ({"client_ca": "CA", "known": {}}, "client_ca needs known"),
        ({"known": {"acme": {"certificates": ["x"]}}}, "known.acme.certificates needs client_ca"),
        ({"client_ca": "CA", "known": {"a": {"certificates": [""]}}}, "at least 1 character"),
        (
            {"client_ca": "CA", "known": {"a": {}, "b": {"certificates": ["a"]}}},
            "the certificate name 'a' stands for a and b: give it to one",
        ),
        ({"client_ca": "NONE", "known": {"a": {}}}, "tenants.client_ca: cannot read"),
        ({"client_ca": "TEXT", "known": {"a": {}}}, "holds no certificate in PEM"),
        ({"client_ca": "LEAF", "known": {"a": {}}}, "has no certificate of an authority"),
    ],
)
def test_mistakes(tenants: dict[str, Any], why: str, tmp_path: Path) -> None:
    CLIENTS.cert_pem.write_to_path(tmp_path / "CA")
    (tmp_path / "TEXT").write_text("a canary")
    CLIENTS.issue_cert("acme").cert_chain_pems[0].write_to_path(tmp_path / "LEAF")
    if "client_ca" in tenants:
        tenants = {**tenants, "client_ca": str(tmp_path / tenants["client_ca"])}
    backends = [{"url": "http://127.0.0.1:8001"}]
    tls = write(tmp_path, CA.issue_cert("127.0.0.1"))
    with pytest.raises(InputError) as error:
        Security(load_config(None, {"backends": backends, "tenants": tenants, "tls": tls}, {}), {})
    assert why in str(error.value)
    assert "canary" not in str(error.value)
    assert "\n" not in str(error.value)


def test_certificates_need_tls(tmp_path: Path) -> None:
    CLIENTS.cert_pem.write_to_path(tmp_path / "CA")
    tenants = {"client_ca": str(tmp_path / "CA"), "known": {"a": {}}}
    config = load_config(
        None, {"backends": [{"url": "http://127.0.0.1:8001"}], "tenants": tenants}, {}
    )
    with pytest.raises(InputError, match=r"tenants.client_ca needs tls: give tls.cert and tls.key"):
        Security(config, {})
