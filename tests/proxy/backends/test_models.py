"""Requests go to the backends of their model, and a model may have other names."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from body_reading import read_body
from fakes.faulty_backends import answers, resets
from pydantic import SecretStr
from stages.proxy_stage import (
    WHOLE,
    Call,
    RawBackend,
    Stage,
    answer,
    by_request,
    error_of,
    on_stage,
    settle,
    until,
    whole,
)

from forebay.proxy.api.unshaped_body import prepared
from forebay.proxy.backends.models import Models, Wanted, configured_models, listed_models
from forebay.proxy.backends.served_models import ServedModels
from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.core.health import Health
from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.diagnose.doctor.servers import lost_models
from forebay.proxy.diagnose.scene import Scene
from forebay.replay.clock.virtual_loop import run

TINY: dict[str, dict[str, Any]] = {"tiny": {"max_model_len": 4096}}
LARGE: dict[str, dict[str, Any]] = {"large": {"max_model_len": 131072}}


LACKS = (
    b'{"error":{"message":"The model `ad` does not exist.","type":"NotFoundError","param":"model",'
    b'"code":404}}'
)


async def lacks(call: Call) -> None:
    """Answer as vLLM does for a model that it does not have."""
    await call.send(answer(404, LACKS))


async def ask(on: Stage, model: str, path: str = "/v1/completions", **fields: Any) -> int:
    body = {"model": model, "prompt": "hello", "max_tokens": 3} | fields
    async with on.post(body, path=path) as response:
        await response.read()
        return int(response.status)


def asked_for(backend: RawBackend) -> list[str]:
    """The model of each request that came, as vLLM reads it."""
    return [json.loads(call.body)["model"] for call in backend.calls]


@asynccontextmanager
async def two_models(**keys: Any) -> AsyncIterator[tuple[Stage, RawBackend, RawBackend]]:
    tiny, large = RawBackend(models=TINY), RawBackend(models=LARGE)
    async with on_stage(tiny, large, **keys) as (on, _):
        yield on, tiny, large


class TestRouting:
    async def test_a_request_goes_to_a_backend_of_its_model(self) -> None:
        async with two_models() as (on, tiny, large):
            for _ in range(4):
                assert await ask(on, "tiny") == 200
                assert await ask(on, "large") == 200
            assert await ask(on, "large", "/v1/embeddings") == 200
            assert asked_for(tiny) == ["tiny"] * 4
            assert asked_for(large) == ["large"] * 5

    async def test_a_backend_of_another_model_does_not_take_over(self) -> None:
        """Neither by work stealing nor by a retry nor while the own backend is down."""

        patient = [{"name": "chat", "up_to": 5000, "max_wait": "30s"}]
        async with two_models(slots=1, buckets=patient) as (on, tiny, large):
            assert await asyncio.gather(*(ask(on, "large") for _ in range(8))) == [200] * 8
            large.serve = resets
            assert await ask(on, "large") == 502
            large.healthy = False
            await until(lambda: not on.proxy.backends.links["b1"].up)
            async with on.post({"model": "large", "prompt": "x"}) as response:
                assert response.status == 503
                assert (await error_of(response))["code"] == "no_backend_available"
            assert await ask(on, "tiny") == 200
            assert asked_for(tiny) == ["tiny"]

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/embeddings"])
    async def test_a_model_that_nobody_serves_is_no_servers_work(self, path: str) -> None:
        async with two_models(models={"other": "tiny"}) as (on, tiny, large):
            body = {"model": "nobody", "prompt": "x", "messages": [{"role": "user"}]}
            for _ in range(20):
                async with on.post(body, path=path) as response:
                    assert response.status == 404
                    error = await error_of(response)
                    assert (error["code"], error["param"]) == ("model_not_found", "model")
                    assert error["message"].startswith("The model `nobody` does not exist. ")
                    assert error["message"].endswith(" Available: tiny, large, other.")
            assert not tiny.calls + large.calls
            assert tiny.models_asked <= 3  # once more a second, not for each request

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
    async def test_an_adapter_that_was_loaded_a_moment_ago(self, path: str) -> None:
        async with two_models() as (on, tiny, large):
            large.models = LARGE | {"new-adapter": {"parent": "large"}}
            for _ in range(4):
                assert await ask(on, "new-adapter", path) == 200
            assert asked_for(large) == ["new-adapter"] * 4
            assert not tiny.calls

    @pytest.mark.parametrize("told", [True, False])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
    async def test_a_404_for_a_model_is_knowledge_about_one_server(
        self, path: str, told: bool
    ) -> None:
        """Only the second one has the adapter, and its list does not name it."""
        told_models = TINY if told else {}

        async def without(call: Call) -> None:
            await (lacks if b'"ad' in call.body else whole)(call)

        async def with_ad(call: Call) -> None:
            await (lacks if b'"ad2"' in call.body else whole)(call)

        both = [RawBackend(serve, models=told_models) for serve in (without, with_ad)]
        async with on_stage(*both) as (on, _):
            more = {"messages": [{"role": "user", "content": "x"}]}
            for _ in range(8):
                assert await ask(on, "ad", path, **more) == 200
            assert len(both[1].calls) == 8
            first = len(both[0].calls)
            # Bodies of other paths are parsed only where models differ.
            assert first <= (1 if told and path != "/v1/embeddings" else 8)
            for _ in range(2):  # nobody has this one: one of them says so
                async with on.post({"model": "ad2", "prompt": "x", **more}, path=path) as got:
                    assert (got.status, await got.read()) == (404, LACKS)
            states = [on.proxy.backends.health.state(name) for name in ("b0", "b1")]
            assert states == ["up", "up"]

    async def test_an_adapter_that_is_unloaded_again_is_looked_for_again(self) -> None:
        has = ["b0"]

        def serves(name: str) -> Any:
            async def serve(call: Call) -> None:
                await (whole if name in has or b'"ad"' not in call.body else lacks)(call)

            return serve

        both = [RawBackend(serves(name), models=TINY) for name in ("b0", "b1")]
        async with on_stage(*both) as (on, _):
            for now in ("b0", "b1", "b0"):
                has[:] = [now]
                found = [await ask(on, "ad") for _ in range(4)]
                assert found.count(200) >= 3  # the last one says that it lacks it
                assert found[-1] == 200

    async def test_a_server_that_fails_loses_what_another_serves(self) -> None:
        """The healthy server gets the requests for the base model, the other one its adapter's."""

        one = RawBackend(answers(500, b"{}"), models={"base": {}, "lora": {"parent": "base"}})
        two = RawBackend(models={"base": {}})
        async with on_stage(one, two) as (on, _):
            found = [await ask(on, "base") for _ in range(60)]
            assert found.count(500) <= 3 + 2  # until it is put out, and trials
            assert len(one.calls) < 15
            assert await ask(on, "lora") == 500  # nobody else could answer it
            assert await ask(on, "base", "/v1/embeddings") == 200

    async def test_models_are_asked_for_again(self) -> None:
        async with two_models() as (on, tiny, large):
            large.models = {"larger": {}}
            models = on.proxy.backends.models
            await until(lambda: models.find("larger").route == "larger")
            assert await ask(on, "larger") == 200
            assert asked_for(large) == ["larger"]
            tiny.models = {"larger": {}}
            await until(lambda: not models.differ)
            assert models.find("larger").route == ""

    async def test_a_backend_that_never_tells_is_asked_once_each_time_it_comes_up(self) -> None:
        async with on_stage(None) as (on, backends):
            (backend,) = backends
            link = on.proxy.backends.links["b0"]
            await asyncio.sleep(100)
            assert backend.models_asked == 1
            backend.healthy = False
            await until(lambda: not link.up)
            backend.models, backend.healthy = TINY, True
            await until(lambda: link.up)
            await asyncio.sleep(100)
            assert backend.models_asked == 2 + 3
            assert on.proxy.backends.models.lists("tiny")

    async def test_a_new_key_for_the_backends_is_tried_at_once(self) -> None:
        async with on_stage(RawBackend(), load=lambda: changed) as (on, (backend,)):
            backend.models = TINY
            config = on.proxy.reloader.config
            changed: Config = config.model_copy(update={"upstream_api_key": SecretStr("k")})
            assert await on.proxy.reloader.reload() == "applied"
            await until(lambda: on.proxy.backends.models.lists("tiny"))

    async def test_a_restart_with_another_model_is_known_before_work_comes(self) -> None:
        async with two_models() as (on, tiny, large):
            link = on.proxy.backends.links["b1"]
            large.healthy = False
            await until(lambda: not link.up)
            large.models = {"larger": {}}
            large.healthy = True
            await until(lambda: link.up)
            (found,) = lost_models(Scene(await on.told("/status"), []))
            assert found[1] == "b1 serves larger and no longer large, and has had no request since"
            assert await ask(on, "larger") == 200
            assert link.lost_model == ""
            assert asked_for(large) == ["larger"]
            assert asked_for(tiny) == []

    async def test_configured_models_are_not_asked_for(self) -> None:
        async with on_stage(None, each={"models": ["large"]}) as (on, _):
            assert await ask(on, "large") == 200
            assert on.proxy.backends.models.find("large").route == ""
            assert on.proxy.backends.links["b0"].ask_models_at == float("inf")

    async def test_a_backend_that_does_not_say_takes_any_model(self) -> None:
        silent = RawBackend()
        large = RawBackend(models=LARGE)
        async with on_stage(silent, large) as (on, _):
            assert await asyncio.gather(*(ask(on, "any") for _ in range(4))) == [200] * 4
            assert not on.proxy.backends.models.matter

    async def test_the_only_backend_of_a_model_is_used_however_it_fails(self) -> None:
        """As the last one of a fleet is: bad answers are better than none."""
        failing = [True]

        async def serve(call: Call) -> None:
            await (call.send(answer(500, b"{}")) if failing[0] else by_request(call))

        async with two_models() as (on, _, large):
            large.serve = serve
            assert [await ask(on, "large") for _ in range(12)] == [500] * 12
            failing[0] = False
            assert await ask(on, "large") == 200

    async def test_the_only_one_with_an_adapter_is_used_however_it_fails(self) -> None:
        """Though another one serves the model below it."""
        base: dict[str, dict[str, Any]] = {"base": {}}

        one = RawBackend(answers(500, b"{}"), models=base | {"lora": {"parent": "base"}})
        two = RawBackend(models=base)
        async with on_stage(one, two) as (on, _):
            backends = on.proxy.backends
            for _ in range(3):
                backends.health.failed("b0", "", asyncio.get_running_loop().time())
            backends._apply_health()
            assert backends.health.state("b0") == "ejected"
            assert await ask(on, "lora") == 500
            one.serve = by_request
            assert await ask(on, "lora") == 200

    async def test_health_knows_the_models_of_a_backend_that_has_moved(self) -> None:
        async with two_models() as (on, _, large):
            config = on.proxy.reloader.config
            moved = config.backends[1].model_copy(update={"url": large.url + "/"})
            await on.proxy.backends.move(moved.model_copy(update={"url": large.url}))
            health = on.proxy.backends.health
            assert health._backends["b1"].models == frozenset(["large"])

    def test_prefixes_stay_known_when_a_server_of_another_model_joins(self) -> None:
        """A prompt has the same hashes, and another model has others."""

        def blocks(models: Models, asked: str) -> tuple[int, ...]:
            body = json.dumps({"model": asked, "prompt": "word " * 2000}).encode()
            return read_body(body, models=models).request.blocks

        alone, mixed = Models(), Models()
        alone.update({"alias": "tiny"}, [configured_models(["tiny"])])
        mixed.update({"alias": "tiny"}, [configured_models(["tiny"]), configured_models(["large"])])
        assert blocks(alone, "tiny") == blocks(mixed, "tiny") == blocks(mixed, "alias")
        assert not set(blocks(mixed, "tiny")) & set(blocks(mixed, "large"))

    async def test_only_one_of_the_model_is_another_one(self) -> None:
        base: dict[str, dict[str, Any]] = {"base": {}}
        both = base | {"lora": {"parent": "base"}}

        async with on_stage(RawBackend(models=both), RawBackend(models=base)) as (on, _):
            backends = on.proxy.backends
            first, second = backends.links.values()
            assert not backends.others_up(first, "lora")
            assert backends.others_up(first, "base")
            assert backends.others_up(second, "lora")


class TestOtherNames:
    async def test_the_backend_is_asked_by_its_own_name(self) -> None:
        async with two_models(models={"gpt-4o-mini": "large"}) as (on, tiny, large):
            assert await ask(on, "gpt-4o-mini") == 200
            assert await ask(on, "gpt-4o-mini", "/v1/embeddings") == 200
            assert await ask(on, "large") == 200
            assert asked_for(large) == ["large"] * 3
            assert b"gpt-4o-mini" not in large.calls[2].body  # byte for byte
            assert asked_for(tiny) == []

    async def test_in_a_form(self) -> None:
        async with two_models(models={"whisper-1": "large"}) as (on, _, large):
            form = aiohttp.FormData()
            form.add_field("file", b'name="model"\r\n\r\ntiny\r\n--', filename="a.wav")
            form.add_field("model", "whisper-1")
            url = on.url + "/v1/audio/transcriptions"
            async with on.client.post(url, data=form) as response:
                assert response.status == 200
            body = large.calls[0].body
            assert b'name="model"\r\n\r\nlarge\r\n--' in body
            assert b"whisper-1" not in body

    @pytest.mark.parametrize("hold", [0, 9])
    async def test_an_alias_may_be_the_name_of_another_model(self, hold: int) -> None:
        names = {"y": "large", "large": "tiny"}
        async with two_models(models=names, hold={"max_requests": hold}) as (on, tiny, large):
            assert await ask(on, "y") == 200
            assert (asked_for(tiny), asked_for(large)) == ([], ["large"])
            assert await ask(on, "large") == 200
            assert asked_for(tiny) == ["tiny"]

    async def test_an_alias_waits_until_its_new_backend_has_told_its_models(self) -> None:
        tiny, large = RawBackend(models=TINY), RawBackend(models=LARGE, healthy=None)
        async with (
            large.running(),
            on_stage(tiny, models={"gpt": "tiny"}, load=lambda: changed) as (on, _),
        ):
            config, new = on.proxy.reloader.config, {"name": "new", "url": large.url}
            backends = (*config.backends, BackendConfig.model_validate(new))
            update = {"models": {"gpt": "large"}, "backends": backends}
            changed: Config = config.model_copy(update=update)
            reloading = asyncio.create_task(on.proxy.reloader.reload())
            await settle()
            assert await ask(on, "gpt") == 200
            assert asked_for(tiny) == ["tiny"]
            large.healthy = True
            assert await reloading == "applied"
            await until(lambda: on.proxy.backends.models.lists("large"))
            assert await ask(on, "gpt") == 200
            assert asked_for(large) == ["large"]

    async def test_a_reload_changes_them(self) -> None:
        backend = RawBackend(models=TINY)
        async with on_stage(backend, models={"old": "tiny"}, load=lambda: changed) as (on, _):
            changed: Config = on.proxy.reloader.config.model_copy(
                update={"models": {"new": "tiny"}}
            )
            assert await ask(on, "old") == 200
            assert await on.proxy.reloader.reload() == "applied"
            assert await ask(on, "new") == 200
            assert await ask(on, "old") == 200
            assert asked_for(backend) == ["tiny", "tiny", "old"]


class TestTheList:
    async def test_the_list_is_the_union_with_aliases(self) -> None:
        async with two_models(models={"gpt-4o-mini": "large"}) as (on, tiny, large):
            async with on.client.get(on.url + "/v1/models") as response:
                assert response.content_type == "application/json"
                assert response.headers["x-request-id"]
                page = await response.json()
            assert page["object"] == "list"
            found = {entry["id"]: entry.get("max_model_len") for entry in page["data"]}
            assert found == {"tiny": 4096, "large": 131072, "gpt-4o-mini": 131072}
            async with on.client.head(on.url + "/v1/models") as response:
                assert (response.status, await response.read()) == (200, b"")
            assert not tiny.calls
            assert not large.calls

    async def test_where_no_backend_tells_one_answers(self) -> None:
        async with (
            on_stage(None, models={"other": "name"}) as (on, _),
            on.client.get(on.url + "/v1/models") as response,
        ):
            assert await response.read() == WHOLE

    async def test_where_all_serve_the_same_a_backend_answers(self) -> None:
        models = answers(200, b'{"mine": 1}')

        both = [RawBackend(models, models=TINY), RawBackend(models, models=TINY)]
        async with (
            on_stage(*both) as (on, _),
            on.client.get(on.url + "/v1/models") as response,
        ):
            assert await response.json() == {"mine": 1}


class TestAdapters:
    """vLLM keeps the prefixes of LoRA adapters apart."""

    async def test_their_prompts_share_no_prefix_with_the_model(self) -> None:
        served = TINY | {"lora": {"parent": "tiny"}}
        prompt = "word " * 2000

        async with on_stage(RawBackend(models=served)) as (on, _):
            prefixes = on.proxy.driver.shaper.backends["b0"].cache.prefixes
            held = []
            for model in ("tiny", "tiny", "lora", "lora"):
                await ask(on, model, prompt=prompt)
                held.append(len(prefixes))
            once = len(prompt) // 2048
            new = [after - before for before, after in pairwise([0, *held])]
            assert [count >= once for count in new] == [True, False, True, False], new


class TestNames:
    def test_a_document_that_is_no_list_of_models(self) -> None:
        for body in (b"", b"[]", b"{}", b'{"data":[]}', b'{"data":[{"id":1}]}', b'{"data":["x"]}'):
            assert listed_models(body) is None, body

    def test_models_that_may_be_adapters(self) -> None:
        told: dict[str, dict[str, Any]] = {"base": {"parent": None}, "lora": {"parent": "base"}}
        models = Models()
        models.update({}, [told])
        assert [models.find(name).may_be_adapter for name in told] == [False, True]
        models.update({}, [configured_models(["one", "two"])])
        assert models.find("one").may_be_adapter
        models.update({}, [configured_models(["one"])])
        assert not models.find("one").may_be_adapter

    def test_a_model_that_all_serve_restricts_nothing(self) -> None:
        models = Models()
        models.update(
            {"other": "a"}, [configured_models(["a", "b"]), configured_models(["a"]), None]
        )
        assert models.differ
        assert models.find("a").route == ""
        assert models.find("b").route == "b"
        assert models.find("other").name == "a"
        assert models.find("unknown").route == ""


class TestForms:
    """The proxy reads only the headers of the parts of a form."""

    MODELS = Models()
    MODELS.update({"whisper-1": "large"}, [configured_models(["large"])])
    TYPE = "multipart/form-data; boundary=XX"

    def read(self, *parts: bytes, content_type: str = TYPE) -> bytes:
        body = b"".join(b"--XX\r\n%b\r\n" % part for part in parts) + b"--XX--\r\n"
        made, _ = run(prepared(body, content_type, "", None, self.MODELS))
        return made

    def test_the_part_of_that_name_only(self) -> None:
        head = b"Content-Disposition: form-data; name="
        decoys = (
            head + b'"file"; filename="a; name=model"\r\n\r\nwhisper-1',
            head + b'"file"\r\n\r\ncontent-disposition: x; name=model\r\n\r\nwhisper-1',
            head + b'"models"\r\n\r\nwhisper-1',
        )
        made = self.read(*decoys, head + b'"model"\r\n\r\nwhisper-1')
        assert made.count(b"whisper-1") == 3
        assert made.endswith(b'name="model"\r\n\r\nlarge\r\n--XX--\r\n')

    def test_a_body_that_is_no_form_stays_as_it_is(self) -> None:
        part = b'content-disposition: form-data; name="model"\r\n\r\nwhisper-1'
        for content_type in ("multipart/form-data", "multipart/form-data; boundary=other"):
            assert b"whisper-1" in self.read(part, content_type=content_type)
        assert b"whisper-1" in self.read(part.replace(b"\r\n\r\n", b"\r\n"))

    def test_a_long_one_takes_no_time(self) -> None:
        """No more than a look at each byte: 8 MB of lines that look like the right one."""
        line = b"content-disposition: x; name=model\r\n"
        body = line * ((8 << 20) // len(line))
        began = time.process_time()
        assert run(prepared(body, self.TYPE, "", None, self.MODELS)) == (body, Wanted(""))
        assert time.process_time() - began < 2.0


def test_the_policy_is_told_of_those_backends_whose_models_have_changed() -> None:
    """Else the first answers of n backends would cost n * n changes of the policy."""
    names = [f"b{number}" for number in range(50)]
    shaper = Shaper([BackendSpec(name, 8) for name in names], (Bucket("chat", 5_000),))
    changes = 0

    def change(do: Callable[[Shaper, float], object]) -> None:
        nonlocal changes
        changes += 1
        do(shaper, 0.0)

    driver: Any = SimpleNamespace(shaper=shaper, change=change)
    links: dict[str, Any] = {
        name: SimpleNamespace(name=name, models=None, only=None, up=True) for name in names
    }
    models = ServedModels(links, Health(names), driver, lambda *_: None)
    for link in links.values():
        link.models = listed_models(b'{"data": [{"id": "tiny"}]}')
        models.changed(link)
    assert changes == len(names)
    assert all(backend.models == frozenset({"tiny"}) for backend in shaper.backends.values())
