"""Count the instructions of the proxy and of the simulator, in plain Python (valgrind).

Instructions of user code are nearly the same in each run, whatever else the machine does; times
are not. They depend on the interpreter, so counts have its name.
"""

import asyncio
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import uvloop
from ports import free_ports
from routers.load import TOKEN, Broken, Client, chat
from routers.mock_backend import Backend, token
from routers.peers import PEERS, Setting

INTERPRETER = f"Python {platform.python_version()} {platform.machine()}"
FIGURES = ("small request", "400 KB body", "1,000 tokens", "10,000 simulated requests")
START_S = 300.0  # until the proxy answers; valgrind makes it fifty times slower
TOKENS = 2_000  # of a stream
REPEATS = 3  # the least count of so many: a timer that fires in between only adds
SIMULATED = 1_000  # requests
SIMULATION = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from sim_speed import mix
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario, simulate
simulate(mix(100, 2, 1), Scenario(EngineConfig(), 2))
rows = mix({SIMULATED}, 2, 0)
print("ready", flush=True)
input()
simulate(rows, Scenario(EngineConfig(), 2))
print("done", flush=True)
input()
"""


def available() -> bool:
    return shutil.which("valgrind") is not None and shutil.which("callgrind_control") is not None


def counts() -> list[float]:
    """Return FIGURES in millions of instructions."""
    with tempfile.TemporaryDirectory() as folder:
        served = uvloop.run(_served(Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        simulated = 10_000 / SIMULATED * _simulated(Path(folder))
    return [float(f"{value:.4g}") for value in (*served, simulated)]


def _command(folder: Path, *command: str) -> list[str]:
    """Return a command that counts nothing until `callgrind_control --instr=on`."""
    out = f"--callgrind-out-file={folder}/callgrind.out"
    return ["valgrind", "--tool=callgrind", "--instr-atstart=no", out, "--quiet", *command]


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "proxy" not in k.lower()}
    return {**kept, "PYTHONHASHSEED": "0"}


def _millions(folder: Path) -> float:
    """Return the sum of all dumps, and remove them."""
    total = 0
    for path in folder.glob("*out*"):
        found = re.search(r"^(?:totals|summary): (\d+)", path.read_text(), re.MULTILINE)
        total += int(found[1]) if found else 0
        path.unlink()
    return total / 1e6


def _simulated(folder: Path) -> float:
    process = subprocess.Popen(
        _command(folder, sys.executable, "-c", SIMULATION), env=_environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    _control("--instr=on", process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    _control("--dump", process.pid)
    millions = _millions(folder)
    process.communicate("\n")
    return millions


@contextmanager
def _running(command: Sequence[str]) -> Iterator[int]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
    )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class LockStep(Backend):
    """A backend whose next token waits for `more`, so that no two tokens are relayed at once."""

    more: ClassVar[Callable[[], None]]

    def _next(self, sent: int, tokens: int, interval_s: float) -> None:
        if sent < tokens:
            LockStep.more = partial(self._next, sent + 1, tokens, interval_s)
            self._transport.write(token(sent))
        else:
            super()._next(sent, tokens, 1.0)


async def _stream(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat(200, stream=(TOKENS, 1)))
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data = await reader.read(65_536)
        if not data:
            raise Broken("the connection was lost")
        for _ in range(data.count(TOKEN)):
            LockStep.more()
    writer.close()


async def _served(folder: Path) -> tuple[float, float, float]:
    """Count a small request, a body of 400 KB and 1,000 tokens of streams, in the proxy alone."""
    port, side_port, *backends = free_ports(4)
    proxy = PEERS["forebay"].command(Setting(port, side_port, tuple(backends), folder))
    for backend in backends:
        await asyncio.get_running_loop().create_server(LockStep, "127.0.0.1", backend)
    with _running(_command(folder, *proxy)) as pid:
        client, until = Client(port), time.monotonic() + START_S
        while True:
            try:
                await client.in_turn([chat(200) for _ in range(20)])
                break
            except (OSError, Broken):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.5)
        _control("--instr=on", pid)
        await client.in_turn([chat(200)])

        async def per_request(count: int, size: int) -> float:
            requests = [[chat(size) for _ in range(count)] for _ in range(REPEATS)]
            return min([await _counted(pid, folder, client.in_turn(r)) / count for r in requests])

        small, body = await per_request(50, 200), await per_request(20, 400_000)
        tokens = min([await _counted(pid, folder, _stream(port)) for _ in range(REPEATS)])
        client.close()
    return small, body, 1_000 / TOKENS * (tokens - small)


async def _counted(pid: int, folder: Path, work: Awaitable[Any]) -> float:
    """Return the millions of instructions while `work` is done; a tenth is that of timers."""
    _control("--zero", pid)
    await work
    _control("--dump", pid)
    return _millions(folder)


def _control(action: str, pid: int) -> None:
    subprocess.run(["callgrind_control", action, str(pid)], check=True, capture_output=True)


if __name__ == "__main__":
    print(counts())
