"""Two real vLLM servers that `forebay fleet up` started, behind the configuration it wrote.

One fleet for all; the last tests kill one of its servers and then stop it. No times: a test waits
for what it wants to see, and its timeout is the bound.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from stages.fleet_stage import CONTEXT, Fleet, real_fleet
from stages.proxy_stage import Stage, stage
from stages.vllm_stage import body_of, ended_amid_answers, running, until, words
from vllm_server import engine_core, needed_vllm_python

from forebay.replay.fleet.state import start_time

pytestmark = pytest.mark.timeout(400)
KEPT = ("content-type", "x-request-id")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with real_fleet(needed_vllm_python(), tmp_path_factory.mktemp("f") / "fleet") as running_fleet:
        yield running_fleet


@asynccontextmanager
async def proxied(fleet: Fleet, wait_up: int = 2) -> AsyncIterator[Stage]:
    """A proxy with the configuration that the fleet wrote, once servers are up."""
    keys = fleet.proxy_keys
    urls = [backend["url"] for backend in keys["backends"]]
    async with stage(urls, wait_up=wait_up, **keys) as scene:
        yield scene


async def status_of(scene: Stage) -> dict[str, Any]:
    async with scene.client.get(f"{scene.proxy.admin_url}/status") as answer:
        said: dict[str, Any] = await answer.json()
    return {backend["name"]: backend for backend in said["backends"]}


class Tap:
    """Between the proxy and a server: keeps the bodies that pass, as they were cut."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._client = client
        self.asked = self.answered = b""
        self.head: tuple[int, str | None, str | None] = (0, None, None)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: request.headers[k] for k in KEPT if k in request.headers}
        async with self._client.request(
            request.method, self._url + request.path_qs, data=body, headers=headers
        ) as theirs:
            kept = request.method == "POST" and request.path != "/tokenize"
            if kept:  # before it passes on: who has it all may look at once
                self.asked, self.answered = body, b""
                self.head = theirs.status, theirs.content_type, theirs.headers.get("x-request-id")
            shown = {k: theirs.headers[k] for k in KEPT if k in theirs.headers}
            ours = web.StreamResponse(status=theirs.status, headers=shown)
            await ours.prepare(request)
            async for part in theirs.content.iter_any():
                self.answered += part if kept else b""
                await ours.write(part)
            return ours


CASES: dict[str, Any] = {
    "completion": {"prompt": "Say yes.", "max_tokens": 20, "ignore_eos": True},
    "chat": {"messages": [{"role": "user", "content": "Say \u00e4\u2713."}], "max_tokens": 20},
    "too long": body_of(words("too long", CONTEXT + 1), chat=False),
    "bad value": {"prompt": "x", "max_tokens": 3, "temperature": -3},
    "wrong type": {"prompt": "x", "max_tokens": 3, "top_k": "many"},
    "unknown model": {"model": "nope", "prompt": "x", "max_tokens": 3},
    "unknown model, chat": {"model": "nope", "messages": [{"role": "user", "content": "x"}]},
}
STATUS = {"too long": 400, "bad value": 400, "wrong type": 400,
          "unknown model": 404, "unknown model, chat": 404}  # fmt: skip


@pytest.mark.real_time
async def test_bodies_pass_byte_for_byte_both_ways(fleet: Fleet) -> None:
    """Answers, streams and rejections, compared with the bytes that left the server."""

    async def compare(scene: Stage, tap: Tap, name: str, case: Any, streamed: bool) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        body = json.dumps({"seed": 7, **case, **options}, indent=1).encode()
        path = "/v1/chat/completions" if "messages" in case else "/v1/completions"
        async with scene.post(body, path, headers={"x-request-id": "mine-1"}) as answer:
            got = await answer.read()
            head = answer.status, answer.content_type, answer.headers["x-request-id"]
        assert tap.asked == body
        assert got == tap.answered, (name, streamed)
        assert head == tap.head
        assert head[::2] == (STATUS.get(name, 200), "mine-1")
        if streamed and name not in STATUS:
            assert got.endswith(b"data: [DONE]\n\n")
            assert got.count(b"data: ") > 5

    async with aiohttp.ClientSession() as client:
        tap = Tap(fleet.proxy_keys["backends"][0]["url"], client)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", tap.pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            async with stage([f"http://{host}:{port}"]) as scene:
                for name, case in CASES.items():
                    for streamed in (False, True):
                        await compare(scene, tap, name, case, streamed)
                scene.assert_nothing_held()
        finally:
            await runner.cleanup()


@pytest.mark.real_time
async def test_what_is_not_a_users_business_is_not_there(fleet: Fleet) -> None:
    async with proxied(fleet) as scene:
        for path in ("/load", "/metrics", "/ping", "/v1/nothing", "/v1/models/tiny"):
            async with scene.client.get(scene.url + path) as answer:
                assert answer.status == 404, path
        async with scene.client.get(scene.url + "/v1/models") as answer:
            assert [one["id"] for one in (await answer.json())["data"]] == ["tiny"]


async def caught_up(scene: Stage) -> None:
    """Wait until the proxy knows what the servers hold: all is tokenized, no event came lately."""
    translator = scene.proxy.app._relay.translator
    caches = [backend.cache for backend in scene.proxy.driver.shaper.backends.values()]
    same, before = 0, [-1]
    while same < 20 or (translator is not None and not translator.idle):
        await asyncio.sleep(0.01)  # real processes: they give no sign when they have told all
        held = [len(cache.engine_blocks or ()) for cache in caches]
        same, before = (same + 1, before) if held == before else (0, held)


@pytest.mark.real_time
async def test_a_document_stays_where_it_is_cached(fleet: Fleet) -> None:
    """Each question about a document hits all of it, at one server; documents use both."""

    tokens = 6_144  # long enough for a copy to take far longer than a hit, on any machine

    async with proxied(fleet) as scene:

        async def ask(document: int, question: int) -> tuple[str, int]:
            text = words(f"document {document}", tokens) + words(f"{document} {question}", 40)
            async with scene.post(body_of(text, chat=False)) as answer:
                usage = (await answer.json())["usage"]
                details = usage["prompt_tokens_details"] or {}
                return answer.headers["x-forebay-backend"], details.get("cached_tokens") or 0

        documents = range(8)
        cold = await asyncio.gather(*(ask(document, 0) for document in documents))
        assert {cached for _, cached in cold} == {0}
        assert {where for where, _ in cold} == {"cpu0", "cpu1"}
        for question in (1, 2, 3):
            await caught_up(scene)
            # One after the other: of so small a model a copy may be sooner than a turn.
            warm = [await ask(document, question) for document in documents]
            assert [where for where, _ in warm] == [where for where, _ in cold]
            assert {cached for _, cached in warm} == {tokens}
        scene.assert_nothing_held()


@pytest.mark.parametrize("phase", ["prefill", "answer", "stream"])
@pytest.mark.real_time
async def test_who_leaves_is_cancelled_at_the_server(fleet: Fleet, phase: str) -> None:
    async with proxied(fleet) as scene:
        urls = [backend["url"] for backend in fleet.proxy_keys["backends"]]
        text = words(f"leaves {phase}", CONTEXT - 4_000 if phase == "prefill" else 40)
        body = {**body_of(text, chat=False, output=3_900), "stream": phase == "stream"}

        async def ask() -> None:
            async with scene.post(body) as answer:
                await answer.read()

        async def busy() -> bool:
            return sum([await running(scene.client, url) for url in urls]) == 1

        async def idle() -> bool:
            return not any([await running(scene.client, url) for url in urls])

        asking = asyncio.create_task(ask())
        await until(busy)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        await until(idle)
        scene.assert_nothing_held()


@pytest.mark.real_time
async def test_the_prefix_index_follows_both_servers(fleet: Fleet) -> None:
    async with proxied(fleet) as scene:

        async def exact() -> bool:
            index = [one["prefix_index"] for one in (await status_of(scene)).values()]
            return all(one["mode"] == "exact" and one["held_engine_blocks"] for one in index)

        bodies = (body_of(words(f"index {n}", 1_000), chat=False) for n in range(4))
        for answer in await asyncio.gather(*(scene.post(body) for body in bodies)):
            assert answer.status == 200
            await answer.read()
        await until(exact)
        told = await status_of(scene)
        sizes = {one["kv_tokens"] for one in told.values()}
        assert len(sizes) == 1  # asked from the servers: `kv_tokens: auto`
        assert sizes.pop() >= 1 << 20
        seqs = {one["max_concurrency"] for one in told.values()}
        assert seqs == {fleet.proxy_keys["backends"][0]["max_concurrency"]}


@pytest.mark.real_time
async def test_an_engine_killed_in_mid_stream_is_no_end(fleet: Fleet) -> None:
    """vLLM ends the stream with an error event and a [DONE], and answers 500 to what is no stream.

    The stream is cut, and the other request is answered elsewhere. The other server goes on.
    """
    first = fleet.state["servers"][0]
    assert fleet.status()[0] == 0

    def end() -> None:
        os.kill(engine_core(first["process"]["pid"]), signal.SIGKILL)

    body = body_of("killed", chat=False, output=15_000)
    async with ended_amid_answers(first["url"], body, end):
        pass
    async with proxied(fleet, wait_up=1) as scene:
        for number in range(4):
            question = body_of(words(f"meanwhile {number}", 100), chat=False)
            async with scene.post(question) as answer:
                assert answer.headers["x-forebay-backend"] == "cpu1", await answer.text()
        scene.assert_nothing_held()
    code, status = fleet.status()
    assert (code, status["well"]) == (1, False)
    assert [server["healthy"] for server in status["servers"]] == [False, True]


@pytest.mark.real_time
async def test_down_lets_an_answer_finish_and_leaves_nothing(fleet: Fleet) -> None:
    processes = [server["process"] for server in fleet.state["servers"]]
    url = fleet.state["servers"][1]["url"]

    async with aiohttp.ClientSession() as client:
        body = {**body_of("a long answer", chat=False, output=2_000), "stream": True}
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            seen = await answer.content.readline()
            stopped = asyncio.create_task(asyncio.to_thread(fleet.down))
            seen += await answer.read()
            done = await stopped
    assert done["cpu1"] == "stopped"
    seen = seen
    assert b'"finish_reason":"length"' in seen
    assert seen.endswith(b"data: [DONE]\n\n")
    assert not [process for process in processes if start_time(process["pid"]) == process["began"]]
    assert not (fleet.folder / "state.json").exists()
    assert not list(fleet.folder.glob("*.events"))
