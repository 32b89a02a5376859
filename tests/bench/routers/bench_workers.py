"""Measure `--workers N` beside one process, and beside N processes that share nothing.

    python tests/bench/routers/bench_workers.py 2

A machine of two cores has none to spare for the client, so throughput is not read off a clock. A
process that is never idle answers 1 / (its CPU-s per request); N workers answer N times what one of
them does. That one has a core to itself, as the single process has; the other workers, which are as
busy, share the other core with client and backends. Independent proxies in the same arrangement
say how much of the difference is the machine's (cores that share caches, memory and turbo), and how
much the workers' exchange costs.
"""

import argparse
import asyncio
import os
import re
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop
from bench_proxy import mock, own_cpu_s, running, serving, tree
from load import Client, chat
from peers import PEERS, Setting
from ports import free_ports

CONNECTIONS, SMALL = 64, 200
OURS, THEIRS = 1, 0  # cores
SERVED = re.compile(r'forebay_admitted_total\{.*worker="0".*\} (\S+)')
KINDS = ("one", "workers", "apart")


class Arrangement:
    """Proxies that run in one of the KINDS; the first process is the one that is looked at."""

    def __init__(self, kind: str, count: int, backends: list[int], folder: Path) -> None:
        self.kind = kind
        self.ports: list[int] = []
        self._count = count
        self._backends = tuple(backends)
        self._folder = folder
        self._watched = 0  # pid

    async def start(self, stack: ExitStack) -> None:
        pids = []
        for number in range(self._count if self.kind == "apart" else 1):
            port, self._admin_port = free_ports(2)
            folder = self._folder / str(port)
            folder.mkdir()
            setting = Setting(port, self._admin_port, self._backends, folder)
            more = ["--workers", str(self._count)] if self.kind == "workers" else []
            core = OURS if number == 0 else THEIRS
            log = folder / "log"
            pids.append(
                stack.enter_context(running([*PEERS["forebay"].command(setting), *more], core, log))
            )
            await serving(port, log)
            self.ports.append(port)
        await asyncio.sleep(1.0)  # all listen, and know of each other
        self._watched = pids[0]
        if self.kind == "workers":
            parent, self._watched, *others = tree(pids[0])  # the first is worker 0
            for pid in (parent, *others):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {THEIRS})

    async def cpu_of_one(self, requests: int) -> float:
        """CPU-s that a request costs the process that is looked at."""
        await self._flood(4 * CONNECTIONS)
        served, before_s = self._served(), own_cpu_s(self._watched)
        answered = await self._flood(requests)
        spent_s = own_cpu_s(self._watched) - before_s
        return spent_s / (self._served() - served if self.kind == "workers" else answered)

    async def _flood(self, requests: int) -> int:
        """Send `requests`, CONNECTIONS at a time; return how many the first port answered."""
        left = iter(range(requests))
        answered = [0] * len(self.ports)
        clients = [Client(port) for port in self.ports]

        async def ask(place: int) -> None:
            for _ in left:
                await clients[place].ask(chat(SMALL))
                answered[place] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                group.create_task(ask(number % len(clients)))
        for client in clients:
            client.close()
        return answered[0]

    def _served(self) -> float:
        """By worker 0, since it began."""
        if self.kind != "workers":
            return 0.0
        url = f"http://127.0.0.1:{self._admin_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            return sum(map(float, SERVED.findall(answer.read().decode())))


async def measure(count: int, requests: int, rounds: int) -> list[dict[str, float]]:
    """For each round, CPU-s of a request in each of the KINDS, in turn."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, backends = Path(name), free_ports(2)
        with mock(folder, backends, cores=True):
            await serving(backends[0], folder / "mock.log")
            for _ in range(rounds):
                found.append({})
                for kind in KINDS:
                    with ExitStack() as stack:
                        arrangement = Arrangement(kind, count, backends, folder)
                        await arrangement.start(stack)
                        found[-1][kind] = await arrangement.cpu_of_one(requests)
    return found


def spread(factors: list[float]) -> str:
    return f"{median(factors):.2f} ({min(factors):.2f} to {max(factors):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workers", type=int, nargs="?", default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000)
    options = parser.parse_args()
    if options.workers < 2:
        parser.error(f"{options.workers} workers: give 2 or more")
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        parser.error("needs Linux and two cores")
    os.sched_setaffinity(0, {THEIRS})
    rounds = uvloop.run(measure(options.workers, options.requests, options.rounds))
    for each in rounds:
        print("CPU of a request, ms:", *(f"{kind} {each[kind] * 1e3:.3f}" for kind in KINDS))
    count = options.workers
    workers = [count * each["one"] / each["workers"] for each in rounds]
    apart = [count * each["one"] / each["apart"] for each in rounds]
    costs = [each["workers"] / each["apart"] for each in rounds]
    print(
        f"--workers {count} answer {spread(workers)} times as much as one process; {count} proxies "
        f"that know nothing of each other {spread(apart)}; what they tell each other makes a "
        f"request {spread(costs)} times as dear (median, least and most of {len(rounds)} rounds)"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
