"""Measure the cost of a request beside other routers: all run at once and are asked in turn.

    python tests/bench/routers/bench_ratios.py                (make compiled first; five minutes)
    python tests/bench/routers/bench_ratios.py --routers "bare aiohttp" nginx --rounds 20
    python tests/bench/routers/bench_ratios.py --routers "forebay observe" nginx haproxy --rounds 8
    python tests/bench/routers/bench_ratios.py --beside --routers nginx --rounds 8

On a machine whose speed changes from minute to minute, figures measured minutes apart say little
about each other. Here every router is asked a few hundred requests, then the next one, round after
round; a ratio is taken within a round, and of the rounds the median. CPU is the router's process
tree's own; all of them share one core, client and backends have the other.
`--beside` measures the tails of small chats instead, alone and beside big prompts.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

sys.path.extend(str(Path(__file__).resolve().parents[2] / part) for part in ("support", "bench"))

import uvloop
from ports import free_ports
from result_lines import markdown_table
from routers.costs import Bench, Figures, mock, pinned, serving
from routers.machine import reference_ms
from routers.peers import BARE, BARE_PROXY, PEERS, YARDSTICKS, Missing, Setting, environment
from routers.processes import running

SCALE = 0.1  # of the numbers of requests in `Bench`
OURS = ("forebay", "forebay compiled", "forebay observe")
ALL = PEERS | YARDSTICKS
DEFAULT = ("forebay compiled", BARE, "nginx", "smg", "vllm-router")
BESIDE_SCALE = 0.5
TAILS = {
    "chat_p99_ms": "p99 alone",
    "added_chat_20_p99_ms": "added by 20 x 400 KB/s",
    "added_chat_60_p99_ms": "by 60 x 400 KB/s",
    "added_chat_8mb_p99_ms": "by 2 x 8 MB/s",
    "lag_8mb_p99_ms": "loop lag p99 there, at most",
}


COSTS = {
    "added_ms": "small request: added p50, ms",
    "cpu_small_ms": "small request: CPU, ms",
    "cpu_64_ms": "64 at once: CPU, ms",
    "stream_ms": "20 tokens: added p50, ms",
    "cpu_stream_ms": "20 tokens: CPU, ms",
    "document_ms": "400 KB prompt: added p50, ms",
    "cpu_document_ms": "400 KB prompt: CPU, ms",
    "cpu_1k_tokens_s": "1,000 tokens: CPU-s",
}


async def costs(name: str, bench: Bench) -> Figures:
    return await (bench.small() if name in (BARE, BARE_PROXY) else bench.costs())


async def tails(name: str, bench: Bench) -> Figures:
    found = await replace(bench, scale=BESIDE_SCALE).beside()
    for column in ("chat_20_p99_ms", "chat_60_p99_ms", "chat_8mb_p99_ms"):
        found[f"added_{column}"] = found[column] - found["chat_p99_ms"]
    return found


async def rounds_of(
    names: Sequence[str],
    count: int,
    cores: bool,
    measure: Callable[[str, Bench], Awaitable[Figures]],
) -> dict[str, list[Figures]]:
    """Figures of each router that starts, round by round."""
    found: dict[str, list[Figures]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        backends = free_ports(2)
        stack.enter_context(mock(Path(folder), backends, cores))
        await serving(backends[0], Path(folder, "mock.log"))
        benches = {}
        for name in names:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port, side_port = free_ports(2)
            command = ALL[name].command(Setting(port, side_port, tuple(backends), home))
            log = home / "router.log"
            core = 1 if cores else None
            router = stack.enter_context(running(pinned(command, core), log, environment()))
            try:
                await serving(port, log)
            except Missing as error:
                print(f"{name}: not measured: {error}")
                del found[name]
                continue
            admin_port = side_port if name in OURS else 0
            benches[name] = Bench(port, admin_port, backends[0], router.pid, SCALE)
        if not (started := list(benches)):
            return found
        for number in range(count):
            # Whoever comes first has another one's caches before it: each in its turn.
            turn = number % len(started)
            for name in (*started[turn:], *started[:turn]):
                found[name].append(await measure(name, benches[name]))
            print(f"round {number + 1} of {count}: {reference_ms():.0f} ms", file=sys.stderr)
    return found


def report(found: Mapping[str, list[Figures]]) -> str:
    """Each router's medians, and Forebay over each of the others in the same round."""
    medians = {
        name: [
            f"{median(round_[key] for round_ in rounds):.3f}" if key in rounds[0] else "-"
            for key in COSTS
        ]
        for name, rounds in found.items()
    }
    ratios = {
        f"{ours} over {name}": [_ratio(key, found[ours], found[name]) for key in COSTS]
        for ours in OURS
        if ours in found
        for name in found
        if name not in OURS
    }
    return "\n\n".join((_table("here", medians), _table("in the same round", ratios)))


def _table(title: str, rows: Mapping[str, Sequence[str]]) -> str:
    return markdown_table((title, *COSTS.values()), [(name, *of) for name, of in rows.items()])


def _ratio(key: str, ours: list[Figures], theirs: list[Figures]) -> str:
    ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True) if b.get(key, 0.0) > 0]
    if len(ratios) < 2:  # too little is added to be seen in each round
        return "-"
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


def report_tails(found: Mapping[str, list[Figures]]) -> str:
    """Each router's medians, and the middle half of the rounds."""
    rows = []
    for name, rounds in found.items():
        cells = [name]
        for key in TAILS:
            values = [one[key] for one in rounds if key in one]
            if not values:
                cells.append("-")
                continue
            low, middle, high = quantiles(values, n=4)
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
        rows.append(cells)
    return markdown_table(("small chats at 50/s, ms", *TAILS.values()), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    peers = [name for name in ALL if name != "forebay"]
    parser.add_argument("--routers", nargs="+", choices=peers, default=list(DEFAULT))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--beside", action="store_true", help="small chats beside big prompts")
    options = parser.parse_args()
    if options.beside:  # these answer no streams
        options.routers = [name for name in options.routers if name not in (BARE, BARE_PROXY)]
    if options.rounds < 2:
        parser.error("--rounds: 2 or more")
    cores = (os.cpu_count() or 1) > 1 and sys.platform == "linux"
    if cores:
        os.sched_setaffinity(0, {0})
    versions = {}
    for name in ("forebay", *options.routers):
        try:
            versions[name] = ALL[name].install()
        except Missing as error:
            print(f"{name}: not measured: {error}")
    measure = tails if options.beside else costs
    found = uvloop.run(rounds_of(list(versions), options.rounds, cores, measure))
    if "forebay" not in found:
        return 1
    print(report_tails(found) if options.beside else report(found))
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"\n{time.strftime('%Y-%m-%d')}, {options.rounds} rounds, in brackets their middle half")
    print(f"versions: {told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
