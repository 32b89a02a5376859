"""Two real vLLM servers of different models behind one proxy."""

from collections.abc import Iterator
from typing import Any

import pytest
from stages.proxy_stage import Stage, stage
from vllm_server import ModelSize, needed_vllm_python, vllm_server, write_model

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a server of `tiny` and of one of `large`, its last name on the command line."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    write_model(folder, ModelSize())
    python, logs = needed_vllm_python(), folder.parent
    flags = "--max-model-len", "4096"
    large = *flags, "--served-model-name", "large"
    with (
        vllm_server(python, folder, logs / "tiny.log", *flags) as tiny,
        vllm_server(python, folder, logs / "large.log", *large) as other,
    ):
        yield tiny, other


async def ask(on: Stage, model: str, **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "one two three", "max_tokens": 2, **fields}
    async with on.post(body) as response:
        answer = await response.json() if not fields.get("stream") else await response.text()
        return response.status, answer


@pytest.mark.real_time
async def test_each_request_is_answered_by_its_model(servers: tuple[str, str]) -> None:
    async with stage(list(servers), models={"gpt-4o-mini": "large"}) as on:
        for asked, model in (("tiny", "tiny"), ("large", "large"), ("gpt-4o-mini", "large")):
            for _ in range(3):
                status, answer = await ask(on, asked)
                assert (status, answer["model"]) == (200, model)
        status, text = await ask(on, "gpt-4o-mini", stream=True)
        assert status == 200
        assert '"model":"large"' in text
        assert text.endswith("data: [DONE]\n\n")
        status, answer = await ask(on, "other")
        assert status == 404
        assert "`other` does not exist" in answer["error"]["message"]
        async with on.client.get(on.url + "/v1/models") as response:
            listed = (await response.json())["data"]
        assert {one["id"]: one["max_model_len"] for one in listed} == {
            "tiny": 4096, "large": 4096, "gpt-4o-mini": 4096,
        }  # fmt: skip
        body = {"model": "gpt-4o-mini", "prompt": "one two three"}
        async with on.post(body, path="/tokenize") as response:
            assert (await response.json())["count"] > 0
