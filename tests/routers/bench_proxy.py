"""What a router costs: Forebay and its peers in front of the same backends that cost nothing.

    make bench-proxy                               (about ten minutes)
    python tests/routers/bench_proxy.py --routers forebay nginx --runs 3

The router alone has one core; backends and client share the other. CPU is the router's process
tree's own (user and system); what is added is the median against asking a backend directly, in
the same run. Medians over the runs, least and most in brackets. Wall-clock tails on a shared
machine are noise below about 10 ms: compare them within one table only.
"""

import argparse
import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop
from load import Answer, Broken, Client, chat
from peers import PEERS, Missing, Peer, Setting, environment

from forebay.replay.sim.bench import reference_ms

SMALL, DOCUMENT = 200, 400_000
CLOCK = os.sysconf("SC_CLK_TCK")
START_S = 60.0
Figures = dict[str, float]
COLUMNS = {
    "reference_ms": ("reference loop, ms", "{:.0f}"),
    "added_ms": ("small: added p50, ms", "{:.2f}"),
    "cpu_small_ms": ("CPU, ms", "{:.3f}"),
    "cpu_64_ms": ("64 at once: CPU, ms", "{:.3f}"),
    "rate_64": ("requests/s", "{:.0f}"),
    "document_ms": ("400 KB: added p50, ms", "{:.2f}"),
    "cpu_document_ms": ("CPU, ms", "{:.2f}"),
    "cpu_1k_tokens_s": ("CPU-s per 1,000 tokens", "{:.4f}"),
    "chat_p99_ms": ("small at 50/s: p99, ms", "{:.1f}"),
    "chat_20_p99_ms": ("beside 20 x 400 KB/s", "{:.1f}"),
    "chat_60_p99_ms": ("beside 60 x 400 KB/s", "{:.1f}"),
    "chat_8mb_p99_ms": ("beside 2 x 8 MB/s", "{:.1f}"),
    "rss_mib": ("RSS, MiB: start", "{:.0f}"),
    "rss_streams_mib": ("1,000 streams", "{:.0f}"),
    "rss_documents_mib": ("after unique 400 KB prompts", "{:.0f}"),
}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def cpu_s(pid: int) -> float:
    total = 0
    for one in tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / CLOCK


def rss_mib(pid: int) -> float:
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def running(command: list[str], core: int | None, log: Path) -> Iterator[int]:
    """A process on one core, ended with its whole group."""
    pinned = ["taskset", "-c", str(core), *command] if core is not None else command
    with log.open("wb") as out:
        process = subprocess.Popen(
            pinned, stdout=out, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        yield process.pid
    finally:
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signal_)
                process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


async def serving(port: int, log: Path) -> None:
    """Until it answers a chat; raises Missing with the end of its log."""
    client, until = Client(port), time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            await client.ask(chat(SMALL), 5.0)
        except (OSError, Broken, TimeoutError):
            await asyncio.sleep(0.2)
        else:
            client.close()
            return
    raise Missing(f"did not answer in {START_S:.0f} s: {last_line(log)}")


def last_line(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])[:200]


def p50_ms(answers: list[Answer]) -> float:
    return median(a.whole_s for a in answers) * 1e3


def p99_ms(answers: list[Answer]) -> float:
    ordered = sorted(a.whole_s for a in answers)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3


@dataclass(frozen=True, slots=True)
class Bench:
    """One router that serves."""

    port: int
    backend: int
    pid: int
    scale: float

    def many(self, count: int) -> int:
        return max(10, round(count * self.scale))

    async def figures(self) -> Figures:
        found = {"reference_ms": reference_ms(), "rss_mib": rss_mib(self.pid)}
        found |= await self._latency("added_ms", "cpu_small_ms", SMALL, self.many(2000))
        found |= await self._latency("document_ms", "cpu_document_ms", DOCUMENT, self.many(150))
        found |= await self._at_once(self.many(8000))
        found |= await self._streams()
        found |= await self._beside()
        found |= await self._memory()
        return found

    async def _latency(self, added: str, cpu: str, size: int, count: int) -> Figures:
        client, direct = Client(self.port), Client(self.backend)
        await client.in_turn([chat(size) for _ in range(20)])
        bare = p50_ms(await direct.in_turn([chat(size) for _ in range(count)]))
        before = cpu_s(self.pid)
        through = p50_ms(await client.in_turn([chat(size) for _ in range(count)]))
        used = cpu_s(self.pid) - before
        client.close()
        direct.close()
        return {added: through - bare, cpu: used / count * 1e3}

    async def _at_once(self, count: int) -> Figures:
        client, requests = Client(self.port), [chat(SMALL) for _ in range(count)]
        await client.at_once(requests[:64], 64)
        before, start = cpu_s(self.pid), time.perf_counter()
        await client.at_once(requests, 64)
        wall_s, used = time.perf_counter() - start, cpu_s(self.pid) - before
        client.close()
        return {"cpu_64_ms": used / count * 1e3, "rate_64": count / wall_s}

    async def _streams(self) -> Figures:
        client, tokens = Client(self.port), self.many(150)
        requests = [chat(SMALL, stream=(tokens, 20)) for _ in range(64)]
        before = cpu_s(self.pid)
        answers = await client.at_once(requests, 64)
        used = cpu_s(self.pid) - before
        client.close()
        if any(answer.tokens != tokens for answer in answers):
            raise Broken("tokens were lost")
        return {"cpu_1k_tokens_s": used / (64 * tokens) * 1e3}

    async def _beside(self) -> Figures:
        """Small chats at 50/s alone and beside big prompts; streams keep the engine slots short."""
        found = {}
        for name, size, per_s in (
            ("chat_p99_ms", 0, 0.0),
            ("chat_20_p99_ms", DOCUMENT, 20.0),
            ("chat_60_p99_ms", DOCUMENT, 60.0),
            ("chat_8mb_p99_ms", 8_000_000, 2.0),
        ):
            seconds = max(1.0, 8.0 * self.scale)
            small, big = Client(self.port), Client(self.port)
            load = [chat(size, stream=(1, 0)) for _ in range(round(per_s * seconds))]
            chats = [chat(SMALL, stream=(1, 0)) for _ in range(round(50 * seconds))]
            answers, _ = await asyncio.gather(
                small.paced(chats, 50.0), big.paced(load, per_s or 1.0)
            )
            found[name] = p99_ms(answers)
            small.close()
            big.close()
        return found

    async def _memory(self) -> Figures:
        client = Client(self.port)
        streams = asyncio.gather(
            *(client.ask(chat(SMALL, stream=(3, 1500))) for _ in range(self.many(1000)))
        )
        await asyncio.sleep(2.5)
        found = {"rss_streams_mib": rss_mib(self.pid)}
        await streams
        client.close()
        client = Client(self.port)
        for _ in range(self.many(10_000) // 10):
            await client.at_once([chat(DOCUMENT, stream=(1, 0)) for _ in range(10)], 4)
        client.close()
        return {**found, "rss_documents_mib": rss_mib(self.pid)}


async def measure(peer: Peer, folder: Path, cores: bool, scale: float) -> Figures:
    port, side_port, *backends = free_ports(4)
    setting = Setting(port, side_port, tuple(backends), folder)
    mock = [sys.executable, str(Path(__file__).with_name("mock_backend.py")), *map(str, backends)]
    log = folder / "router.log"
    with running(mock, 0 if cores else None, folder / "mock.log"):
        await serving(backends[0], folder / "mock.log")
        with running(list(peer.command(setting)), 1 if cores else None, log) as pid:
            await serving(port, log)
            return await Bench(port, backends[0], pid, scale).figures()


def table(results: dict[str, list[Figures]]) -> str:
    lines = ["| router | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("| --- " * (len(COLUMNS) + 1) + "|")
    for name, runs in results.items():
        cells = [name]
        for column, (_, form) in COLUMNS.items():
            values = sorted(run[column] for run in runs)
            least, most = form.format(values[0]), form.format(values[-1])
            middle = form.format(median(values))
            cells.append(middle if least == most else f"{middle} ({least}-{most})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--routers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    options = parser.parse_args()
    cores = (os.cpu_count() or 1) > 1 and sys.platform == "linux"
    if cores:
        os.sched_setaffinity(0, {0})
    versions: dict[str, str] = {}
    results: dict[str, list[Figures]] = {}
    failed: dict[str, str] = {}
    for name in options.routers:
        try:
            versions[name] = PEERS[name].install()
        except Missing as error:
            failed[name] = str(error)
    for _ in range(options.runs):  # in turn: the machine's speed changes from minute to minute
        for name in [n for n in versions if n not in failed]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = uvloop.run(measure(PEERS[name], Path(folder), cores, options.scale))
                except (Missing, Broken, OSError, TimeoutError) as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                    continue
            results.setdefault(name, []).append(found)
            print(f"{name}: measured", file=sys.stderr, flush=True)
    print(table(results))
    for name, why in failed.items():
        print(f"{name}: not measured: {why}")
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    print(f"\n{time.strftime('%Y-%m-%d')}, {machine}, Python {platform.python_version()};", end=" ")
    print(f"{options.runs} runs, scale {options.scale:g}; one core for the router: {cores};")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return 1 if "forebay" in failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
