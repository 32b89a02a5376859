"""LangChain, LlamaIndex and a client as `vllm bench serve` has work through the proxy unchanged."""

import asyncio

import pytest
from paths import ROOT, TESTS
from proxy_stage import stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

PYTHON = ROOT / ".clients/bin/python"


@pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` has not been run")
def test_clients_work_unchanged() -> None:
    async def main() -> tuple[int | None, str]:
        async with (
            start_engine(EngineConfig(time_scale=20)) as engine,
            stage([engine.url]) as on,
        ):
            process = await asyncio.create_subprocess_exec(
                str(PYTHON), str(TESTS / "clients/use.py"), on.url + "/v1", "llama-3-8b",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await asyncio.wait_for(process.communicate(), 100)
            return process.returncode, said.decode()

    code, said = asyncio.run(main())
    assert code == 0, said
    assert "all work" in said
