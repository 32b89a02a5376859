"""TLS on both sides: certificates made for the test, and every way in which files can be wrong."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from fakes.certificates import CA, on_tls, trusting, write
from stages.proxy_stage import DONE, EVENT, USAGE, RawBackend, Stage, silent, stage

from forebay.proxy.config.sources import load_config
from forebay.proxy.http1.tls import HANDSHAKE_S, client_context, server_context
from forebay.proxy.security.guards import WATCH_S, Security
from forebay.traces.ground.errors import InputError

STREAMED = {"prompt": "hello", "max_tokens": 3, "stream": True}


class TestPublicPort:
    async def test_streams_over_tls(self, tmp_path: Path) -> None:
        async with on_tls(tmp_path) as (on, _):
            for name in (None, "localhost"):  # the handshake without SNI, and with
                async with on.client.post(
                    on.url + "/v1/completions",
                    json=STREAMED,
                    ssl=trusting(),
                    server_hostname=name,
                ) as response:
                    assert response.status == 200
                    assert await response.read() == EVENT + EVENT + USAGE + DONE
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await on.client.get(on.url + "/health")

    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    async def test_versions_in_use(self, version: ssl.TLSVersion, tmp_path: Path) -> None:
        async with on_tls(tmp_path) as (on, _):
            context = trusting(maximum_version=version, minimum_version=version)
            assert await on.status_of(on.url + "/health", ssl=context) == 200

    async def test_plain_http_hears_nothing_and_an_offer_of_http2_gets_http11(
        self, tmp_path: Path
    ) -> None:
        async with on_tls(tmp_path) as (on, _):
            host, port = on.url.removeprefix("https://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP" not in await reader.read()
            writer.close()
            context = trusting()
            context.set_alpn_protocols(["h2", "http/1.1"])
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.close()
            await writer.wait_closed()

    async def test_plain_http_is_said_once_a_minute(self, tmp_path: Path) -> None:
        async with on_tls(tmp_path) as (on, _):
            host, port = on.url.removeprefix("https://").split(":")

            async def plain() -> None:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"HTTP" not in await reader.read()
                writer.close()

            for _ in range(3):
                await plain()
            await asyncio.sleep(61)
            await plain()
            assert await on.status_of(on.url + "/health", ssl=trusting()) == 200
            line = "a client speaks plain HTTP to the TLS port: its URL must begin with https://"
            lines = [one for one in on.said if "plain HTTP" in one]
            assert lines == [line, f"{line} (2 more since the last such line)"]

    async def test_a_handshake_that_does_not_come_is_given_up(self, tmp_path: Path) -> None:
        async with on_tls(tmp_path) as (on, _):
            host, port = on.url.removeprefix("https://").split(":")
            clock = asyncio.get_running_loop().time
            reader, writer = await asyncio.open_connection(host, int(port))
            begun = clock()
            assert await reader.read() == b""
            assert clock() - begun == pytest.approx(HANDSHAKE_S, abs=0.1)
            writer.close()

    async def test_a_client_that_leaves_frees_the_backend(self, tmp_path: Path) -> None:
        async with on_tls(tmp_path) as (on, backend):
            backend.serve = silent
            ask = on.client.post(on.url + "/v1/completions", json=STREAMED, ssl=trusting())
            task = asyncio.ensure_future(ask)
            await asyncio.sleep(0.2)
            assert backend.open == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.05)
            assert backend.open == 0

    async def test_a_renewed_certificate_is_taken_by_the_next_handshake(
        self, tmp_path: Path
    ) -> None:
        async with on_tls(tmp_path) as (on, _):

            async def serial() -> str:
                host, port = on.url.removeprefix("https://").split(":")
                _, writer = await asyncio.open_connection(host, int(port), ssl=trusting())
                number = writer.get_extra_info("peercert")["serialNumber"]
                writer.close()
                await writer.wait_closed()
                return str(number)

            first = await serial()
            (tmp_path / "key.pem").write_text("half a fi")
            await asyncio.sleep(3 * WATCH_S)
            assert await serial() == first
            assert sum("keeping the old" in line for line in on.said) == 1
            write(tmp_path, CA.issue_cert("127.0.0.1"))
            await asyncio.sleep(3 * WATCH_S)
            assert await serial() != first

    async def test_two_share_a_port_and_the_first_one_leaves(self, tmp_path: Path) -> None:
        """Also on an admin port, which speaks plain HTTP on an address of its own."""
        tls = write(tmp_path, CA.issue_cert("127.0.0.1"))

        async def ask(on: Stage) -> int:
            async with on.post(ssl=trusting(), headers={"connection": "close"}) as response:
                return int(response.status)

        async with RawBackend().running() as backend:
            listen: dict[str, Any] = {
                "port": 0, "admin_port": 0, "reuse_port": True, "admin_host": "127.0.0.2",
            }  # fmt: skip
            async with stage([backend.url], tls=tls, listen=listen) as new:
                port = int(new.url.rpartition(":")[2])
                listen = {**listen, "port": port}
                async with stage([backend.url], tls=tls, listen=listen) as old:
                    assert old.url == new.url == f"https://127.0.0.1:{port}"
                    assert old.proxy.admin_url.startswith("http://127.0.0.2:")
                    async with old.client.get(old.proxy.admin_url + "/healthz") as response:
                        assert response.status == 200
                    assert [await ask(new) for _ in range(20)] == [200] * 20
                    leaving = asyncio.create_task(old.proxy.lame_duck())
                    assert [await ask(new) for _ in range(20)] == [200] * 20
                    await leaving
                assert await ask(new) == 200


class TestBackends:
    def serving(self, certificate: trustme.LeafCert) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        return context

    @pytest.mark.parametrize(
        ("name", "trust", "problem"),
        [
            ("127.0.0.1", {"ca": "ca.pem"}, None),
            ("127.0.0.1", {}, "unable to get local issuer certificate"),
            ("elsewhere.test", {"ca": "ca.pem"}, "IP address mismatch"),
            ("elsewhere.test", {"verify": False}, None),
        ],
    )
    async def test_certificates_are_checked(
        self, name: str, trust: dict[str, Any], problem: str | None, tmp_path: Path
    ) -> None:
        CA.cert_pem.write_to_path(tmp_path / "ca.pem")
        if "ca" in trust:
            trust = {"ca": str(tmp_path / "ca.pem")}
        tls = self.serving(CA.issue_cert(name))

        backend = RawBackend()
        async with backend.running(tls=tls):
            assert backend.url.startswith("https://")
            up = 0 if problem else 1
            async with stage([backend.url], wait_up=up, upstream_tls=trust) as on:
                await asyncio.sleep(2)
                assert await on.status(STREAMED) == 503 if problem else 200
                if problem:
                    line = next(line for line in on.said if "is unreachable" in line)
                    assert "TLS: " in line
                    assert problem in line
                    assert not backend.calls


class TestFiles:
    def test_a_mistake_in_the_files_is_said_in_one_line(self, tmp_path: Path) -> None:
        files = write(tmp_path, CA.issue_cert("127.0.0.1"))
        cert, key = Path(files["cert"]), Path(files["key"])
        other = tmp_path / "other.pem"
        CA.issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
        text = tmp_path / "text.pem"
        text.write_text("no certificate, a canary")
        for args, words in [
            ((tmp_path / "none", key), "tls.cert: cannot read"),
            ((cert, tmp_path / "none"), "tls.key: cannot read"),
            ((cert, tmp_path), "tls.key: cannot read"),
            ((cert, other), "does not belong to"),
            ((text, key), "are not a certificate and a private key in PEM"),
            ((cert, text), "are not a certificate and a private key in PEM"),
            ((cert, cert), "are not a certificate and a private key in PEM"),
        ]:
            with pytest.raises(InputError) as error:
                server_context(*args)
            assert words in str(error.value)
            assert "canary" not in str(error.value)
            assert "\n" not in str(error.value)
        with pytest.raises(InputError, match=r"upstream_tls.ca: cannot read"):
            client_context(tmp_path / "none", True)
        with pytest.raises(InputError, match="holds no certificate in PEM"):
            client_context(text, True)

    def test_an_encrypted_key_does_not_ask(self, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization

        files = write(tmp_path, CA.issue_cert("127.0.0.1"))
        key = Path(files["key"])
        plain = serialization.load_pem_private_key(key.read_bytes(), None)
        key.write_bytes(
            plain.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"phrase"),
            )
        )
        with pytest.raises(InputError, match="is encrypted"):
            server_context(Path(files["cert"]), key)

    def test_half_a_configuration_and_switching_while_it_runs(self, tmp_path: Path) -> None:
        one = {"backends": [{"url": "http://127.0.0.1:8001"}]}
        with pytest.raises(InputError, match="give both cert and key"):
            load_config(None, {**one, "tls": {"cert": "c.pem"}}, {})
        plain = load_config(None, one, {})
        files = write(tmp_path, CA.issue_cert("127.0.0.1"))
        secured = load_config(None, {**one, "tls": files}, {})
        with pytest.raises(InputError, match="without a restart"):
            Security(plain, {}).reload(secured)
        with pytest.raises(InputError, match="without a restart"):
            Security(secured, {}).reload(plain)
