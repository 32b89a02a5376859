"""Start the servers of a demonstration as child processes, and stop exactly those.

Each is `forebay WORD ...` on a free loopback port. It prints its URL on its first line. All of its
output goes to a log file.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import whole_file

if TYPE_CHECKING:
    from forebay.replay.engine.config import EngineConfig

READY_S = 60.0
STOP_S = 10.0
_URL = re.compile(r"http://[\w.:\[\]-]+:\d+")


class ServerFailed(Exception):
    """A server did not start. The message has its last line of output."""


@asynccontextmanager
async def server(words: Sequence[str], log: Path, backends: int = 0) -> AsyncIterator[str]:
    """Run `forebay WORDS` until the block ends. Yields its URL.

    The server is ready when it has printed its URL and reported each of its `backends` as up.

    Raises ServerFailed if it exits, or is not ready after READY_S seconds, and InputError if the
    log cannot be opened.
    """
    try:
        out = log.open("ab", buffering=0)  # unbuffered, so closing cannot fail
    except OSError as error:
        raise InputError(f"{log}: cannot be written ({error.strerror})") from error
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.proxy", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    copying = asyncio.create_task(_copy(process, out, url, backends))
    try:
        try:
            yield await asyncio.wait_for(asyncio.shield(url), READY_S)
        except TimeoutError as error:
            raise ServerFailed(f"forebay {words[0]}: no URL within {READY_S:.0f} s") from error
    finally:
        await _stop(process)
        await copying
        if url.done() and not url.cancelled():
            url.exception()  # marks it as retrieved: raised above, or the block has ended


async def _copy(
    process: asyncio.subprocess.Process, out: FileIO, url: asyncio.Future[str], backends: int
) -> None:
    assert process.stdout is not None
    last, url_line = "", None
    with out:
        async for line in process.stdout:
            with suppress(OSError):  # the disk may be full; the server must not wait for its log
                out.write(line)
            last = line.decode(errors="replace").rstrip() or last
            backends -= " is up" in last
            url_line = url_line or _URL.search(last)
            if url_line and backends <= 0 and not url.done():
                url.set_result(url_line.group())
    if not url.done():
        url.set_exception(
            ServerFailed(f"the server exited before it was ready: {last} (see {out.name})")
        )


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
    """The simulated engines to start: equal ones, each with an empty cache.

    Attributes:
        chunk_tokens: their --long-prefill-token-threshold, also set in the proxy. None: unset.
        scheduler_cls: their --scheduler-cls, also set in the proxy. None: vLLM's own.
    """

    model: str = "Llama-3-8B"
    gpu: str = "H200"
    count: int = 2
    time_scale: float = 1.0
    chunk_tokens: int | None = None
    scheduler_cls: str | None = None

    def config(self) -> "EngineConfig":
        """Return the options of one engine (InputError: a value that no engine accepts)."""
        from forebay.replay.engine.config import EngineConfig

        config = EngineConfig(
            model=self.model,
            gpu=self.gpu,
            time_scale=self.time_scale,
            long_prefill_token_threshold=self.chunk_tokens or 0,
            scheduler_cls=self.scheduler_cls,
        )
        config.limits()
        return config

    def command(self) -> list[str]:
        """Return the words after `forebay` that start one engine on a free port."""
        words = ["engine", "--model", self.model, "--gpu", self.gpu, "--port", "0"]
        words += ["--time-scale", str(self.time_scale), "--enable-prompt-tokens-details"]
        if self.chunk_tokens is not None:
            words += ["--long-prefill-token-threshold", str(self.chunk_tokens)]
        if self.scheduler_cls is not None:
            words += ["--scheduler-cls", self.scheduler_cls]
        return words


@asynccontextmanager
async def engines(fleet: Engines, logs: Path) -> AsyncIterator[list[str]]:
    """Start `fleet.count` engines. Yields their URLs."""
    async with AsyncExitStack() as stack:
        starts = (
            stack.enter_async_context(server(fleet.command(), logs / f"engine{i}.log"))
            for i in range(fleet.count)
        )
        # One after another: this task cannot exit contexts that other tasks entered.
        yield [await start for start in starts]


@asynccontextmanager
async def proxy(backends: Sequence[str], logs: Path, fleet: Engines) -> AsyncIterator[str]:
    """Start the proxy in front of `backends`, which run as `fleet` describes. Yields its URL.

    Its timeouts are wall-clock seconds. In front of engines that run X times as fast they are
    divided by X, so that the default configuration is simulated.
    """
    config = logs / "proxy.yaml"
    ours = fleet.config().limits().pause_s > 0
    text = proxy_config(backends, fleet.time_scale, fleet.chunk_tokens, bounded=ours)
    with whole_file(config) as file:
        file.write(text.encode())
    words = ["proxy", "--config", str(config)]
    async with server(words, logs / "proxy.log", len(backends)) as url:
        yield url


def proxy_config(
    backends: Sequence[str],
    time_scale: float,
    chunk_tokens: int | None = None,
    *,
    bounded: bool = False,
) -> str:
    """Return the default configuration with every duration divided by the time scale.

    Args:
        bounded: the backends have Forebay's scheduler class.
    """

    def ms(seconds: float) -> str:
        return f"{max(1.0, seconds / time_scale * 1000):.0f}ms"

    flag = f", long_prefill_token_threshold: {chunk_tokens}" if chunk_tokens else ""
    if bounded:
        flag += ", scheduler: forebay"
    servers = "\n".join(
        f"  - {{name: gpu{i}, url: {url!r}{flag}}}" for i, url in enumerate(backends)
    )
    return f"""\
listen: {{host: 127.0.0.1, port: 0, admin_port: 0}}
backends:
{servers}
buckets:
  - {{name: chat, up_to: 5000, max_wait: {ms(30)}, target: {ms(2)}}}
  - {{name: document, up_to: 131072, max_wait: {ms(30)}, target: {ms(15)}, prefills_per_backend: 1}}
admission: {{dispatch_ahead: {ms(0.3)}}}
timeouts: {{first_token: {ms(120)}, idle: {ms(60)}}}
debug_headers: true
"""
