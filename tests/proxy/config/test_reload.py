"""The configuration changes while requests run: whole or not at all, and no request fails."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import yaml
from fakes.faulty_backends import busy
from said import Said
from stages.proxy_stage import (
    DONE,
    EVENT,
    SHARED_LOOP,
    STREAM_HEAD,
    Call,
    RawBackend,
    Stage,
    chunk,
    on_stage,
    settle,
    stage,
)

from forebay.proxy.backends.failures import Failure
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.config.diff import IN_PLACE, NEEDS_RESTART, NEEDS_RESTART_IN_CAPTURE, changes
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.core.changes import OperatorChanges
from forebay.proxy.core.health import ANY
from forebay.proxy.http1.errors import upstream_error
from forebay.proxy.security import keys as keys_module
from forebay.proxy.security.keys import KeyRing
from forebay.proxy.serve import start_proxy

ONE = {"backends": [{"name": "a", "url": "http://127.0.0.1:1"}]}


def config(**keys: Any) -> Config:
    return load_config(None, {**ONE, **keys}, {})


def test_every_key_is_either_changed_in_place_or_needs_a_restart() -> None:
    whole = {key for key in NEEDS_RESTART if "." not in key}
    assert set(Config.model_fields) == IN_PLACE | whole
    assert not IN_PLACE & whole
    for key in (NEEDS_RESTART | NEEDS_RESTART_IN_CAPTURE) - whole:
        section, name = key.split(".")
        assert section in IN_PLACE
        assert name in type(getattr(config(), section)).model_fields


def test_changed_keys_are_found_and_those_that_need_a_restart_kept() -> None:
    old = config(listen={"port": 1}, limits={"header": "16KiB"}, timeouts={"idle": "60s"})
    new = config(
        listen={"port": 2},
        limits={"header": "8KiB", "body": "1MiB"},
        timeouts={"idle": "5s"},
        debug_headers=True,
    )
    found = changes(old, new)
    assert set(found.keys) == {"limits.body", "timeouts.idle", "debug_headers"}
    assert set(found.restart) == {"listen", "limits.header"}
    assert found.config.listen.port == 1
    assert (found.config.limits.header, found.config.limits.body) == (16 << 10, 1 << 20)
    assert found.config.timeouts.idle == 5.0
    assert changes(found.config, found.config).keys == ()


def test_a_capture_that_runs_keeps_the_length_of_its_blocks() -> None:
    other: Any = {"affinity": {"block_bytes": 4096, "kv_tokens": 9_000}}
    capture: Any = {"capture": {"path": "traffic.jsonl"}}
    found = changes(config(**capture), config(**capture, **other))
    assert (found.keys, found.restart) == (("affinity.kv_tokens",), ("affinity.block_bytes",))
    assert found.config.affinity.block_bytes == config().affinity.block_bytes
    assert found.config.affinity.kv_tokens == 9_000
    for before, after in (({}, {}), ({}, capture)):  # none, and one that only a restart begins
        found = changes(config(**before), config(**after, **other))
        assert "affinity.block_bytes" in found.keys
        assert found.config.affinity.block_bytes == 4096
    found = changes(config(**capture), config(**other))  # nor does only writing it out end one
    assert set(found.restart) == {"capture", "affinity.block_bytes"}


def test_a_port_is_not_switched_to_tls_but_takes_other_files() -> None:
    plain, old = config(), config(tls={"cert": "a.pem", "key": "a.key"})
    new = config(tls={"cert": "b.pem", "key": "a.key"}, upstream_tls={"verify": False})
    found = changes(old, new)
    assert (found.keys, found.restart) == (("tls.cert",), ("upstream_tls",))
    assert (found.config.tls, found.config.upstream_tls) == (new.tls, old.upstream_tls)
    for before, after in ((plain, old), (old, plain)):
        found = changes(before, after)
        assert (found.keys, found.restart, found.config) == ((), ("tls",), before)


def test_backends_are_added_moved_resized_and_removed() -> None:
    def with_backends(*backends: tuple[str, int, int]) -> Config:
        return config(
            backends=[
                {"name": n, "url": f"http://h:{p}", "max_concurrency": c} for n, p, c in backends
            ]
        )

    found = changes(
        with_backends(("stays", 1, 1), ("moves", 2, 1), ("grows", 3, 1), ("goes", 4, 1)),
        with_backends(("stays", 1, 1), ("moves", 5, 1), ("grows", 3, 2), ("comes", 6, 1)),
    )
    assert [b.name for b in found.added] == ["comes"]
    assert [b.name for b in found.moved] == ["moves"]
    assert [b.name for b in found.resized] == ["grows"]
    assert found.removed == ("goes",)


class Files:
    """A configuration file that a test writes."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "proxy.yaml"

    def write(self, urls: dict[str, str], **keys: Any) -> None:
        backends = [{"name": name, "url": url} for name, url in urls.items()]
        listen = {"port": 0, "admin_port": 0}
        self.path.write_text(
            yaml.safe_dump(
                {
                    "listen": listen,
                    "backends": backends,
                    "debug_headers": True,
                    "limits": SHARED_LOOP,
                    **keys,
                }
            )
        )

    def load(self) -> Config:
        return load_config(self.path, {}, {})


class Held:
    """A backend whose streams go on until the test ends them."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(EVENT))
        await self.end.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")


STREAM = {"prompt": "hello", "stream": True, "max_tokens": 3}


@asynccontextmanager
async def two_backends(
    tmp_path: Path, configured: int
) -> AsyncIterator[tuple[Files, Held, RawBackend, RawBackend, Stage]]:
    """A proxy that knows the first, or both, of a backend that streams on and one that does not."""
    files, held = Files(tmp_path), Held()
    async with RawBackend(held).running() as first, RawBackend().running() as second:
        urls = [first.url, second.url][:configured]
        async with stage(urls, load=files.load) as on:
            yield files, held, first, second, on


async def test_a_backend_is_replaced_while_it_streams(tmp_path: Path) -> None:
    async with two_backends(tmp_path, 1) as (files, held, _, new, on):
        shaper = on.proxy.driver.shaper
        async with on.post(STREAM) as streaming:
            assert streaming.headers["x-forebay-backend"] == "b0"
            files.write({"b1": new.url}, buckets=[{"name": "all", "up_to": 9000}])
            assert await on.proxy.reloader.reload() == "applied"
            assert on.proxy.app.ready
            assert list(shaper.backends) == ["b0", "b1"]
            async with on.post() as answer:
                assert answer.status == 200
                assert answer.headers["x-forebay-backend"] == "b1"
                assert answer.headers["x-forebay-bucket"] == "all"
            await asyncio.sleep(5)
            assert "b0" in shaper.backends
            held.end.set()
            assert (await streaming.read()).endswith(DONE)
        await asyncio.sleep(1)
        assert list(shaper.backends) == list(on.proxy.backends.links) == ["b1"]
        assert "backend b0 is removed" in on.said
        assert on.proxy.reloader.generation == 1
        on.assert_nothing_held()


async def test_a_backend_that_goes_and_comes_back_before_it_is_gone(tmp_path: Path) -> None:
    async with two_backends(tmp_path, 2) as (files, held, first, other, on):
        async with on.post(STREAM) as streaming:
            assert streaming.headers["x-forebay-backend"] == "b0"
            files.write({"b1": other.url})
            await on.proxy.reloader.reload()
            files.write({"b0": first.url, "b1": other.url})
            await on.proxy.reloader.reload()
            held.end.set()
            await streaming.read()
        await asyncio.sleep(1)
        assert [b.up for b in on.proxy.driver.shaper.backends.values()] == [True, True]
        assert "backend b0 is removed" not in on.said


async def test_a_backend_moves_to_another_address(tmp_path: Path) -> None:
    async with two_backends(tmp_path, 1) as (files, held, old, new, on):
        async with on.post(STREAM) as streaming:
            files.write({"b0": new.url})
            assert await on.proxy.reloader.reload() == "applied"
            assert await on.status() == 200
            assert (len(old.calls), len(new.calls)) == (1, 1)
            held.end.set()
            assert (await streaming.read()).endswith(DONE)
        files.write({"b0": "http://127.0.0.1:9"})
        await on.proxy.reloader.reload()
        assert await on.status() == 503
        on.assert_nothing_held()


async def test_waiting_requests_go_on_waiting_under_the_new_rules(tmp_path: Path) -> None:
    files, held = Files(tmp_path), Held()
    async with on_stage(held, slots=1, load=files.load) as (on, (backend,)):
        streams = [asyncio.create_task(_read(on.post(STREAM))) for _ in range(2)]
        await settle()
        assert on.proxy.driver.shaper.queued("chat") == 1
        files.write({"b0": backend.url}, buckets=[{"name": "new", "up_to": 9000}])
        await on.proxy.reloader.reload()  # and max_concurrency is the default now
        await settle()
        assert backend.open == 2
        held.end.set()
        assert await asyncio.gather(*streams) == [200] * 2


async def _read(request: Any) -> int:
    async with request as answer:
        await answer.read()
        return int(answer.status)


async def test_a_configuration_that_is_being_written_waits(tmp_path: Path) -> None:
    """Every part of it would be valid: only the last has all."""
    files = Files(tmp_path)
    async with RawBackend().running() as backend:
        files.write({"b0": backend.url})
        async with stage([backend.url], load=files.load, watch=files.path) as on:
            for idle_s in range(50, 40, -1):
                files.write({"b0": backend.url}, timeouts={"idle": f"{idle_s}s"})
                await asyncio.sleep(0.4)
                assert on.proxy.reloader.generation == 0
            await asyncio.sleep(2)
            assert on.proxy.reloader.generation == 1
            assert on.proxy.reloader.config.timeouts.idle == 41.0


@pytest.mark.parametrize("ask", ["file", "signal"])
async def test_a_bad_file_changes_nothing_and_a_good_one_is_taken(tmp_path: Path, ask: str) -> None:
    files = Files(tmp_path)
    async with RawBackend().running() as backend:
        files.write({"b0": backend.url})
        watch = files.path if ask == "file" else None
        async with stage([backend.url], load=files.load, watch=watch) as on:
            before = on.proxy.reloader.config

            async def changed(write: Callable[[], object]) -> str:
                write()
                if ask == "signal":
                    on.proxy.reloader.request()
                await asyncio.sleep(5)
                return on.proxy.reloader.message

            said = await changed(lambda: files.path.write_text("timeouts: {idle: soon}"))
            assert said.startswith("reload failed, keeping the running one: ")
            assert "timeouts.idle: 'soon': give a duration such as 2s" in said
            assert on.proxy.reloader.config is before
            if ask == "file":
                said = await changed(files.path.unlink)
                assert "'soon'" in said
            said = await changed(
                lambda: files.write(
                    {"b0": backend.url}, timeouts={"idle": "7s"}, metrics={"hlog": "x.hlog"}
                )
            )
            assert said == "reloaded (timeouts.idle); changes to metrics need a restart"
            assert on.proxy.reloader.config.timeouts.idle == 7.0
            text = on.proxy.metrics.text().decode()
            for result, count in (("failed", 1), ("partly", 1), ("applied", 0)):
                assert f'config_reloads_total{{result="{result}"}} {count}.0' in text
            async with on.client.post(f"{on.proxy.admin_url}/reload") as answer:
                assert answer.status == 200
                assert (await answer.text()).startswith(
                    "partly: changes to metrics need a restart; nothing else changed"
                )
            status = await on.told("/status")
            assert status["config"]["generation"] == 1
            assert status["config"]["needs_restart"] == ["metrics"]
            assert set(status["versions"]) == {"forebay", "python", "aiohttp"}


async def test_keys_come_with_the_configuration_or_it_does_not_come(tmp_path: Path) -> None:
    files, keys = Files(tmp_path), tmp_path / "keys"
    async with on_stage(None, load=files.load) as (on, (backend,)):

        async def reload(text: str | None, **tenants: Any) -> tuple[str, list[int]]:
            if text is None:
                keys.unlink(missing_ok=True)
            else:
                keys.write_text(text)
            files.write({"b0": backend.url}, tenants=tenants, reject_status=503)
            result = await on.proxy.reloader.reload()
            statuses = []
            for key in ("first-key-of-tests", "other-key-of-tests", "none"):
                async with on.post(headers={"authorization": f"Bearer {key}"}) as answer:
                    statuses.append(answer.status)
            return result, statuses

        open_to_all, one = [200, 200, 200], [200, 401, 401]
        both, source = "acme: first-key-of-tests\nbolt: other-key-of-tests", str(keys)
        assert await reload(None, keys=source) == ("failed", open_to_all)
        assert "tenants.keys: cannot read" in on.proxy.reloader.message
        assert on.proxy.reloader.config.reject_status == 429
        assert await reload("acme: first-key-of-tests", keys=source) == ("applied", one)
        assert on.proxy.reloader.message == "reloaded (tenants.keys, reject_status)"
        assert await reload("acme first-key-of-tests", keys=source) == ("failed", one)
        assert await reload(both, keys=source) == ("unchanged", [200, 200, 401])
        assert "using the new keys and certificate; 2 API keys of 2 tenants" in on.said
        old = on.proxy.security.salts
        known = {"acme": {"trust_group": "rag"}, "bolt": {"trust_group": "rag"}}
        assert await reload(both, keys=source, known=known) == ("applied", [200, 200, 401])
        salts = on.proxy.security.salts
        assert old is not None
        assert salts is not None
        assert salts.salt("acme") == salts.salt("bolt") != old.salt("acme")
        assert await reload(both, keys=source, isolate_cache=False) == (
            "applied", [200, 200, 401],
        )  # fmt: skip
        assert on.proxy.security.salts is None
        assert await reload(None) == ("applied", open_to_all)
        assert not any("of-tests" in line for line in on.said)


async def test_a_reload_goes_on_when_its_client_hangs_up(tmp_path: Path) -> None:
    """The reload waits for a new backend's first answer, which does not come."""
    async with two_backends(tmp_path, 1) as (files, _, first, second, on):
        second.healthy = None
        files.write({"b0": first.url, "b1": second.url}, reject_status=503)
        asking = asyncio.create_task(_read(on.client.post(f"{on.proxy.admin_url}/reload")))
        await settle()
        assert second.connections == 1
        assert on.proxy.reloader.generation == 0
        probes = dict(on.proxy.backends.prober.tasks)
        asking.cancel()
        await asyncio.wait([asking])
        await settle()
        assert await on.proxy.reloader.reload() == "unchanged"
        assert on.proxy.reloader.generation == 1
        assert on.proxy.app._config.reject_status == 503
        assert on.proxy.backends.prober.tasks == probes
        assert [line for line in on.said if line.startswith("configuration")] == [
            "configuration reloaded (backends, reject_status)",
            "configuration unchanged",
        ]


async def test_a_fault_of_ours_is_said_and_the_next_change_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Config:
        raise KeyError("no such key")

    files = Files(tmp_path)
    async with RawBackend().running() as backend:
        files.write({"b0": backend.url})
        async with stage([backend.url], load=files.load, watch=files.path) as on:
            with monkeypatch.context() as patch:
                patch.setattr(on.proxy.reloader, "_load", broken)
                on.proxy.reloader.request()
                await asyncio.sleep(1)
            assert on.said[-1] == (
                "configuration only partly reloaded: internal error: KeyError; restart the proxy"
            )
            assert 'config_reloads_total{result="failed"} 1.0' in (on.proxy.metrics.text().decode())
            files.write({"b0": backend.url}, timeouts={"idle": "7s"})
            await asyncio.sleep(5)
            assert on.proxy.reloader.message == "reloaded (timeouts.idle)"


CACHE = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'


def kv_tokens(on: Stage) -> float:
    return on.proxy.driver.shaper.backends["b0"].kv_tokens


async def pauses(on: Stage) -> None:
    """The backend reports that it is full, and is used again after a moment."""
    assert await on.status() == 503
    await asyncio.sleep(10)
    assert on.proxy.driver.shaper.backends["b0"].most_prefills == ANY


HYBRID = CACHE.replace(b'"100"', b'"100",kv_cache_size_tokens="400"')


class TestKvSize:
    async def test_a_configured_one_is_in_force_and_stays(self, tmp_path: Path) -> None:
        files, backend = Files(tmp_path), RawBackend(busy, metrics=CACHE)
        async with backend.running(), stage([backend.url], load=files.load) as on:
            assert kv_tokens(on) == 1600
            for size in (5000, 3000):
                files.write({"b0": backend.url}, affinity={"kv_tokens": size})
                assert await on.proxy.reloader.reload() == "applied"
                assert kv_tokens(on) == size
                await pauses(on)
                assert kv_tokens(on) == size

    @pytest.mark.parametrize(
        ("said", "size"),
        [
            (CACHE, 1600), (HYBRID, 400), (HYBRID.replace(b'"400"', b'"None"'), 1600),
            (CACHE.replace(b'"100"', b'"None"'), inf), (b"", inf), (None, inf),
        ],
        ids=["said", "groups", "groups unknown", "not profiled", "not said", "no answer"],
    )  # fmt: skip
    async def test_auto_asks_the_engine_again(
        self, tmp_path: Path, said: bytes | None, size: float
    ) -> None:
        files, backend = Files(tmp_path), RawBackend(busy, metrics=said)
        async with (
            backend.running(),
            stage([backend.url], load=files.load, affinity={"kv_tokens": 5000}) as on,
        ):
            assert (kv_tokens(on), backend.metrics_asked) == (5000, 0)
            files.write({"b0": backend.url})
            assert await on.proxy.reloader.reload() == "applied"
            await asyncio.sleep(3)
            assert (kv_tokens(on), backend.metrics_asked) == (size, 1)
            await pauses(on)
            assert kv_tokens(on) == size

    async def test_a_backend_that_did_not_tell_at_its_start_is_asked_again(self) -> None:
        backend = RawBackend(metrics=None)
        async with backend.running(), stage([backend.url]) as on:
            await asyncio.sleep(20)
            assert (kv_tokens(on), backend.metrics_asked) == (inf, 1)
            backend.metrics = CACHE
            await asyncio.sleep(20)
            assert (kv_tokens(on), backend.metrics_asked) == (1600, 2)
            assert on.said == ["backend b0 is up", "backend b0 has a KV cache of 1,600 tokens"]
            await asyncio.sleep(100)
            assert backend.metrics_asked == 2

    async def test_a_backend_may_come_back_with_another_size(self) -> None:
        """Even if the first good probe is the first probe since it went down."""
        backend = RawBackend(metrics=CACHE)
        async with backend.running(), stage([backend.url]) as on:
            backend.metrics = CACHE.replace(b"100", b"50")
            for _ in range(3):
                on.proxy.backends.failed(
                    "b0", "", Failure("connect", upstream_error(), verdict="refused"), [], ""
                )
            await asyncio.sleep(5)
            assert on.said[-1] == "backend b0 is up, KV cache of 800 tokens"
            assert kv_tokens(on) == 800

    async def test_a_backend_that_comes_back_and_does_not_tell_keeps_its_size(self) -> None:
        backend = RawBackend(metrics=CACHE)
        async with backend.running(), stage([backend.url]) as on:
            backend.healthy = False
            await asyncio.sleep(5)
            backend.healthy, backend.metrics = True, b""
            await asyncio.sleep(5)
            assert on.said[-1] == "backend b0 is up, KV cache of 1,600 tokens"
            assert kv_tokens(on) == 1600
            backend.metrics = CACHE.replace(b"100", b"50")
            await asyncio.sleep(40)
            assert kv_tokens(on) == 800

    async def test_an_answer_to_an_earlier_question_does_not_undo_a_reload(
        self, tmp_path: Path
    ) -> None:
        files, backend, told = Files(tmp_path), RawBackend(metrics=b""), asyncio.Event()
        async with backend.running(), stage([backend.url], load=files.load) as on:
            real = on.proxy.backends.prober.get

            async def late(
                link: BackendLink, path: str, headers: object = None
            ) -> tuple[int, bytes]:
                if path == "/metrics":
                    await told.wait()
                    return 200, CACHE
                return await real(link, path)

            on.proxy.backends.prober.get = late  # type: ignore[method-assign]
            await asyncio.sleep(40)  # it is asked again
            files.write({"b0": backend.url}, affinity={"kv_tokens": 5000})
            assert await on.proxy.reloader.reload() == "applied"
            told.set()
            await asyncio.sleep(5)
            assert kv_tokens(on) == 5000


async def fault_of_ours(*_: object) -> Any:
    raise KeyError("no such key")


async def test_a_fault_of_ours_in_a_probe_is_a_failed_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload that adds a backend or moves one ends, and both are taken in afterwards."""

    async with two_backends(tmp_path, 1) as (files, _, first, second, on):
        with monkeypatch.context() as patch:
            patch.setattr(on.proxy.backends.prober, "get", fault_of_ours)
            files.write({"b0": second.url, "b1": first.url})
            async with asyncio.timeout(60):
                assert await on.proxy.reloader.reload() == "applied"
            await asyncio.sleep(10)  # many probes
            assert not on.proxy.backends.any_up()
            why = "internal error: KeyError"
            assert f"backend b0 is unreachable at its new address ({why})" in on.said
            for name in ("b0", "b1"):
                assert on.said.count(f"backend {name} cannot be probed: {why}") == 1
        await asyncio.sleep(2)
        assert all(link.up for link in on.proxy.backends.links.values())


async def test_a_fault_of_ours_after_a_probe_does_not_end_the_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with on_stage(None) as (on, (backend,)):
        with monkeypatch.context() as patch:
            patch.delattr(type(on.proxy.backends.health), "look_for_gray")
            await asyncio.sleep(10)
            said = "backend b0 cannot be probed: internal error: AttributeError"
            assert on.said.count(said) == 1
        backend.healthy = False
        await asyncio.sleep(5)
        assert "backend b0 is down (health 503)" in on.said


@pytest.mark.parametrize("turns", range(6))
async def test_stopped_in_the_turn_in_which_it_is_asked_to_reload(turns: int) -> None:
    async with on_stage(None) as (on, _):
        await settle()
        on.proxy.reloader.request()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await on.proxy.reloader.__aexit__()


@pytest.mark.parametrize("turns", range(6))
async def test_a_backend_that_leaves_in_the_turn_in_which_it_is_poked_is_asked_no_more(
    turns: int,
) -> None:
    async with on_stage(None) as (on, _):
        await settle()
        backends = on.proxy.backends
        probe = backends.prober.tasks["b0"]
        backends.links["b0"].poke.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        backends.leave("b0")
        await settle()
        assert probe.cancelled()


async def test_without_a_file_there_is_nothing_to_reload() -> None:
    async with (
        stage([], wait_up=0, backends=[{"url": "http://127.0.0.1:9"}]) as on,
        on.client.post(f"{on.proxy.admin_url}/reload") as answer,
    ):
        assert answer.status == 400
        assert "was not read from a file" in await answer.text()


@pytest.mark.real_time
async def test_files_are_read_in_a_thread_and_only_if_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 tenants stopped all streams for 0.8 s of processor time, changed or not."""
    files, keys, threads = Files(tmp_path), tmp_path / "keys", list[tuple[str, int]]()
    keys.write_text("acme: sk-of-tests-0123456789\n")
    parse = keys_module.parse_keys

    def load() -> Config:
        threads.append(("configuration", get_ident()))
        return files.load()

    def parse_keys(*arguments: Any) -> KeyRing:
        threads.append(("keys", get_ident()))
        return parse(*arguments)

    async with RawBackend().running() as backend:
        files.write({"b0": backend.url}, tenants={"keys": str(keys)})
        first = files.load()
        async with start_proxy(first, Said(), load=load, watch=files.path) as proxy:
            monkeypatch.setattr(keys_module, "parse_keys", parse_keys)
            results = []
            for text in ("", "", "bolt: sk-of-tests-9876543210\n", ""):
                keys.write_text(keys.read_text() + text)
                results.append(await proxy.reloader.reload())
            files.write({"b0": backend.url}, tenants={"keys": str(keys)}, reject_status=503)
            results.append(await proxy.reloader.reload())
    assert results == ["unchanged"] * 4 + ["applied"]
    assert [what for what, _ in threads] == ["configuration", "keys", "configuration"]
    assert get_ident() not in {thread for _, thread in threads}


async def test_a_file_whose_configuration_was_refused_is_tried_again(tmp_path: Path) -> None:
    files, keys = Files(tmp_path), tmp_path / "keys"
    async with RawBackend().running() as backend:
        files.write({"b0": backend.url})
        async with start_proxy(files.load(), Said(), load=files.load, watch=files.path) as proxy:
            files.write({"b0": backend.url}, tenants={"keys": str(keys)})
            assert await proxy.reloader.reload() == "failed"
            keys.write_text("acme: sk-of-tests-0123456789\n")
            assert await proxy.reloader.reload() == "applied"
            assert proxy.security.auth.tenants() == ("acme",)


async def test_many_backends_join_and_leave_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them did in one turn of the loop, in which no stream went on."""
    turn, turns = 0, list[int]()

    async def count() -> None:
        nonlocal turn
        for _ in range(1_000):  # then time goes on
            turn += 1
            await asyncio.sleep(0)

    def noted(change: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            turns.append(turn)
            return change(*arguments)

        return noting

    for name in ("add_backend", "drain_backend"):
        monkeypatch.setattr(OperatorChanges, name, noted(getattr(OperatorChanges, name)))
    async with two_backends(tmp_path, 1) as (files, _, first, _, on):
        for count_of in (12, 1):
            turns.clear()
            files.write({f"b{number}": f"{first.url}/{number}" for number in range(count_of)})
            counting = asyncio.ensure_future(count())
            assert await on.proxy.reloader.reload() == "applied"
            counting.cancel()
            assert len(turns) == len(set(turns)) == 11
