"""KV events: the cache publishes them, and subscribers get them over real ZeroMQ sockets."""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
import zmq
from ports import free_ports
from stages.engine_stage import Cache

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.kv_events import KvEventsConfig, parse_kv_events
from forebay.replay.engine.server.kv_publisher import END
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.replay.engine.tokenizer import Generation, Prompt, encode_ids
from forebay.traces.ground.errors import InputError

WAIT_S = 120  # more than any of this takes, on a busy machine too
STORED_KEYS = [  # recorded from vLLM 0.32
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
]

Event = dict[str, Any]
Batch = tuple[int, list[Event]]


def test_evictions_come_in_the_order_recorded_from_vllm() -> None:
    """The experiment of vLLM's recording: 40 blocks of 32, prompts of 9 full blocks and a bit."""
    cache = Cache(41)
    prompts = {name: encode_ids([ord(name)] * 300) for name in "ABCDE"}
    label = {
        block_hash: f"{name}{index}"
        for name, prompt in prompts.items()
        for index, block_hash in enumerate(prompt.block_hashes(32))
    }

    def ask(name: str) -> list[tuple[str, list[str]]]:
        events = cache.ask(prompts[name])
        return [(one["type"], [label[h] for h in one["block_hashes"]]) for one in events]

    def blocks(name: str, first: int = 0) -> list[str]:
        return [f"{name}{index}" for index in range(first, 9)]

    def removed(name: str) -> list[tuple[str, list[str]]]:
        return [("BlockRemoved", [f"{name}{index}"]) for index in (8, 7, 6, 5, 4, 3)]

    for name in "ABCD":
        assert ask(name) == [("BlockStored", blocks(name))]
    assert ask("A") == []  # a hit says nothing
    assert ask("E") == [*removed("B"), ("BlockStored", blocks("E"))]
    for name in "AEDC":
        assert ask(name) == []
    assert ask("B") == [*removed("A"), ("BlockStored", blocks("B", 3))]


def test_stored_blocks_tell_their_tokens_and_their_parent() -> None:
    cache, prompt = Cache(100), encode_ids(range(100))
    first, second, third = cache.ask(prompt, output=65)
    assert list(first) == list(second) == STORED_KEYS
    assert first["token_ids"] == list(range(96))
    assert first["parent_block_hash"] is None
    assert first["extra_keys"] == [None] * 3
    # The block that output fills begins with the prompt's last tokens.
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    words = Prompt(Generation(prompt).words(0, 28)).token_ids()
    assert second["token_ids"] == [96, 97, 98, 99, *words]
    assert third["token_ids"] == Prompt(Generation(prompt).words(28, 60)).token_ids()
    # A conversation that is sent back hits those blocks too, so only its end is news.
    so_far = [token for event in (first, second, third) for token in event["token_ids"]]
    (news,) = cache.ask(encode_ids([*so_far, *range(40)]))
    assert news["parent_block_hash"] == third["block_hashes"][0]
    assert news["token_ids"] == list(range(32))


def test_a_salt_makes_other_blocks_and_is_told_with_the_first() -> None:
    cache, prompt = Cache(100), encode_ids(range(70))
    (plain,), (salted,) = cache.ask(prompt), cache.ask(prompt, salt="tenant")
    assert salted["extra_keys"] == [["tenant"], None]
    assert salted["token_ids"] == plain["token_ids"]
    assert not set(salted["block_hashes"]) & set(plain["block_hashes"])


def test_a_dropped_cache_says_so() -> None:
    cache = Cache(100)
    cache.ask(encode_ids(range(70)))
    assert cache.core.pool.forget_all()
    assert cache.events.take() == [{"type": "AllBlocksCleared"}]


class Subscriber:
    """A bounded-wait subscriber in the words of a router."""

    def __init__(self, context: zmq.Context[Any], **options: int) -> None:
        self._context = context
        self.sub = context.socket(zmq.SUB)
        self.sub.set_hwm(options.get("hwm", 1_000))
        self.sub.subscribe(b"kv")

    def receive(self, timeout_ms: int) -> Batch | None:
        if not self.sub.poll(timeout_ms):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv-events"
        return int.from_bytes(number, "big"), read(payload)

    def replay(self, endpoint: str, first: int) -> list[Batch]:
        """The batches from `first` on that the engine still keeps."""
        batches: list[Batch] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            dealer.send_multipart([b"ill-formed"])
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while dealer.poll(WAIT_S * 1_000):
                empty, topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (topic, payload) == (b"", b"")
                    return batches
                assert topic == b"kv-events"
                batches.append((int.from_bytes(number, "big"), read(payload)))
        raise AssertionError("no end of the replay")


def read(payload: bytes) -> list[Event]:
    moment, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(moment, float)
    assert rank == 0
    assert all(list(one) == STORED_KEYS for one in events if one["type"] == "BlockStored")
    return list(events)


@contextmanager
def zmq_context() -> Iterator["zmq.Context[Any]"]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path may be 107 bytes long; tmp_path may be longer."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


Scene = Callable[[RunningEngine, aiohttp.ClientSession], Awaitable[None]]


def serve(config: KvEventsConfig, scene: Scene) -> None:
    """`scene` against an engine in real time: ZeroMQ's threads know no other."""

    async def main() -> None:
        options = ServerOptions(kv_events_config=json.dumps(asdict(config)), server_dev_mode=True)
        engine_config = EngineConfig(seed=1, time_scale=1_000.0)
        async with asyncio.timeout(WAIT_S * 2):
            async with start_engine(engine_config, options=options) as engine:
                async with aiohttp.ClientSession(engine.url) as client:
                    await scene(engine, client)
                assert not engine.stepping.done()

    asyncio.run(main())


async def ask(client: aiohttp.ClientSession, prompt: list[int], max_tokens: int = 1) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()


async def first_batch(client: aiohttp.ClientSession, subscriber: Subscriber) -> Batch:
    """Ask new prompts until one is heard of: a subscription takes a moment to arrive."""
    for attempt in range(WAIT_S * 10):
        await ask(client, [7_000_000 + attempt] * 20)
        batch = await asyncio.to_thread(subscriber.receive, 100)
        while batch and batch[0] < attempt:  # each prompt is a batch; those before came late
            batch = await asyncio.to_thread(subscriber.receive, WAIT_S * 1_000)
        if batch:
            return batch
    raise AssertionError("nothing published")


@pytest.mark.parametrize("engine_binds", [False, True])
def test_a_router_hears_of_the_cache_and_fetches_what_it_missed(
    short_folder: Path, engine_binds: bool
) -> None:
    replay = f"ipc://{short_folder}/replay"
    with zmq_context() as context:
        subscriber = Subscriber(context)
        endpoint = f"ipc://{short_folder}/events"
        if engine_binds:
            subscriber.sub.connect(endpoint)
        else:
            port = subscriber.sub.bind_to_random_port("tcp://127.0.0.1")
            endpoint = f"tcp://127.0.0.1:{port}"

        async def scene(engine: RunningEngine, client: aiohttp.ClientSession) -> None:
            async def heard() -> Batch:
                batch = await asyncio.to_thread(subscriber.receive, WAIT_S * 1_000)
                assert batch is not None
                return batch

            number, _ = await first_batch(client, subscriber)
            prompt = list(range(1, 41))
            await ask(client, prompt, max_tokens=10)
            stored, filled = await heard(), await heard()
            assert (stored[0], filled[0]) == (number + 1, number + 2)
            (event,), (last,) = stored[1], filled[1]
            assert event["token_ids"] == prompt[:32]
            assert last["token_ids"][:8] == prompt[32:]
            assert last["parent_block_hash"] == event["block_hashes"][1]

            await ask(client, prompt)  # a hit: the next batch is somebody else's
            async with client.post("/reset_prefix_cache") as response:
                assert await response.json() == {"success": True}
            await ask(client, prompt)
            again = await heard()
            assert again[0] == number + 3
            cleared, event_again = again[1]
            assert cleared == {"type": "AllBlocksCleared"}
            assert event_again == event

            everything = await asyncio.to_thread(subscriber.replay, replay, 0)
            assert [one for one, _ in everything] == list(range(number + 4))
            assert everything[-3:] == [stored, filled, again]
            assert await asyncio.to_thread(subscriber.replay, replay, number + 3) == [again]
            assert await asyncio.to_thread(subscriber.replay, replay, number + 4) == []

            async with client.get("/kv_event_sources") as response:
                assert (await response.json())["0"]["endpoint"] == endpoint

        config = KvEventsConfig(True, endpoint=endpoint, replay_endpoint=replay, topic="kv-events")
        serve(config, scene)


@pytest.mark.parametrize("listens", [True, False])
def test_a_subscriber_that_does_not_read_stops_nothing(short_folder: Path, listens: bool) -> None:
    endpoint, replay = f"ipc://{short_folder}/events", f"ipc://{short_folder}/replay"
    with zmq_context() as context:
        stuck = Subscriber(context, hwm=1)
        if listens:
            stuck.sub.connect(endpoint)

        async def scene(engine: RunningEngine, client: aiohttp.ClientSession) -> None:
            if listens:
                await first_batch(client, stuck)
            for index in range(300):
                await ask(client, [index] * 2_000)
            kept = await asyncio.to_thread(stuck.replay, replay, 0)
            assert len(kept) == 5  # of all: the buffer is bounded
            assert kept[-1][1][0]["token_ids"] == [299] * 2_000

        serve(KvEventsConfig(True, None, endpoint, replay, 5, hwm=1, topic="kv-events"), scene)


def test_a_stopped_engine_leaves_its_endpoints_free() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        endpoint = f"tcp://127.0.0.1:{port}"

        async def nothing(engine: RunningEngine, client: aiohttp.ClientSession) -> None:
            await ask(client, [1] * 20)

        config = KvEventsConfig(True, endpoint="tcp://127.0.0.1:1", replay_endpoint=endpoint)
        with pytest.raises(InputError, match=f"replay_endpoint {endpoint}: cannot bind: Address"):
            serve(config, nothing)
    for _ in range(2):
        serve(config, nothing)


def test_off_is_off() -> None:
    async def scene(engine: RunningEngine, client: aiohttp.ClientSession) -> None:
        assert engine.core.pool.observer is None
        async with client.get("/kv_event_sources") as response:
            assert await response.json() == {}

    for config in (KvEventsConfig(), KvEventsConfig(True, publisher="null")):
        serve(config, scene)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "not JSON"),
        ("[]", "give a JSON object"),
        ('{"endpiont": "x"}', "no such key 'endpiont'; known are enable_kv_cache_events, "),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events: 1 is not of type bool"),
        ('{"hwm": true}', "hwm: True is not of type int"),
        ('{"buffer_steps": 0}', "buffer_steps: 0 is not 1 or more"),
        ('{"publisher": "kafka"}', "publisher: 'kafka' is not zmq or null"),
    ],
)
def test_a_bad_option_is_named(given: str, says: str) -> None:
    with pytest.raises(InputError, match=f"--kv-events-config.*{says}"):
        parse_kv_events(given)


def test_the_defaults_are_vllms() -> None:
    config = parse_kv_events('{"enable_kv_cache_events": true}')
    assert orjson.loads(orjson.dumps(asdict(config))) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_without_the_package_one_line_and_status_2(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from forebay.proxy.cli import main\nsys.exit(main())"
    option = ["--kv-events-config", '{"enable_kv_cache_events": true}', "--port", "0"]
    words = [sys.executable, "-c", code, "engine", "--model", "llama-3-8b", *option]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"needs {missing}, which is not installed: pip install 'forebay[kv-ev" in done.stderr
