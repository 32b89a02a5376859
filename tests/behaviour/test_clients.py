"""Clients that people have work through the proxy unchanged.

openai, anthropic, LangChain, LlamaIndex and a client as `vllm bench serve` has, curl as each API
documents it, and the JDK's HTTP client. Each asks a simulated engine, and a real vLLM where there
is one.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, TESTS
from stages.proxy_stage import stage
from vllm_server import ModelSize, needed_vllm_python, vllm_process, write_model

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

PYTHON = ROOT / ".clients/bin/python"


KEY = "key-of-acme-0123456789"
MESSAGES = [{"role": "user", "content": "Say something."}]
CHAT = {"model": "llama-3-8b", "max_tokens": 4, "messages": MESSAGES}
WHERE: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", [f"Authorization: Bearer {KEY}"], CHAT),
    "openai responses": (
        "/v1/responses", [f"Authorization: Bearer {KEY}"],
        {"model": "llama-3-8b", "max_output_tokens": 4, "input": "Say something."},
    ),
    "anthropic": ("/v1/messages", [f"x-api-key: {KEY}", "anthropic-version: 2023-06-01"], CHAT),
    "azure": ("/v1/chat/completions", [f"api-key: {KEY}"], CHAT),
}  # fmt: skip


def can_run_java() -> bool:
    if not shutil.which("java"):
        return False
    done = subprocess.run(["java", "--list-modules"], capture_output=True, text=True)
    return "jdk.compiler@" in done.stdout and "java.net.http@" in done.stdout


def said_by(server: str, *command: str, keys: Path | None = None) -> tuple[int | None, str]:
    """Exit status and output of a program. URL in its command stands for the URL of a proxy.

    `server`: the URL of an engine; "": a simulated one.
    """

    async def main() -> tuple[int | None, str]:
        tenants: dict[str, Any] = {"tenants": {"keys": str(keys)}} if keys is not None else {}
        async with AsyncExitStack() as stack:
            url = server
            if not url:
                engine = start_engine(EngineConfig(time_scale=20))
                url = (await stack.enter_async_context(engine)).url
            on = await stack.enter_async_context(stage([url], **tenants))
            process = await asyncio.create_subprocess_exec(
                *(word.replace("URL", on.url) for word in command),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await asyncio.wait_for(process.communicate(), 100)
            return process.returncode, said.decode()

    return asyncio.run(main())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"acme: {KEY}\n")
    return path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python, folder = needed_vllm_python(), tmp_path_factory.mktemp("vllm")
    write_model(folder / "model", ModelSize())
    flags = ("--max-model-len", "4096", "--served-model-name", "llama-3-8b")
    with vllm_process(python, folder / "model", folder / "vllm.log", *flags) as running:
        yield running.url


@pytest.fixture(params=["simulated", "vllm"])
def server(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("vllm")) if request.param == "vllm" else ""


@pytest.mark.timeout(400)
@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` has not been run")
def test_clients_work_unchanged(server: str) -> None:
    use = str(TESTS / "clients/use.py")
    code, said = said_by(server, str(PYTHON), use, "URL/v1", "llama-3-8b")
    assert code == 0, said
    assert "all work" in said


@pytest.mark.timeout(400)
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
@pytest.mark.parametrize("api", WHERE)
def test_curl_with_the_headers_that_each_api_documents(server: str, api: str, keys: Path) -> None:
    path, headers, body = WHERE[api]
    words = [word for header in (*headers, "content-type: application/json")
             for word in ("-H", header)]  # fmt: skip
    data = json.dumps(body)
    command = ("curl", "-sS", "--fail", f"URL{path}", *words, "-d", data)
    code, said = said_by(server, *command, keys=keys)
    assert code == 0, said
    assert json.loads(said)["usage"]


@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_run_java(), reason="needs a JDK")
def test_the_jdks_client_which_offers_http2(server: str, keys: Path) -> None:
    program = str(TESTS / "clients/Ask.java")
    code, said = said_by(server, "java", program, "URL/v1/chat/completions", KEY, keys=keys)
    assert code == 0, said
    assert "all work" in said
