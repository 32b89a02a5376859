"""Start the servers of a demonstration as processes of their own, and stop exactly those.

Each is `forebay WORD ...` on a free loopback port. It says its URL on its first line; what it
says afterwards goes to a log file.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

READY_S = 60.0
STOP_S = 10.0
_URL = re.compile(r"http://[\w.:\[\]-]+:\d+")


class ServerFailed(Exception):
    """A server did not come up; the message holds what it said last."""


@asynccontextmanager
async def server(words: Sequence[str], log: Path, backends: int = 0) -> AsyncIterator[str]:
    """Run `forebay WORDS` until the block ends; yields its URL.

    It is up when it has said its URL and, of `backends` backends, that each is up.

    Raises ServerFailed when it exits, or says nothing for READY_S seconds, before it is up.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.proxy", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    copying = asyncio.create_task(_copy(process, log, url, backends))
    try:
        try:
            yield await asyncio.wait_for(asyncio.shield(url), READY_S)
        except TimeoutError as error:
            raise ServerFailed(f"forebay {words[0]}: no URL within {READY_S:.0f} s") from error
    finally:
        await _stop(process)
        await copying
        if url.done() and not url.cancelled():
            url.exception()  # seen: it was raised above, or the block had left already


async def _copy(
    process: asyncio.subprocess.Process, log: Path, url: asyncio.Future[str], backends: int
) -> None:
    assert process.stdout is not None
    last, url_line = "", None
    with log.open("a", encoding="utf-8") as out:
        async for line in process.stdout:
            last = line.decode(errors="replace").rstrip() or last
            out.write(last + "\n")
            out.flush()
            backends -= " is up" in last
            url_line = url_line or _URL.search(last)
            if url_line and backends <= 0 and not url.done():
                url.set_result(url_line.group())
    if not url.done():
        url.set_exception(ServerFailed(f"the server ended before it was up: {last} (see {log})"))


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Engines:
    """Which simulated servers to start; equal ones, each with an empty cache."""

    model: str = "Llama-3-8B"
    gpu: str = "H200"
    count: int = 2
    time_scale: float = 1.0
    flags: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise InputError, before anything is started, for what no engine would take."""
        from forebay.replay.engine.config import EngineConfig

        EngineConfig(model=self.model, gpu=self.gpu, time_scale=self.time_scale)


@asynccontextmanager
async def engines(wanted: Engines, logs: Path) -> AsyncIterator[list[str]]:
    """Start `wanted.count` engines; yields their URLs."""
    async with AsyncExitStack() as stack:
        words = ["engine", "--model", wanted.model, "--gpu", wanted.gpu, "--port", "0"]
        words += ["--time-scale", str(wanted.time_scale), *wanted.flags]
        starts = (
            stack.enter_async_context(server(words, logs / f"engine{i}.log"))
            for i in range(wanted.count)
        )
        # One after the other: contexts entered by other tasks could not be left by this one.
        yield [await start for start in starts]


@asynccontextmanager
async def proxy(
    backends: Sequence[str], logs: Path, *, time_scale: float = 1.0, extra: str = ""
) -> AsyncIterator[str]:
    """Start the proxy in front of `backends`; yields its URL.

    Its waits are wall-clock seconds, so in front of engines that run X times fast they are
    divided by X: what is simulated is the default configuration at full length.
    """
    config = logs / "proxy.yaml"
    config.write_text(proxy_config(backends, time_scale) + extra, encoding="utf-8")
    words = ["proxy", "--config", str(config)]
    async with server(words, logs / "proxy.log", len(backends)) as url:
        yield url


def proxy_config(backends: Sequence[str], time_scale: float) -> str:
    """The default configuration with every wait divided by the time scale."""

    def ms(seconds: float) -> str:
        return f"{max(1.0, seconds / time_scale * 1000):.0f}ms"

    servers = "\n".join(f"  - {{name: gpu{i}, url: {url!r}}}" for i, url in enumerate(backends))
    return f"""\
listen: {{host: 127.0.0.1, port: 0, admin_port: 0}}
backends:
{servers}
buckets:
  - {{name: chat, up_to: 5000, max_wait: {ms(2)}}}
  - {{name: document, up_to: 131072, max_wait: {ms(30)}, prefills_per_backend: 1}}
admission: {{dispatch_ahead: {ms(0.3)}}}
timeouts: {{first_token: {ms(120)}, idle: {ms(60)}}}
debug_headers: true
"""
