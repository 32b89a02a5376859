"""The prefix index of the proxy follows a (simulated) engine's KV events over real sockets."""

import asyncio
import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import yaml
import zmq
import zmq.asyncio
from aiohttp import web
from ports import free_ports
from said import Said
from stages.proxy_stage import SHARED_LOOP, Stage, stage

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.core.learn.engine_blocks import BlockTranslations
from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.kv_events.decode import chain_keys
from forebay.proxy.kv_events.follower import MOST_BYTES, Follower
from forebay.proxy.kv_events.tokenize import Translator
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.kv_events import KvEvents, KvEventsConfig
from forebay.replay.engine.server.kv_publisher import KvPublisher
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.traces.ground.errors import InputError

pytestmark = pytest.mark.real_time

WAIT_S = 120
POOL = 300  # blocks of 16 tokens: three documents of 1,500


@dataclass(slots=True)
class Scene:
    """A proxy that follows one engine; documents to ask about."""

    port: int
    events: str
    replay: str
    buffer_steps: int = 10_000
    binds: bool = True
    client: aiohttp.ClientSession = field(init=False)
    engine: RunningEngine = field(init=False)
    proxy: Stage = field(init=False)
    engine_stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start_engine(self) -> None:
        endpoint = self.events.replace("127.0.0.1", "*") if self.binds else self.events
        kv_events = KvEventsConfig(
            True, endpoint=endpoint, replay_endpoint=self.replay, topic="kv",
            buffer_steps=self.buffer_steps,
        )  # fmt: skip
        config = EngineConfig(
            seed=1, time_scale=1_000.0, num_gpu_blocks_override=POOL, max_model_len=4_096
        )
        options = ServerOptions(
            kv_events_config=json.dumps(asdict(kv_events)),
            server_dev_mode=True,
            enable_prompt_tokens_details=True,
        )
        self.engine = await self.engine_stack.enter_async_context(
            start_engine(config, port=self.port, options=options)
        )

    async def stop_engine(self) -> None:
        await self.engine_stack.aclose()

    @property
    def backend(self) -> Backend:
        return self.proxy.proxy.driver.shaper.backends["b0"]

    @property
    def mode(self) -> str:
        return self.backend.cache.mode

    async def ask(self, document: int, question: str, *, url: str | None = None) -> int:
        """Ask about a document; return the cached prompt tokens that the engine reports."""
        text = f"{text_of(document)} {question}"
        body = {"prompt": text, "max_tokens": 4, "ignore_eos": True}
        target = (url or self.proxy.url) + "/v1/completions"
        async with self.client.post(target, json=body) as response:
            assert response.status == 200, await response.text()
            usage = (await response.json())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def registered(self) -> int:
        """Blocks that a prompt could hit in the engine."""
        pool = self.engine.core.pool
        return sum(pool.hash_of(block) is not None for block in range(1, POOL))

    async def subscribed(self) -> None:
        """Wait until the engine knows of its follower: what is published before is lost."""
        while not ONE.publisher._pub.poll(0):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def heard(self) -> None:
        """Wait until the index has the engine's blocks, and what was asked is translated."""
        held, translator = self.backend.cache.engine_blocks, self.proxy.proxy.app._relay.translator
        assert held is not None
        assert translator is not None
        while (  # noqa: ASYNC110
            ONE.follower._next != ONE.publisher._sent
            or self.engine.core.pool.observer._events  # type: ignore[union-attr]
            or not translator.idle
        ):
            await asyncio.sleep(0.005)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class ONE:
    """The follower and the publisher of the test that runs."""

    follower: Follower
    publisher: KvPublisher


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(kind: type, name: str) -> None:
        init = kind.__init__  # type: ignore[misc]

        def wrapped(self: Any, *args: Any) -> None:
            setattr(ONE, name, self)
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", wrapped)

    keep(Follower, "follower")
    keep(KvPublisher, "publisher")
    monkeypatch.setattr(zmq, "PUB", zmq.XPUB)  # the same, and it can be asked who has subscribed


def text_of(document: int) -> str:
    """6,000 bytes, 1,500 tokens of the simulated tokenizer."""
    rng = random.Random(document)
    return " ".join(str(rng.randrange(10**6, 10**7)) for _ in range(750))


@asynccontextmanager
async def following(
    *,
    replay: bool = True,
    wildcard_here: bool = False,
    before: Sequence[int] = (),
    tenants: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    """`before`: documents the engine is asked about when nobody follows it yet."""
    port, events, replays = free_ports(3)
    scene = Scene(port, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replays}", **options)
    scene.binds = not wildcard_here
    ours = scene.events.replace("127.0.0.1", "*") if wildcard_here else scene.events
    backend = {"name": "b0", "url": f"http://127.0.0.1:{port}", "kv_events": ours}
    if replay:
        backend["kv_replay"] = scene.replay
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        stack.push_async_callback(scene.stop_engine)
        await scene.start_engine()
        scene.client = await stack.enter_async_context(aiohttp.ClientSession())
        for document in before:
            await scene.ask(document, "directly", url=scene.engine.url)
        staged = stage(
            [backend["url"]],
            backends=[backend],
            tenants=tenants or {},
            health={"timeout": "30s", "interval": "100ms"},
        )
        scene.proxy = await stack.enter_async_context(staged)
        await scene.subscribed()
        yield scene


async def warmed(scene: Scene) -> None:
    """Every document has been asked about twice, so that it is known where questions part."""
    for question in ("first", "second", "third"):
        for document in range(6):
            await scene.ask(document, question)
            await scene.heard()


async def predicted_is_reported(scene: Scene, seed: int, count: int = 40) -> list[int]:
    """Ask at random; each prediction must equal the engine's report. Returns the cached tokens."""
    rng, told = random.Random(seed), []
    for number in range(count):
        before = scene.backend.cache.error.absolute_tokens
        told.append(await scene.ask(rng.randrange(6), f"question {number}"))
        await scene.heard()
        assert scene.backend.cache.error.absolute_tokens == before, (number, told)
    return told


@pytest.mark.parametrize("wildcard_here", [False, True])
async def test_under_eviction_the_prediction_is_what_the_engine_reports(
    wildcard_here: bool,
) -> None:
    async with following(wildcard_here=wildcard_here) as scene:
        await scene.until(lambda: scene.mode == "exact")
        await warmed(scene)
        told = await predicted_is_reported(scene, 1)
        assert min(told) == 0  # whole documents were evicted
        assert max(told) > 1_400
        assert len(set(told)) > 3  # and parts of others
        (status,) = scene.proxy.proxy.driver.shaper.backends.values()
        admin = scene.proxy.proxy.admin_url
        async with scene.proxy.client.get(f"{admin}/status") as response:
            (shown,) = (await response.json())["backends"]
        assert shown["prefix_index"]["mode"] == "exact"
        assert shown["prefix_index"]["paths"] == {
            "/v1/chat/completions": "exact",
            "/v1/completions": "exact",
            "/v1/responses": "corrected",
            "/v1/messages": "corrected",
        }
        assert shown["prefix_index"]["answers"] == status.cache.error.answers
        async with scene.proxy.client.get(f"{admin}/metrics") as response:
            text = await response.text()
        assert 'forebay_predicted_cached_tokens_total{backend="b0"} ' in text
        assert 'forebay_reported_cached_tokens_total{backend="b0"} ' in text


async def test_events_from_before_the_proxy_started_are_replayed() -> None:
    async with following(before=range(6)) as scene:
        await scene.heard()
        assert scene.mode == "exact"
        await warmed(scene)
        await predicted_is_reported(scene, 2, 10)


def drop(monkeypatch: pytest.MonkeyPatch, lost: set[int]) -> list[int]:
    """The batches of these numbers never arrive; returns the numbers of those that were.

    Counted from the first that arrived by itself: what came before was asked for.
    """
    live, dropped, first = Follower._live, list[int](), list[int]()

    async def lossy(self: Follower, number: int, payload: bytes) -> None:
        first.append(number)
        if number - first[0] in lost:
            dropped.append(number - first[0])
        else:
            await live(self, number, payload)

    monkeypatch.setattr(Follower, "_live", lossy)
    return dropped


async def test_lost_messages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = drop(monkeypatch, {5, 6, 7, 12, 20, 21})

    async with following() as scene:
        number = 0
        while len(dropped) < 6:
            await scene.ask(number % 6, f"question {number}")
            number += 1
        await scene.ask(0, "the one that tells of the last gap")
        await scene.heard()
        assert dropped == [5, 6, 7, 12, 20, 21]
        assert scene.mode == "exact"
        assert not [line for line in scene.proxy.said if "lost" in line]


@pytest.mark.parametrize("replay", [False, True])
async def test_lost_events_end_exactness_until_the_cache_is_cleared(
    monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    dropped = drop(monkeypatch, set(range(5, 12)))

    async with following(replay=replay, buffer_steps=3) as scene:
        for number in range(5):
            await scene.ask(number, "question")
        await scene.until(lambda: scene.mode == "exact")
        for number in range(5, 16):
            await scene.ask(number % 3, f"question {number} about it")
            if number == 12:
                await scene.until(lambda: scene.mode == "corrected")
        assert dropped
        assert [line for line in scene.proxy.said if "are lost" in line]
        reset = scene.engine.url + "/reset_prefix_cache"
        async with scene.proxy.client.post(reset) as response:
            assert (await response.json())["success"]
        await scene.ask(0, "again")
        await scene.heard()
        assert scene.mode == "exact"
        await warmed(scene)
        await predicted_is_reported(scene, 3, 10)


async def test_unknown_blocks_are_gone_once_the_pool_is_full_of_known_ones() -> None:
    async with following(replay=False, before=[100]) as scene:
        assert scene.mode == "believed"
        for number in range(4):
            await scene.ask(number, "question")
        await scene.heard()
        assert scene.mode == "exact"


async def test_a_restarted_engine_is_known_by_its_numbers() -> None:
    async with following() as scene:
        await warmed(scene)
        before = len(scene.proxy.said)
        await scene.stop_engine()
        up = scene.proxy.proxy.backends.links["b0"]
        await scene.until(lambda: not up.up)
        assert scene.mode == "believed"  # whatever it holds when it comes back
        await scene.start_engine()
        await scene.until(lambda: up.up)
        assert await scene.ask(0, "after all") == 0
        await scene.heard()
        assert scene.mode == "exact"
        assert [line for line in scene.proxy.said[before:] if "restarted" in line]
        await warmed(scene)
        await predicted_is_reported(scene, 4, 10)


@pytest.mark.parametrize("heard_live", [False, True])
@pytest.mark.parametrize("more", [0, 30])
async def test_a_restart_while_nobody_listened_is_known_by_the_last_batch(
    heard_live: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was known was replayed, or the new engine's numbers have passed the old one's."""
    monkeypatch.setattr("forebay.proxy.kv_events.follower.QUIET_S", 0.1)

    async with following(before=range(6)) as scene:
        if heard_live:
            await scene.ask(0, "through the proxy")
        await scene.heard()
        assert scene.mode == "exact"
        with monkeypatch.context() as deaf:
            drop(deaf, set(range(1_000)))
            await scene.stop_engine()
            await scene.until(lambda: not scene.backend.up)
            await scene.start_engine()
            for number in range(more):
                await scene.ask(number % 6, f"directly {number}", url=scene.engine.url)
        await scene.until(lambda: scene.backend.up)
        await warmed(scene)
        await predicted_is_reported(scene, 6, 10)
        assert scene.mode == "exact"


async def test_a_reload_follows_who_comes_moves_and_leaves(tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"

    def load() -> Config:
        return load_config(path, {}, {})

    def write(*backends: dict[str, str]) -> None:
        listen = {"port": 0, "admin_port": 0}
        keys = {"listen": listen, "limits": SHARED_LOOP, "backends": list(backends)}
        path.write_text(yaml.safe_dump(keys))

    first, second = (
        Scene(port, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replays}")
        for port, events, replays in (free_ports(3), free_ports(3))
    )
    one, two = (
        {"name": "b0", "url": f"http://127.0.0.1:{s.port}", "kv_events": s.events,
         "kv_replay": s.replay}
        for s in (first, second)
    )  # fmt: skip
    plain = {key: one[key] for key in ("name", "url")}
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        for scene in (first, second):
            stack.push_async_callback(scene.stop_engine)
            await scene.start_engine()
        staged = stage([one["url"]], backends=[plain], load=load)
        first.proxy = second.proxy = await stack.enter_async_context(staged)
        first.client = second.client = first.proxy.client
        reload = first.proxy.proxy.reloader.reload
        await first.ask(0, "before")
        assert first.backend.cache.engine_blocks is None

        write(one)  # KV events of a backend that was there
        assert await reload() == "applied"
        await first.until(lambda: first.mode == "exact")
        held = first.backend.cache.engine_blocks
        assert held is not None
        await first.until(lambda: len(held) == first.registered())
        assert len(held) > 90

        write({**one, "max_concurrency": 7})  # what it follows stays
        await reload()
        assert first.backend.cache.engine_blocks is held

        write(two)  # the same name at another address
        await reload()
        await second.until(lambda: second.mode == "exact")
        assert second.backend.cache.engine_blocks is not held
        assert not second.backend.cache.engine_blocks
        assert not len(second.backend.cache.prefixes)
        assert await second.ask(0, "moved") == 0
        await second.until(
            lambda: len(second.backend.cache.engine_blocks or ()) == second.registered()
        )
        assert second.registered() > 90
        size = len(held)
        await first.ask(1, "directly", url=first.engine.url)
        await second.ask(1, "another")
        assert len(held) == size  # nobody listens to the old one

        write({**one, "name": "b1"}, two)  # one more
        await reload()
        backends = first.proxy.proxy.driver.shaper.backends
        await first.until(lambda: backends["b1"].cache.mode == "exact")
        last = backends["b1"]
        await first.until(lambda: len(last.cache.engine_blocks or ()) == first.registered())

        write({**two, "kv_events": one["kv_events"].replace("127.0.0.1", "*")})
        await reload()  # b1 leaves; what b0 is to bind is taken by the engine of the other
        assert last.cache.engine_blocks is None
        assert second.mode != "exact"
        assert [line for line in first.proxy.said if "Address already in use" in line]
        await second.ask(1, "and still served")


@pytest.mark.parametrize("told", [0, 300])
def test_requests_to_a_server_that_is_gone_tell_nothing_of_the_new_one(told: int) -> None:
    spec = BackendSpec("a", 8, kv_tokens=1_000.0)
    shaper = Shaper([spec], [Bucket("all", 10_000)])
    shaper.backend_up("a", 0.0)
    backend = shaper.backends["a"]
    for name, at in (("x", 1.0), ("y", 2.0)):
        shaper.arrive(Request(name, 301, 0, (1, 2, 3), 100.0), at)
        shaper.first_token(name, at + 0.1)
    shaper.changes.change_backend(spec, 3.0, moved=True)
    shaper.used("y", 1, 4.0, told, 301)
    assert (backend.cache.kept, backend.cache.reports, backend.cache.error.answers) == (
        1.0,
        False,
        0,
    )
    assert backend.matched_tokens(Request("z", 301, 0, (1, 2, 3), 100.0)) == 0


@asynccontextmanager
async def translating(
    translations: BlockTranslations, said: Said
) -> AsyncIterator[Callable[[bytes, Request], None]]:
    """A translator at work without an engine; offer it prompts of token ids."""
    url = "http://127.0.0.1:1"
    link = BackendLink(BackendConfig(name="b0", url=url), Origin(url, 1.0))
    backends = SimpleNamespace(links={link.name: link})
    translator = Translator(cast(Any, backends), translations, 2_048, said)

    def offer(body: bytes, request: Request) -> None:
        asked = cast(Any, SimpleNamespace(request=request, prompt_bytes=0))
        translator.offer(body, asked, link)

    task = asyncio.create_task(translator.run())
    yield offer
    task.cancel()


async def known(translations: BlockTranslations, request: Request) -> None:
    async with asyncio.timeout(WAIT_S):
        while not translations.known(request.blocks):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_salt_that_counts_is_the_one_that_was_sent() -> None:
    """The proxy's own is spliced in behind the client's: the last of equal keys counts."""
    ids = list(range(65))
    request = Request("x", 65, 0, (1, 2), 32.0)
    body = json.dumps({"prompt": ids, "cache_salt": "client's"})[:-1] + ',"cache_salt":"ours"}'

    translations = BlockTranslations(16)
    async with translating(translations, Said()) as offer:
        offer(body.encode(), request)
        await known(translations, request)
    keys = list(translations.place(1).keys)
    assert keys == chain_keys(ids[:64], 16, extra_keys=[["ours"]])
    assert keys[0] != chain_keys(ids[:64], 16)[0]


DEEP = b"[" * 300 + b"]" * 300
CHAT = b'{"messages":[{"role":"user","content":"x"}]'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (CHAT + b',"chat_template_kwargs":' + DEEP + b"}", []),
        (b'{"prompt":"x","messages":5}', []),
        (b'{"prompt":"x","messages":["y"]}', []),
        (b'"no object"', ["a prompt was not tokenised: internal error: AttributeError"]),
    ],
)
async def test_a_prompt_that_cannot_be_translated_holds_up_no_other(
    body: bytes, says: list[str]
) -> None:
    translations, said = BlockTranslations(16), Said()
    odd, good = Request("x", 65, 0, (1, 2), 32.0), Request("y", 65, 0, (3, 4), 32.0)
    async with translating(translations, said) as offer:
        offer(body, odd)
        offer(body, odd)
        offer(json.dumps({"prompt": list(range(65))}).encode(), good)
        await known(translations, good)
    assert said == says
    assert not translations.known(odd.blocks)


async def test_nonsense_from_a_publisher_ends_exactness_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = Follower._live

    async def spoiled(self: Follower, number: int, payload: bytes) -> None:
        await live(self, number, payload if number != 3 else b"\xc1")

    monkeypatch.setattr(Follower, "_live", spoiled)

    async with following(replay=False) as scene:
        for number in range(6):
            await scene.ask(number, "question")
        await scene.until(lambda: any("corrected by" in line for line in scene.proxy.said))
        assert await scene.ask(5, "another") > 1_400


async def test_a_batch_without_measure_is_not_decoded() -> None:
    """ZeroMQ disconnects the sender of a larger message before it has the whole of it."""
    async with following() as scene:
        assert ONE.follower._sub.getsockopt(zmq.MAXMSGSIZE) == MOST_BYTES
        await scene.ask(0, "question")
        await scene.heard()
        ONE.publisher.publish([{"type": "BlockStored", "x": "x" * (16 << 20)}])
        await scene.until(lambda: any("corrected by" in line for line in scene.proxy.said))
        assert any("more than 16 MiB" in line for line in scene.proxy.said)
        assert await scene.ask(0, "another") > 1_400


def write_lists(monkeypatch: pytest.MonkeyPatch, fields: int) -> None:
    """The engine writes events as lists of so many fields at most, as vLLM did up to 0.2x."""
    take = KvEvents.take

    def as_lists(self: KvEvents) -> list[Any]:
        return [list(event.values())[:fields] for event in take(self)]

    monkeypatch.setattr(KvEvents, "take", as_lists)


@pytest.mark.parametrize(
    ("fields", "salted"),
    [(10, True), (7, False)],
    ids=["salts behind the medium (vLLM 0.20)", "without salts (vLLM 0.11)"],
)
async def test_events_in_lists_are_read(
    monkeypatch: pytest.MonkeyPatch, fields: int, salted: bool
) -> None:
    write_lists(monkeypatch, fields)
    async with following(tenants={"isolate_cache": salted}) as scene:
        await scene.until(lambda: scene.mode == "exact")
        await warmed(scene)
        assert max(await predicted_is_reported(scene, fields, 15)) > 1_400
        assert scene.mode == "exact"


async def test_an_engine_that_tells_no_salts_is_not_exact_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.11: with salts, its blocks would match no prompt."""
    write_lists(monkeypatch, 7)

    async with following(tenants={"isolate_cache": True}) as scene:
        await scene.until(lambda: scene.mode == "exact")  # it holds nothing, which is known
        for number in range(3):
            for document in range(3):
                cached = await scene.ask(document, f"question {number}")
                await scene.heard()
                assert scene.mode == "corrected"
        assert cached > 1_400
        backend = scene.backend
        before = backend.cache.error.absolute_tokens
        await scene.ask(2, "one more")
        assert backend.cache.error.absolute_tokens - before < 512  # not "none is cached"
        async with scene.proxy.client.post(scene.engine.url + "/reset_prefix_cache"):
            pass
        await scene.ask(0, "again")
        await scene.heard()
        assert scene.mode == "corrected"
        assert [line for line in scene.proxy.said if "salt" in line] == [
            "backend b0: its KV events have no cache salts (those of vLLM 0.20 and newer do); "
            "its prefix index is corrected by its responses instead"
        ]


def short_of_descriptors(monkeypatch: pytest.MonkeyPatch, kind: int) -> list[int]:
    """The next socket of this kind cannot be made; append to what is returned to ask for it."""
    made, short = zmq.asyncio.Context.socket, list[int]()

    def socket(self: Any, socket_type: int, *args: Any, **options: Any) -> Any:
        if socket_type == kind and short:
            raise zmq.ZMQError(short.pop())
        return made(self, socket_type, *args, **options)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
    return short


@pytest.mark.parametrize("from_the_start", [False, True])
async def test_a_replay_for_which_no_descriptor_is_left_is_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, from_the_start: bool
) -> None:
    monkeypatch.setattr("forebay.proxy.kv_events.follower.QUIET_S", 0.1)
    short = short_of_descriptors(monkeypatch, zmq.DEALER)

    if from_the_start:
        short.append(errno.EMFILE)
    async with following() as scene:
        if not from_the_start:
            await scene.until(lambda: scene.mode == "exact")
            short.append(errno.EMFILE)  # of the replay that follows a silence
        await scene.until(lambda: not short)
        await warmed(scene)
        assert scene.mode == "exact"
        await predicted_is_reported(scene, 7, 10)
        assert not [line for line in scene.proxy.said if "error" in line]


async def test_an_error_nobody_thought_of_ends_exactness_and_not_the_follower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.proxy.kv_events.follower.AGAIN_S", 0.0)
    live, failed = Follower._live, list[int]()

    async def failing(self: Follower, number: int, payload: bytes) -> None:
        if number == 3 and not failed:
            failed.append(number)
            raise RuntimeError("a prompt's tokens")
        await live(self, number, payload)

    monkeypatch.setattr(Follower, "_live", failing)

    async with following() as scene:
        await scene.until(lambda: scene.mode == "exact")
        for number in range(5):  # one document does not fill the pool: the rest stays unknown
            await scene.ask(0, f"question {number} about it")
        await scene.heard()
        assert failed
        assert scene.mode == "corrected"
        assert [line for line in scene.proxy.said if "error" in line] == [
            "backend b0: KV events: internal error: RuntimeError; its prefix index is "
            "corrected by its responses instead"
        ]
        async with scene.proxy.client.post(scene.engine.url + "/reset_prefix_cache"):
            pass
        await scene.ask(0, "again")
        await scene.until(lambda: scene.mode == "exact")
        await warmed(scene)
        await predicted_is_reported(scene, 8, 10)


async def test_no_descriptor_to_listen_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    short_of_descriptors(monkeypatch, zmq.SUB).append(errno.EMFILE)

    backend = {"url": "http://127.0.0.1:1", "kv_events": "tcp://127.0.0.1:5557"}
    with pytest.raises(InputError, match=r"gpu0\.kv_events: .*Too many open files"):
        async with stage([], backends=[backend], wait_up=0):
            pass


async def test_without_tokenize_the_belief_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.proxy.kv_events import tokenize as translate
    from forebay.replay.engine.server import pages

    async def refuse(self: Any, request: Any) -> Any:
        return web.Response(status=404)

    monkeypatch.setattr(pages._Pages, "tokenize", refuse)
    monkeypatch.setattr(translate, "GIVE_UP_S", 0.0)

    async with following() as scene:
        for _ in range(3):
            cached = await scene.ask(1, "question")
            await scene.heard()
        assert cached > 1_400
        assert scene.backend.cache.error.within_block >= 2
        await scene.until(lambda: any("does not tokenise" in s for s in scene.proxy.said))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "ZeroMQ endpoint such as tcp://127.0.0.1:5557"),
        ({"kv_replay": "tcp://127.0.0.1:5558"}, "give kv_events too"),
    ],
)
def test_a_bad_endpoint_is_named(keys: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_config(None, {"backends": [{"url": "http://127.0.0.1:1", **keys}]}, {})


async def test_an_endpoint_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        backend = {"url": "http://127.0.0.1:1", "kv_events": f"tcp://*:{port}"}
        with pytest.raises(InputError, match=r"gpu0\.kv_events: .*Address already in use"):
            async with stage([], backends=[backend], wait_up=0):
                pass


async def test_status_is_json(tmp_path: Path) -> None:
    """Backends without events say how they are known too."""
    async with stage(["http://127.0.0.1:1"], wait_up=0) as scene:
        (shown,) = (await scene.told("/status"))["backends"]
        assert shown["prefix_index"] == {
            "mode": "believed", "held_engine_blocks": None, "kept_share": 1.0, "answers": 0,
            "mean_error_tokens": 0.0, "bias_tokens": 0.0, "within_a_block": 0.0,
            "paths": dict.fromkeys(DIALECTS, "believed"),
        }  # fmt: skip
