"""Servers that a name stands for, and servers that another program lists in a file."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from said import Said
from stages.proxy_stage import RawBackend, Stage, stage

from forebay.proxy import reload
from forebay.proxy.backends.discovery import Discovery
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.http1.client import dns_cache as names
from forebay.traces.ground.errors import InputError

HOST = "servers.test"
real = socket.getaddrinfo


class NameServer:
    """Answers for HOST; without addresses there is no such name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
        self.addresses = list(addresses)
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)
        monkeypatch.setattr(names, "FRESH_S", 0.0)
        monkeypatch.setattr(reload, "LOOK_UP_EVERY_S", 0.1)
        monkeypatch.setattr(reload, "WATCH_S", 0.05)

    def look_up(self, host: Any, *words: Any, **options: Any) -> Any:
        if host != HOST:
            return real(host, *words, **options)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses]


def servers(on: Stage) -> set[str]:
    return set(on.proxy.driver.shaper.backends)


async def until(on: Stage, *wanted: str) -> None:
    """In real time: a look-up has a thread."""
    async with asyncio.timeout(20):
        while servers(on) != set(wanted):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def on_names(stack: AsyncExitStack, **keys: Any) -> Stage:
    """A proxy in front of the servers of HOST; one of them is there, at 127.0.0.1."""
    backend = await stack.enter_async_context(RawBackend().running())
    url = f"http://{HOST}:{backend.url.rpartition(':')[2]}"
    return await stack.enter_async_context(stage([url], each={"dns": True}, **keys))


class TestNames:
    @pytest.mark.real_time
    async def test_servers_come_and_go_with_the_addresses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = NameServer(monkeypatch, "127.0.0.1", "127.0.0.2")

        async with AsyncExitStack() as stack:
            on = await on_names(stack, wait_up=1)
            assert servers(on) == {"b0-127.0.0.1", "b0-127.0.0.2"}
            async with on.post() as response:
                assert response.status == 200
                assert response.headers["x-forebay-backend"] == "b0-127.0.0.1"
            known.addresses = ["127.0.0.1", "127.0.0.3"]
            await until(on, "b0-127.0.0.1", "b0-127.0.0.3")
            known.addresses = []  # an outage of the name server takes nobody out
            await asyncio.sleep(0.5)
            assert servers(on) == {"b0-127.0.0.1", "b0-127.0.0.3"}
            known.addresses = ["127.0.0.1"]
            await until(on, "b0-127.0.0.1")
            assert await on.status() == 200

    @pytest.mark.real_time
    async def test_a_name_that_nobody_knows_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = NameServer(monkeypatch)

        async with AsyncExitStack() as stack:
            patient = [{"name": "chat", "up_to": 5000, "max_wait": "20s"}]
            hold = {"max_requests": 1}
            on = await on_names(stack, wait_up=0, buckets=patient, hold=hold)
            assert servers(on) == set()
            task = asyncio.create_task(on.status())
            await asyncio.sleep(0.2)
            known.addresses = ["127.0.0.1"]
            assert await task == 200

    @pytest.mark.real_time
    async def test_a_list_that_cannot_be_applied_yet_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = NameServer(monkeypatch, "127.0.0.1")

        async with AsyncExitStack() as stack:
            on = await on_names(stack)
            security = on.proxy.security
            read = security.read

            def broken(config: Config) -> Any:
                raise InputError("a bad line in the file of keys")

            monkeypatch.setattr(security, "read", broken)
            known.addresses = ["127.0.0.1", "127.0.0.2"]
            await asyncio.sleep(0.5)
            said = [line for line in on.said if "a bad line" in line]
            assert len(said) == 1
            monkeypatch.setattr(security, "read", read)
            await until(on, "b0-127.0.0.1", "b0-127.0.0.2")

    @pytest.mark.real_time
    async def test_a_reload_that_is_not_taken_takes_no_server_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though it names another host, and the look-up of that is over."""
        NameServer(monkeypatch, "127.0.0.1")

        def refused(config: Config) -> Any:
            raise InputError("a bad line in the file of keys")

        async with AsyncExitStack() as stack:
            on = await on_names(stack)
            other = {"backends": [{"name": "x", "url": "http://127.0.0.1:9"}]}
            on.proxy.reloader._load = lambda: load_config(None, other, {})
            monkeypatch.setattr(on.proxy.security, "read", refused)
            assert await on.proxy.reloader.reload() == "failed"
            reloader = on.proxy.reloader
            assert reloader._discovery.expand(reloader._read).backends  # at any moment
            await asyncio.sleep(0.3)
            assert servers(on) == {"b0-127.0.0.1"}

    def test_buckets_mean_all_servers_of_a_name(self) -> None:
        config = load_config(
            None,
            {
                "backends": [
                    {"name": "a", "url": f"http://{HOST}:8000", "dns": True},
                    {"name": "b", "url": "http://127.0.0.1:1"},
                    {"name": "c", "url": "http://other.test", "dns": True},
                ],
                "buckets": [
                    {"name": "chat", "up_to": 5000, "backends": ["b", "a"]},
                    {"name": "document", "up_to": 50000, "backends": ["c"]},
                ],
            },
            {},
        )
        said = Said()
        discovery = Discovery(said)
        discovery._found = {HOST: ("10.0.0.5", "fd00::5")}
        found = discovery.expand(config)
        assert {b.name: b.url for b in found.backends} == {
            "a-10.0.0.5": "http://10.0.0.5:8000",
            "a-fd00--5": "http://[fd00::5]:8000",
            "b": "http://127.0.0.1:1",
        }
        chat, document = found.buckets
        assert chat.backends == ("b", "a-10.0.0.5", "a-fd00--5")
        assert document.backends == ("c",)  # nobody, not everybody

    @pytest.mark.parametrize(
        ("keys", "words"),
        [
            ({"url": f"https://{HOST}"}, "dns needs http"),
            ({"url": f"http://{HOST}", "kv_events": "tcp://h:1"}, "kv_events has one endpoint"),
        ],
    )
    def test_keys_that_a_name_excludes(self, keys: dict[str, Any], words: str) -> None:
        with pytest.raises(InputError, match=words):
            load_config(None, {"backends": [{"dns": True, **keys}]}, {})


class TestFile:
    def load(self, path: Path, **keys: Any) -> Config:
        return load_config(None, {"backends_file": str(path), **keys}, {})

    def test_its_servers_are_added(self, tmp_path: Path) -> None:
        path = tmp_path / "servers.json"
        for wrapped in (False, True):
            listed = [{"name": "x", "url": "http://127.0.0.1:2"}]
            path.write_text(json.dumps({"backends": listed} if wrapped else listed))
            config = self.load(path, backends=[{"url": "http://127.0.0.1:1"}])
            assert [b.name for b in config.backends] == ["gpu0", "x"]
        path.write_text("[]")
        assert self.load(path).backends == ()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (None, "No such file"),
            ("", "empty; give [] for no backend"),
            ("a: [", "not valid YAML"),
            ("a: 1", "give a list of backends"),
            ("- {url: nowhere}", "backends.0.url"),
            ("- {uri: x}", "unknown key; did you mean url"),
        ],
    )
    def test_mistakes_in_a_list_of_servers(
        self, tmp_path: Path, text: str | None, words: str
    ) -> None:
        path = tmp_path / "servers.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError, match=r"servers\.yaml") as refused:
            self.load(path)
        assert words in str(refused.value)

    async def test_a_change_is_applied(self, tmp_path: Path) -> None:
        path = tmp_path / "servers.yaml"

        def write(**urls: str) -> None:
            path.write_text(json.dumps([{"name": n, "url": url} for n, url in urls.items()]))

        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(RawBackend().running())
            two = await stack.enter_async_context(RawBackend().running())
            write(one=one.url)
            keys: dict[str, Any] = {"listen": {"port": 0, "admin_port": 0}}
            on = await stack.enter_async_context(
                stage(
                    [], wait_up=1, backends_file=str(path),
                    load=lambda: self.load(path, debug_headers=True, **keys),
                )
            )  # fmt: skip
            assert servers(on) == {"one"}
            write(one=one.url, two=two.url)
            await asyncio.sleep(3)
            assert servers(on) == {"one", "two"}
            path.write_text("- {url: nowhere}")
            await asyncio.sleep(3)
            assert on.proxy.reloader.message.startswith("reload failed")
            path.unlink()
            await asyncio.sleep(3)
            assert "No such file" in on.said[-1]
            assert servers(on) == {"one", "two"}
            write(two=two.url)
            await asyncio.sleep(3)
            assert servers(on) == {"two"}
            async with on.post() as response:
                assert response.headers["x-forebay-backend"] == "two"

    def test_of_too_many_addresses_the_first_ones_are_used(self) -> None:
        dns = {"name": "a", "url": f"http://{HOST}:8000", "dns": True, "max_addresses": 3}
        config = load_config(None, {"backends": [dns]}, {})
        said = Said()
        discovery = Discovery(said)
        discovery._found = {HOST: tuple(f"10.0.0.{i}" for i in range(100, 200))}
        for _ in range(3):
            found = discovery.expand(config).backends
            assert [b.name for b in found] == ["a-10.0.0.100", "a-10.0.0.101", "a-10.0.0.102"]
        (line,) = said
        assert "has 100 addresses: the first 3 are used" in line
        with pytest.raises(InputError, match="max_addresses"):
            load_config(None, {"backends": [dns | {"max_addresses": 0}]}, {})
