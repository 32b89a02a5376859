"""What each tenant may use: its models, its requests at once, its tokens of an hour and a day."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.faulty_backends import late
from fakes.tenant_keys import key_of, keys_of
from said import Said
from stages.proxy_stage import (
    USAGE,
    WHOLE,
    Call,
    RawBackend,
    Stage,
    answer,
    by_request,
    error_of,
    on_stage,
    settle,
    silent,
    stage,
)

from forebay.proxy.config.sources import load_config
from forebay.proxy.core.state.elsewhere import SILENT_S
from forebay.proxy.security.spending import DAY_S, HOUR_S
from forebay.proxy.share.exchange import PERIOD_S, PeerExchange
from forebay.traces.ground.errors import InputError

ACME, OTHER = key_of("acme"), key_of("other")
BODY = {"model": "small", "prompt": "hello", "max_tokens": 3}
PATIENT = [{"name": "chat", "up_to": 5_000, "max_wait": "300s"}]
REPORTED_S = 2.5 * PERIOD_S
USED = 8  # tokens of an answer of a backend, prompt and output; 10 of a stream
assert json.loads(WHOLE)["usage"]["total_tokens"] == USED


def two_tenants(tmp_path: Path, acme: dict[str, Any]) -> dict[str, Any]:
    """Keys of two tenants; what acme may use."""
    return {"keys": keys_of(tmp_path, "acme", "other"), "known": {"acme": acme}}


def scene_of(
    tmp_path: Path, *serves: Any, acme: dict[str, Any], **keys: Any
) -> AbstractAsyncContextManager[tuple[Stage, list[RawBackend]]]:
    return on_stage(*serves or (None,), tenants=two_tenants(tmp_path, acme), **keys)


async def ask(
    on: Stage, headers: dict[str, str] = ACME, body: Any = None, path: str = "/v1/completions"
) -> tuple[int, str, float]:
    """Status, code of the error, and Retry-After."""
    async with on.post(BODY if body is None else body, path=path, headers=headers) as response:
        if response.status == 200:
            await response.read()
            return 200, "", 0.0
        error = await error_of(response)
        return response.status, error["code"], float(response.headers.get("retry-after", 0))


# Models.


@pytest.mark.parametrize("aliases", [{}, {"nice": "small"}])
async def test_a_tenant_uses_its_models_only(tmp_path: Path, aliases: dict[str, str]) -> None:
    async with scene_of(tmp_path, acme={"models": ["small"]}, models=aliases) as (on, backends):
        backends[0].models = {"small": {}, "large": {}}
        await on.proxy.backends.prober.ask_models(on.proxy.backends.links["b0"])
        for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
            for name in ("small", *aliases):
                good = {**BODY, "model": name, "input": "x"}
                assert (await ask(on, body=good, path=path))[0] == 200, (path, name)
            for body in ({**BODY, "model": "large"}, {"prompt": "x"}, {**BODY, "model": ""}):
                assert (await ask(on, body=body, path=path))[:2] == (404, "model_not_found")
                assert (await ask(on, OTHER, body, path))[0] == 200
        form = (
            b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%s\r\n'
            b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nxxx\r\n--b--\r\n'
        )
        headers = ACME | {"content-type": "multipart/form-data; boundary=b"}
        statuses = [
            (await ask(on, headers, form % name, "/v1/audio/transcriptions"))[0]
            for name in (b"small", b"large")
        ]
        assert statuses == [200, 404]
        async with on.client.get(on.url + "/v1/models", headers=ACME) as response:
            listed = [one["id"] for one in (await response.json())["data"]]
        assert listed == ["small", *aliases]


# Requests at once.


async def test_so_many_requests_at_once_waiting_ones_too(tmp_path: Path) -> None:
    free = asyncio.Event()

    acme = {"max_concurrency": 4}
    staged = scene_of(tmp_path, late(free, by_request), acme=acme, slots=1, buckets=PATIENT)
    async with staged as (on, backends):
        tasks = [asyncio.create_task(ask(on)) for _ in range(3)]
        embedding = asyncio.create_task(ask(on, path="/v1/embeddings"))
        await settle()
        assert len(backends[0].calls) == 1  # the others wait
        for path in ("/v1/completions", "/v1/embeddings"):
            assert await ask(on, path=path) == (429, "tenant_concurrency", 1.0)
        others = [asyncio.create_task(ask(on, OTHER)) for _ in range(5)]
        await settle()
        tasks.pop().cancel()  # a client that leaves gives its place back
        await settle()
        tasks.append(asyncio.create_task(ask(on)))
        await settle()
        free.set()
        assert {one[0] for one in await asyncio.gather(*tasks, embedding, *others)} == {200}
        await settle()
        assert not on.proxy.driver.shaper.peering.recent_use.running
        text = on.proxy.metrics.text().decode()
        assert 'reason="tenant_concurrency"} 2.0' in text


# Budgets.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_counts_prompt_and_output_as_counted(tmp_path: Path, stream: bool) -> None:
    body, used = {**BODY, "stream": stream}, 10 if stream else USED
    assert b'"total_tokens":10' in USAGE

    acme = {"tokens_per_hour": 3 * used, "tokens_per_day": 7 * used}
    # Two virtual hours have fewer probes so, and the test takes a second.
    async with scene_of(tmp_path, acme=acme, health={"interval": "60s"}) as (on, _):
        for _ in range(3):
            assert (await ask(on, body=body))[0] == 200
            await asyncio.sleep(60)
        status, code, retry_after = await ask(on, body=body)
        assert (status, code) == (429, "tenant_quota")
        assert HOUR_S - 200 < retry_after < HOUR_S - 170
        assert (await ask(on, OTHER, body))[0] == 200
        await asyncio.sleep(retry_after)
        assert (await ask(on, body=body))[0] == 200  # another hour
        for _ in range(2):
            assert (await ask(on, body=body))[0] == 200
        await asyncio.sleep(HOUR_S)
        assert (await ask(on, body=body))[0] == 200
        status, code, retry_after = await ask(on, body=body)  # the day is used up
        assert (status, code) == (429, "tenant_quota")
        assert retry_after > DAY_S - 4 * HOUR_S


async def test_an_unanswered_request_costs_nothing_and_a_cut_answer_its_prompt(
    tmp_path: Path,
) -> None:
    async def fails(call: Call) -> None:
        error = {"message": "no", "type": "x", "param": None, "code": "own"}
        await call.send(answer(400, json.dumps({"error": error}).encode()))

    async with scene_of(tmp_path, fails, acme={"tokens_per_hour": 1_000}) as (on, backends):

        def spent() -> int:
            return round(on.proxy.app._allowances.spending._windows["acme", HOUR_S].tokens)

        backends[0].serve = fails
        assert (await ask(on))[0] == 400
        before = spent()
        assert await on.status(b"{", headers=ACME) == 400
        assert spent() == before
        backends[0].serve = silent
        task = asyncio.create_task(ask(on))
        await settle()
        reserved = spent() - before
        assert reserved > 0  # while it runs, others of the tenant see it
        task.cancel()
        await settle()
        assert spent() - before == reserved
        backends[0].healthy = False
        await asyncio.sleep(5)
        assert (await ask(on))[:2] == (503, "no_backend_available")
        assert spent() - before == reserved


async def test_observing_counts_and_rejects_nothing_and_a_reload_takes_other_limits(
    tmp_path: Path,
) -> None:
    acme: dict[str, Any] = {"tokens_per_hour": 1, "max_concurrency": 1, "models": ["small"]}

    async with scene_of(tmp_path, acme=acme, mode="observe") as (on, _):
        assert {one[0] for one in await asyncio.gather(*(ask(on) for _ in range(5)))} == {200}
        assert (await ask(on, body={**BODY, "model": "large"}))[0] == 404  # that is no load
        config = on.proxy.reloader.config
        on.proxy.app.reconfigure(config.model_copy(update={"mode": "shape"}))
        statuses = [one[0] for one in await asyncio.gather(*(ask(on) for _ in range(5)))]
        assert sorted(statuses) == [200, 429, 429, 429, 429]
        without = config.tenants.model_copy(update={"known": {}})
        on.proxy.app.reconfigure(config.model_copy(update={"mode": "shape", "tenants": without}))
        assert {one[0] for one in await asyncio.gather(*(ask(on) for _ in range(5)))} == {200}
        assert not on.proxy.driver.shaper.peering.recent_use.running


# Several proxies.


class Wire:
    """A link to one other proxy."""

    name, connected, trouble = "wire", True, ""

    def __init__(self) -> None:
        self.heard: Callable[[bytes], None] = lambda _: None

    def send(self, data: bytes) -> None:
        self.heard(data)

    def listen(self, heard: Callable[[bytes], None]) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def on_two(
    tmp_path: Path, serve: Any = by_request, **acme: Any
) -> AsyncIterator[tuple[Stage, Stage, list["asyncio.Task[None]"]]]:
    """Two proxies that share one backend and tell each other their load."""
    tenants = two_tenants(tmp_path, acme)
    async with (
        RawBackend(serve).running() as backend,
        stage([backend.url], tenants=tenants) as one,
        stage([backend.url], tenants=tenants) as two,
    ):
        wires = Wire(), Wire()
        ends = [
            PeerExchange(on.proxy.driver, [wire], Said())
            for on, wire in zip((one, two), wires, strict=True)
        ]
        wires[0].heard, wires[1].heard = ends[1].heard, ends[0].heard
        tasks = [asyncio.create_task(end.run()) for end in ends]
        await asyncio.sleep(REPORTED_S)
        yield one, two, tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_at_once_count_at_all_proxies(tmp_path: Path) -> None:
    async with on_two(tmp_path, silent, max_concurrency=3) as (one, two, exchange):
        clients = [asyncio.create_task(ask(on)) for on in (one, two, two)]
        await asyncio.sleep(REPORTED_S)
        for on in (one, two):
            assert await ask(on) == (429, "tenant_concurrency", 1.0)
        other = asyncio.create_task(ask(one, OTHER))
        clients.pop().cancel()  # its place is free, at the other proxy too
        await asyncio.sleep(REPORTED_S)
        clients.append(asyncio.create_task(ask(one)))
        await asyncio.sleep(REPORTED_S)
        assert (await ask(two))[0] == 429
        # It is counted for as long as it runs, and no longer than its proxy is heard.
        await asyncio.sleep(10 * SILENT_S)
        assert (await ask(one))[0] == 429
        exchange[1].cancel()
        await asyncio.sleep(2 * SILENT_S)
        clients.append(asyncio.create_task(ask(one)))
        await asyncio.sleep(REPORTED_S)
        assert (await ask(one))[0] == 429
        assert not other.done()
        for client in (*clients, other):
            assert not client.done()
            client.cancel()
        await settle()


async def test_a_budget_counts_at_all_proxies_and_ends_at_one_time(tmp_path: Path) -> None:
    async with on_two(tmp_path, tokens_per_hour=3 * USED) as (one, two, _):
        for on in (one, two, one):
            assert (await ask(on))[0] == 200
            await asyncio.sleep(60)
        answers = [await ask(on) for on in (one, two)]
        assert [answer[:2] for answer in answers] == [(429, "tenant_quota")] * 2
        assert answers[0][2] == pytest.approx(answers[1][2], abs=1.0)
        assert (await ask(two, OTHER))[0] == 200
        await asyncio.sleep(answers[0][2] + 1.0)
        assert [(await ask(on))[0] for on in (two, one)] == [200, 200]  # another hour


class Bus:
    """A link of several proxies, as the hub of `--workers` is."""

    def __init__(self) -> None:
        self.ears: list[Callable[[bytes], None]] = []

    def link(self) -> Wire:
        wire = Wire()
        wire.heard = lambda data: [ear(data) for ear in list(self.ears)]  # type: ignore[assignment]

        @asynccontextmanager
        async def listen(heard: Callable[[bytes], None]) -> AsyncIterator[None]:
            self.ears.append(heard)
            yield
            self.ears.remove(heard)

        wire.listen = listen  # type: ignore[method-assign]
        return wire


SELDOM = {"interval": "600s"}


async def test_a_worker_that_is_started_again_knows_the_budgets(tmp_path: Path) -> None:
    """It asks the others before it serves, and the hour ends when theirs does."""
    tenants, bus = two_tenants(tmp_path, {"tokens_per_hour": 3 * USED}), Bus()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend(by_request).running())
        old = [
            await stack.enter_async_context(
                stage([backend.url], tenants=tenants, links=[bus.link()], health=SELDOM)
            )
            for _ in range(2)
        ]
        for on in (*old, old[0]):
            assert (await ask(on))[0] == 200
            await asyncio.sleep(REPORTED_S)
        new = await stack.enter_async_context(
            stage([backend.url], tenants=tenants, links=[bus.link()], health=SELDOM)
        )
        answers = [await ask(on) for on in (new, *old)]
        assert [answer[:2] for answer in answers] == [(429, "tenant_quota")] * 3
        assert answers[0][2] == pytest.approx(answers[1][2], abs=1.0)
        assert (await ask(new, OTHER))[0] == 200


async def test_estimates_are_corrected_at_all_proxies(tmp_path: Path) -> None:
    """A long prompt that the server counts as short leaves the rest of the budget to all."""
    async with on_two(tmp_path, tokens_per_hour=5_000) as (one, two, _):
        body = {**BODY, "prompt": "word " * 2_000}
        for on in (one, two) * 3:
            assert (await ask(on, body=body))[0] == 200
            await asyncio.sleep(REPORTED_S)
        spent = [
            on.proxy.app._allowances.spending._windows["acme", HOUR_S].tokens for on in (one, two)
        ]
        assert spent == [6 * USED, 6 * USED]


@pytest.mark.parametrize(
    "acme",
    [
        {"models": [""]}, {"models": "small"}, {"max_concurrency": 0}, {"tokens_per_hour": -1},
        {"tokens_per_day": "many"}, {"tokens_per_week": 7}, {"max_concurrency": 1.5},
    ],
)  # fmt: skip
def test_mistakes(acme: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"tenants.known.acme.{next(iter(acme))}"):
        load_config(
            None, {"backends": [{"url": "http://h:1"}], "tenants": {"known": {"acme": acme}}}, {}
        )
