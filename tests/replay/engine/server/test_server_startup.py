"""A simulated server whose port opens late, as a real vLLM loads and compiles first."""

import asyncio
import signal
import subprocess
import time

import pytest
from ports import free_ports
from stages.engine_stage import COMMAND

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import start_engine
from forebay.traces.ground.errors import InputError


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@pytest.mark.parametrize(("time_scale", "opens_at"), [(1.0, 144.0), (20.0, 7.2)])
async def test_the_port_opens_after_the_startup_time(time_scale: float, opens_at: float) -> None:
    port = free_ports(1)[0]

    async def early() -> bool:
        await asyncio.sleep(opens_at - 0.1)
        return await refused(port)

    trial = asyncio.create_task(early())
    options = ServerOptions(startup_time=144.0)
    async with start_engine(EngineConfig(time_scale=time_scale), port=port, options=options):
        assert asyncio.get_running_loop().time() == pytest.approx(opens_at)
        assert await trial
        assert not await refused(port)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_never_ends_is_an_error(seconds: float) -> None:
    with pytest.raises(InputError, match="--startup-time"):
        ServerOptions(startup_time=seconds)


def test_sigterm_ends_a_server_that_is_still_starting() -> None:
    port = free_ports(1)[0]
    words = [*COMMAND, "--model", "llama-3-8b", "--startup-time", "600", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # Until the command handles SIGTERM itself.
        status = f"/proc/{process.pid}/status"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with open(status) as lines:
                caught = next(line for line in lines if line.startswith("SigCgt"))
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""
