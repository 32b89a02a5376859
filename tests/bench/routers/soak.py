"""Many requests, clients that leave, backends that die: does the proxy leak anything?

    make soak                                      (10^6 requests, a quarter of an hour)
    python tests/bench/routers/soak.py --requests 50000
    python tests/bench/routers/soak.py --requests 36000 --rate 5 --flap-every 60    (two hours)

One proxy process in front of two mock backends, each of which is killed for a second and a half in
turn every four seconds (`--flap-every`). One request in twenty is left by its client at a random
moment: while it uploads, waits, or streams. Prints, for each tenth of the run, requests a second,
the proxy's resident memory, open descriptors and the blocks in its prefix indexes, and at the end
what the proxy still holds. Exit status 1 if anything leaked: a slot, a task, a descriptor, or
memory (last tenth over first by 10 %).

The backends state a KV pool, as vLLM does, so the index is as large as it gets within the first
tenth. With `--kv-tokens 0` its size is unknown: then the index may grow to 65,536 blocks a backend
(about 110 bytes each), which takes hundreds of thousands of requests and looks like a leak.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from bench_proxy import rss_mib, running, serving
from load import Broken, Client, chat
from ports import free_ports

LEAVING, CONCURRENCY = 0.05, 96
DOWN_S = 1.5
MOST_GROWTH = 1.10  # of the resident memory, first tenth to last
KINDS = (  # share, bytes, stream
    (0.55, 300, None),
    (0.25, 300, (6, 0)),
    (0.12, 300, (6, 5)),
    (0.07, 8_000, (3, 2)),
    (0.01, 200_000, (3, 2)),
)


def requests(seed: int, count: int) -> Iterator[tuple[bytes, float]]:
    """Each with the seconds after which its client leaves; infinite for most."""
    rng = random.Random(seed)
    for _ in range(count):
        (_, size, stream), *_ = rng.choices(KINDS, [kind[0] for kind in KINDS])
        leaves_s = rng.uniform(0.0, 0.04) if rng.random() < LEAVING else float("inf")
        yield chat(size, stream=stream), leaves_s


def status(admin_port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/status", timeout=10) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def refused(admin_port: int) -> str:
    """Requests that the proxy itself rejected, by its own counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counters = ("forebay_rejects_total", "forebay_shed_total", "forebay_upstream_errors_total")
    return ", ".join(line.removeprefix("forebay_") for line in lines if line.startswith(counters))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def descriptors_lately(pid: int) -> list[int]:
    """Over some seconds: a health probe may have one open or not."""
    found = []
    for _ in range(15):
        found.append(descriptors(pid))
        await asyncio.sleep(0.2)
    return found


class Backends:
    """Two mock backends that take turns at dying."""

    def __init__(self, ports: list[int], folder: Path) -> None:
        self._ports = ports
        self._folder = folder
        self._up = [ExitStack() for _ in ports]

    def start(self, which: int) -> None:
        mock = [
            sys.executable,
            str(Path(__file__).with_name("mock_backend.py")),
            str(self._ports[which]),
        ]
        self._up[which].enter_context(running(mock, None, self._folder / f"mock{which}.log"))

    def stop(self, which: int) -> None:
        self._up[which].close()

    async def flap(self, every_s: float) -> None:
        which = 0
        while True:
            await asyncio.sleep(every_s - DOWN_S)
            await asyncio.to_thread(self.stop, which)
            await asyncio.sleep(DOWN_S)
            self.start(which)
            which = 1 - which


async def ask(client: Client, request: bytes, leaves_s: float, seen: Counter[str]) -> None:
    try:
        await client.ask(request, min(leaves_s, 60.0))
    except TimeoutError:
        seen["left" if leaves_s < 60.0 else "no answer in 60 s"] += 1
    except Broken as error:
        seen[str(error)] += 1
    except OSError as error:
        seen[type(error).__name__] += 1
    else:
        seen["200"] += 1


async def soak(options: argparse.Namespace, folder: Path) -> int:
    port, admin_port, *backend_ports = free_ports(4)
    config = folder / "forebay.yaml"
    lines = "".join(
        f'  - {{url: "http://127.0.0.1:{p}", max_concurrency: 64}}\n' for p in backend_ports
    )
    buckets = "buckets: [{name: chat, up_to: 5000, max_wait: 20s}, {name: document, up_to: 131072}]"
    pool = f"affinity: {{kv_tokens: {options.kv_tokens}}}\n" if options.kv_tokens else ""
    config.write_text(
        f"backends:\n{lines}health: {{interval: 500ms}}\n{buckets}\n{pool}", encoding="utf-8"
    )
    command = [sys.executable, "-m", "forebay.proxy", "proxy", "--config", str(config),
               "--port", str(port), "--admin-port", str(admin_port)]  # fmt: skip
    backends, log = Backends(backend_ports, folder), folder / "proxy.log"
    with running(command, None, log) as pid, ExitStack() as stack:
        for which in range(len(backend_ports)):
            backends.start(which)
            stack.callback(backends.stop, which)
        await serving(port, log)
        found = await drive(options, port, admin_port, pid, backends)
        print(f"refused or failed, by the proxy's count: {refused(admin_port) or 'nothing'}")
        said = [line for line in log.read_text().splitlines() if "overloaded" in line]
        print("\n".join(["the proxy about itself:", *said[:20]]) if said else "never overloaded")
        await asyncio.sleep(8.0)  # idle connections close
        left = status(admin_port)
        held = {
            "in flight": sum(b["in_flight"] for b in left["backends"]),
            "prefills": sum(b["prefills"] for b in left["backends"]),
            "queued": sum(left["queued"].values()),
            "reserved KV tokens": sum(b["kv_reserved_tokens"] for b in left["backends"]),
            "tasks more than before": max(0, left["tasks"] - found["tasks"]),
            "descriptors more than before": max(
                0, min(await descriptors_lately(pid)) - int(found["descriptors"])
            ),
        }
    print("left at the end: " + ", ".join(f"{n} {name}" for name, n in held.items()))
    growth = found["last_mib"] / found["first_mib"]
    print(f"memory, last tenth over first: {growth:.3f}")
    bad = any(held.values()) or growth > MOST_GROWTH
    print("LEAKED" if bad else "nothing leaked")
    return int(bad)


def index_blocks(found: dict[str, Any]) -> int:
    return sum(int(backend["prefix_index_blocks"]) for backend in found["backends"])


async def drive(
    options: argparse.Namespace, port: int, admin_port: int, pid: int, backends: Backends
) -> dict[str, float]:
    """Send everything; the base line, and the memory of the first and the last tenth."""
    client, seen, left = Client(port), Counter[str](), requests(options.seed, options.requests)
    await asyncio.sleep(2.0)
    before = {
        "tasks": status(admin_port)["tasks"],
        "descriptors": max(await descriptors_lately(pid)),
    }
    done, sent, tenth, memory = 0, 0, options.requests // 10, []
    start = time.monotonic()
    samples: list[float] = []
    marks = [start]

    async def worker() -> None:
        nonlocal done, sent
        for request, leaves_s in left:
            sent += 1
            if options.rate:
                await asyncio.sleep(start + sent / options.rate - time.monotonic())
            await ask(client, request, leaves_s, seen)
            done += 1
            if done % max(1, tenth // 20) == 0:
                samples.append(rss_mib(pid))
            if done % tenth == 0:
                marks.append(time.monotonic())
                memory.append(median(samples))
                samples.clear()
                rate = tenth / (marks[-1] - marks[-2])
                line = f"{done:>9,} requests: {rate:7,.0f}/s, {memory[-1]:6.1f} MiB"
                held = index_blocks(await asyncio.to_thread(status, admin_port))
                print(f"{line}, {descriptors(pid)} descriptors, {held:,} blocks", flush=True)

    flapping = asyncio.create_task(backends.flap(options.flap_every))
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    flapping.cancel()
    await asyncio.gather(flapping, return_exceptions=True)
    client.close()
    counts = ", ".join(f"{n:,} x {kind}" for kind, n in seen.most_common())
    print(f"answers (seed {options.seed}): {counts}")
    return {**before, "first_mib": memory[0], "last_mib": memory[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="requests a second; default: as many as it can")
    parser.add_argument("--flap-every", type=float, default=4.0, help="seconds between two deaths")
    parser.add_argument(
        "--kv-tokens", type=int, default=200_000, help="KV pool of each backend; 0: not known"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(soak(options, Path(folder)))


if __name__ == "__main__":
    raise SystemExit(main())
