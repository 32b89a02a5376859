"""Measure a well-behaved client beside each abuse: success, p99, memory and lag of the proxy.

    python tests/bench/neighbours/neighbours.py [--scene NAME ...] [--seconds 11] [--json OUT]
    python tests/bench/neighbours/neighbours.py --write-docs AFTER.json

Proxy, backend and abuse are processes of their own. The good client starts one short stream every
25 ms. Printed for each scene: the share of its requests that were served, median and p99 of the
time to the first byte of the answer, the proxy's highest resident memory, its longest lag, and the
seconds from SIGTERM to its end while the abuse goes on (drain 2 s).
"""

import argparse
import asyncio
import json
import os
import platform
import re
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from neighbour_scenes import PROXY_PID, SCENES, Scene
from neighbour_tenants import KEYS, set_keys

from forebay.proxy import cli as proxy_cli

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[2] / "docs" / "benchmarks"
PAGE = DOCS / "neighbours.md"
INTRODUCTION = """\
# A good client beside abuse

Written by `make bench-neighbours`: {when}. The good client starts a short stream every 25 ms for
{seconds:g} s, or a document every 0.2 s. Proxy, two backends and abuse are processes of their own,
on loopback. The proxy has a processor of its own. The abuse has the lowest priority, as if it came
from other machines.

- *Served*: share of the good client's requests. *p99*: its time to the first byte of an answer, ms.
- *Direct*: p99 of a control that asks the same backends at the same time, without the proxy. It
  shows the part that shared processors and backends cause.
- *RSS*: highest, MiB. *Lag*: upper end of the highest bucket of `forebay_event_loop_lag_seconds`,
  in ms.
- *SIGTERM*: seconds to the end of the process while the abuse goes on; `drain` is 2 s.

Compare a scene with the scene without its abuse:

- `classes`, `priorities`, `embeddings_flood` with `busy`: a tenant of equal weight asks for more
  than the engines can compute, and the good client waits for that tenant's share.
- `text_without_usage` with `within_quota`, whose tenant has the same quota and reports its usage.
- `large_max_tokens` with `busy_streams`: the same 64 streams of 200 tokens a second, without a
  `max_tokens`. They take half of the proxy's processor. `--workers` shares that work.
- `signals_to_parent_and_workers` with `undisturbed_workers`: two workers on the one processor. RSS
  is the parent's.
- All others with `undisturbed`, `undisturbed_documents`, or for scenes of the engine
  `undisturbed_engine`.

{above}

- `large_bodies`: a body of 15 MB is parsed in pieces, but single calls hold the interpreter:
  `jiter` takes 2.5 ms for it, `orjson` 19 ms (30 ms if all of it is escaped quotes).
- `large_max_tokens`, `busy_streams`, `slow_uploads`, `escaped_quotes`, `large_bodies` and
  `servers_1000` were measured apart from the others, on a quiet machine: `undisturbed` was 8 there,
  `undisturbed_engine` 10.
- The hundred clients of `slow_images` and `slow_grammars` begin one after the other. If all ask at
  the same moment, p99 is 65 ms, the proxy's time for a hundred requests.
- In `big_answers_not_read` the backends write 1.8 GB in the first seconds, which *direct* shows.

`tests/faults/test_neighbours.py` plays the scenes that pause at small scale.

| scene | served % | p99 | direct | RSS | lag | SIGTERM |
| --- | --- | --- | --- | --- | --- | --- |
"""
EVERY_S, DRAIN_S, PATIENCE_S, MOST = 0.025, 2.0, 30.0, 1.5
SECONDS = 11.0  # of each scene
UP = re.compile(r"^forebay_backend_up\{[^}]*\} 1\.0$", re.MULTILINE)
LAG = re.compile(
    r'^forebay_event_loop_lag_seconds_bucket\{le="([^"]+)",?([^}]*)\} (\S+)$', re.MULTILINE
)


@dataclass
class Measured:
    """What was seen in one scene.

    Attributes:
        direct_p99_ms: of the control, a client that asks the backends without the proxy.
        lag_ms: upper end of the metric's last bucket with a value.
        end_s: from SIGTERM to the end of the process.
    """

    scene: str
    item: int
    sent: int
    served: float
    p50_ms: float
    p99_ms: float
    direct_p99_ms: float
    rss_mib: float
    lag_ms: float
    end_s: float
    statuses: dict[str, int]


@asynccontextmanager
async def started(*words: str, stdout: int | None = PIPE) -> AsyncIterator[Process]:
    """A process of Python, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=stdout, cwd=HERE, env=os.environ
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def backend_urls(stack: AsyncExitStack, ports: int = 1) -> list[str]:
    process = await stack.enter_async_context(started("neighbour_backend.py", str(ports)))
    assert process.stdout is not None
    return [(await process.stdout.readline()).decode().strip() for _ in range(ports)]


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return `{"a.b": 1}` as `{"a": {"b": 1}}`."""
    result: dict[str, Any] = {}
    for key, value in keys.items():
        at = result
        *path, last = key.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return result


async def proxy(stack: AsyncExitStack, urls: list[str], scene: Scene) -> tuple[Any, ...]:
    """Start a proxy; returns its process, URL and admin URL."""
    keys = dict(scene.config)
    more = keys.pop("backends", [])
    config = {
        "backends": [*({"name": f"gpu{i}", "url": url} for i, url in enumerate(urls)), *more],
        **nested(
            {"listen.port": 0, "listen.admin_port": 0, "timeouts.drain": f"{DRAIN_S}s"} | keys
        ),
    }
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    process = await stack.enter_async_context(
        started("-c", f"import neighbours; neighbours.serve({str(path)!r}, {scene.workers})")
    )
    assert process.stdout is not None
    said = ""
    while not (found := re.search(r"listening on (\S+), admin on ([^\s\",]+)", said)):
        line = await process.stdout.readline()
        assert line, said
        said += line.decode()
    if not scene.deaf:
        stack.push_async_callback(_cancelled, asyncio.create_task(process.stdout.read()))
    return process, found[1], found[2]


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class GoodClient:
    """Starts a stream every EVERY_S, and keeps the outcome of each."""

    def __init__(self, *urls: str, **fields: Any) -> None:
        self.urls = cycle(f"{url}/v1/chat/completions" for url in urls)
        self.statuses: Counter[str] = Counter()
        self.first_s: list[float] = []
        self.sent = 0
        chat = {"model": "good", "messages": [{"role": "user", "content": "hello"}]}
        self.body = json.dumps({**chat, **fields, "stream": True}).encode()
        # Documents come as fast as the engines can compute them.
        self.every_s = max(EVERY_S, len(self.body) / 2e6)

    async def run(self, seconds: float) -> None:
        """Start streams for so long, and wait for all."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            due = asyncio.get_running_loop().time()
            for _ in range(round(seconds / self.every_s)):
                group.create_task(self.ask(session))
                due += self.every_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    async def ask(self, session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        self.sent += 1
        headers = {
            "content-type": "application/json", "authorization": f"Bearer {KEYS['good']}",
        }  # fmt: skip
        try:
            async with session.post(next(self.urls), data=self.body, headers=headers) as answer:
                first = await answer.content.readany()
                first_s = time.monotonic() - began
                rest = first + await answer.read()
                good = answer.status == 200 and rest.endswith(b"data: [DONE]\n\n")
                self.statuses["good" if good else str(answer.status)] += 1
                if good:
                    self.first_s.append(first_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.statuses[type(error).__name__] += 1

    def percentile_ms(self, percent: int) -> float:
        times = sorted(self.first_s) or [float("inf")]
        return times[len(times) * percent // 100] * 1e3


async def ready(admin_url: str, up: int) -> None:
    """Wait until so many backends are up, in each worker. Raises TimeoutError after PATIENCE_S."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(f"{admin_url}/metrics") as answer:
                if len(UP.findall(await answer.text())) >= up:
                    return
            await asyncio.sleep(0.3)


async def longest_lag_ms(admin_url: str) -> float:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{admin_url}/metrics") as answer,
    ):
        text = await answer.text()
    counts: dict[str, list[tuple[float, float]]] = {}  # by worker
    for le, worker, count in LAG.findall(text):
        counts.setdefault(worker, []).append((float(count), float(le)))
    longest = [min(le for count, le in one if count == max(one)[0]) for one in counts.values()]
    return max(longest) * 1e3


def highest_rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


async def measure(name: str, seconds: float, head_start_s: float = 1.0) -> Measured:
    """Play one scene."""
    scene = SCENES[name]
    set_keys()
    async with AsyncExitStack() as stack:
        urls = [*await backend_urls(stack), *await backend_urls(stack)]
        more = await backend_urls(stack, scene.servers) if scene.servers else []
        process, url, admin_url = await proxy(stack, [*urls, *more], scene)
        os.environ[PROXY_PID] = str(process.pid)
        await ready(admin_url, len([*urls, *more]) * max(1, scene.workers))
        await asyncio.sleep(1.5)
        await GoodClient(url, **scene.good).run(
            1.0
        )  # what is learned and compiled first is no part of it
        await stack.enter_async_context(
            started("-c", f"import neighbours; neighbours.abuse({name!r}, {url!r})", stdout=None)
        )
        await asyncio.sleep(head_start_s)
        client, control = GoodClient(url, **scene.good), GoodClient(*urls)
        await asyncio.gather(client.run(seconds), control.run(seconds))
        lag_ms = await longest_lag_ms(admin_url)
        rss_mib = highest_rss_mib(process.pid)
        began = time.monotonic()
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await process.wait()
        end_s = time.monotonic() - began
    return Measured(
        name, scene.item, client.sent, client.statuses["good"] / client.sent,
        client.percentile_ms(50), client.percentile_ms(99), control.percentile_ms(99),
        rss_mib, lag_ms, end_s, dict(client.statuses),
    )  # fmt: skip


def serve(path: str, workers: int) -> None:
    """Run the proxy, in a world where one name is looked up for 10 s."""
    look_up = socket.getaddrinfo

    def slowly(host: Any, *words: Any, **options: Any) -> Any:
        if host == "slow.test":
            time.sleep(10)
        return look_up(host, *words, **options)

    socket.getaddrinfo = slowly
    core_apart(mine=True)
    sys.argv = ["forebay", "proxy", "--config", path]
    if workers:
        sys.argv += ["--workers", str(workers)]
    sys.exit(proxy_cli.main())


def core_apart(*, mine: bool) -> None:
    """Give the proxy a processor of its own, as what is measured is the proxy.

    Clients, backends and abuse are on other machines otherwise.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = range(os.cpu_count() or 1)
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[-1:] if mine else cores[:-1])


def abuse(name: str, url: str) -> None:
    """Run one scene until the process is ended, on what the others leave of the processors.

    Abuse comes from other machines: it must not take the processor of those whom it abuses.
    """
    os.nice(19)

    async def main() -> None:
        # Connections that the proxy has cut are no news.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await SCENES[name].run(url)

    asyncio.run(main())


def shown(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or value == float("inf") else f"{value:.{digits}f}"


def compared_with(name: str) -> str:
    """Return the scene that shows what this one may cost."""
    if name in ("classes", "priorities", "embeddings_flood"):
        return "busy"
    if name == "text_without_usage":
        return "within_quota"
    if name == "large_max_tokens":
        return "busy_streams"
    if SCENES[name].workers:
        return "undisturbed_workers"
    good = SCENES[name].good
    kind = "_engine" if "model" in good else "_documents" if good else ""
    return f"undisturbed{kind}"


def above(rows: list[dict[str, Any]]) -> str:
    """Say in which scenes p99 is above MOST times that without abuse, and that of the control."""
    p99_ms = {row["scene"]: row["p99_ms"] for row in rows}
    found = [
        f"`{row['scene']}`"
        for row in rows
        if row["scene"] not in ("busy", "busy_streams", "within_quota")
        and row["p99_ms"] > MOST * max(p99_ms[compared_with(row["scene"])], row["direct_p99_ms"])
    ]
    wanted = f"{MOST:g} times both that scene and *direct*"
    return f"p99 is above {wanted}\nin {', '.join(found) or 'no scene'}."


def write_docs(measured: Path) -> None:
    """Write the page from the rows in a file of --json."""
    rows = json.loads(measured.read_text("utf-8"))
    lines = []
    for row in sorted(rows, key=lambda one: one["item"]):
        cells = [
            shown(scale * row[name], digits)
            for name, scale, digits in (
                ("served", 100, 1), ("p99_ms", 1, 0), ("direct_p99_ms", 1, 0), ("rss_mib", 1, 0),
                ("lag_ms", 1, 0), ("end_s", 1, 1),
            )
        ]  # fmt: skip
        lines.append(f"| `{row['scene']}` | {' | '.join(cells)} |\n")
    when = datetime.fromtimestamp(measured.stat().st_mtime, UTC).strftime("%Y-%m-%d")
    when += f", Python {platform.python_version()}, {os.cpu_count()} cores"
    page = INTRODUCTION.format(when=when, above=above(rows), seconds=SECONDS)
    PAGE.write_text(page + "".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", action="append", choices=list(SCENES))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="only write the page")
    options = parser.parse_args()
    if options.write_docs:
        write_docs(options.write_docs)
        return
    core_apart(mine=False)
    print("| scene | item | served | p50 ms | p99 ms | direct ms | RSS MiB | lag ms | SIGTERM s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for name in options.scene or SCENES:
        one = asyncio.run(measure(name, options.seconds))
        rows.append(asdict(one))
        print(
            f"| {one.scene} | {one.item} | {one.served:.1%} | {one.p50_ms:.0f} | {one.p99_ms:.0f} "
            f"| {one.direct_p99_ms:.0f} | {one.rss_mib:.0f} | {one.lag_ms:.0f} "
            f"| {one.end_s:.1f} | {one.statuses}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
