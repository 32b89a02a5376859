"""Proxies as processes of their own, on real ports."""

import asyncio
import os
import re
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import yaml
from stages.proxy_stage import DONE
from stages.started import FOREBAY, PATIENCE_S


async def launch(*words: str, **environ: str) -> Process:
    """Start `forebay proxy` with `words`."""
    return await asyncio.create_subprocess_exec(
        *FOREBAY, "proxy", *words, stdout=PIPE, env={**os.environ, **environ}
    )


@asynccontextmanager
async def proxy_process(*words: str) -> AsyncIterator[tuple[Process, str, str]]:
    """`forebay proxy` with `words`, once it listens: the process, its URL and its admin URL."""
    # The test, which is the backend, may be late: other tests keep the machine busy.
    patient = {"FOREBAY_HEALTH__TIMEOUT": "30s"}
    process = await launch("--port", "0", "--admin-port", "0", *words, **patient)
    assert process.stdout is not None
    reading = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            url, admin_url = await addresses(process)
        reading = asyncio.create_task(process.stdout.read())  # so that it never blocks on us
        yield process, url, admin_url
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        if reading is not None:
            await reading


BODY = {"prompt": "hello", "max_tokens": 3}


class Proxies:
    """Processes of `forebay proxy` that share a configuration file."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self.running: list[Process] = []

    async def start(self, *words: str, **environ: str) -> tuple[Process, str, str]:
        """Start one more proxy. Returns its process, URL and admin URL once it is listening."""
        process = await launch("--config", str(self._config), *words, **environ)
        self.running.append(process)
        return process, *await addresses(process)


async def addresses(process: Process) -> tuple[str, str]:
    """Return a proxy's URL and admin URL, once it says that it listens."""
    assert process.stdout is not None
    said = ""
    while not (match := re.search(r"listening on (\S+), admin on ([^\s\",]+)", said)):
        line = await process.stdout.readline()
        assert line, said
        said += line.decode()
    return match[1], match[2]


@asynccontextmanager
async def proxies(config: Path) -> AsyncIterator[Proxies]:
    group = Proxies(config)
    try:
        yield group
    finally:
        for process in group.running:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def ready(admin_url: str) -> None:
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{admin_url}/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def write(path: Path, backend: str, **keys: object) -> None:
    path.write_text(
        yaml.safe_dump({"backends": [{"name": "b0", "url": backend}], **keys}), encoding="utf-8"
    )


async def client(url: str, kind: str, over: asyncio.Event, counts: Counter[str]) -> None:
    """Ask again and again, and count the outcomes."""
    connector = aiohttp.TCPConnector(force_close=kind == "new")
    async with aiohttp.ClientSession(connector=connector) as session:
        while not over.is_set():
            body = {**BODY, "stream": kind == "stream"}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    text = await answer.read()
                    whole = text.endswith(DONE) if kind == "stream" else b"choices" in text
                    good = answer.status == 200 and whole
                    counts["done" if good else f"{kind}: {answer.status} {text!r}"] += 1
            except (aiohttp.ClientError, OSError) as error:
                counts[f"{kind}: {error!r}"] += 1
