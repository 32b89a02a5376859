"""Compare the percentiles of a replay from one process, from two, and from two local Ray nodes.

The server waits 50 to 500 ms before the first token; the length of the prompt fixes the time.
A busy machine delays an answer by milliseconds, which is little beside that. So percentiles that
differ by more than `WITHIN` show a fault in dividing or merging.

    python tests/bench/replay/same_percentiles.py [--seconds 60]

Ray nodes take part if Ray is installed. Exit status 1: counts or percentiles differ.
"""

import argparse
import asyncio
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from replay_server import Server, answer, serve

from forebay.replay.plan.options import ReplayOptions
from forebay.replay.runner import replay
from forebay.traces.reading.jsonl import write_trace
from forebay.traces.schema import TraceRequest

RATE_PER_S = 20.0
SHORTEST, LONGEST = 32, 932  # tokens of a prompt
WITHIN = 0.02
COUNTS = ("requests", "completed", "rejected", "failed", "requests_by_bucket", "prompt_tokens")
FIGURES = [(name, rank) for name in ("ttft_ms", "e2e_ms") for rank in ("p50", "p90", "p99")]


async def by_length(
    server: Server, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    share = (len(body["prompt"]) / 4 - SHORTEST) / (LONGEST - SHORTEST)
    await asyncio.sleep(0.05 + 0.45 * share)
    return await answer(server, request, body)


def requests(seconds: float) -> Iterator[TraceRequest]:
    for at in range(round(seconds * RATE_PER_S)):
        length = SHORTEST + at * 7919 % (LONGEST - SHORTEST + 1)
        yield TraceRequest(f"r{at}", at / RATE_PER_S, length, 4)


async def measure(trace: Path, out: Path, **how: Any) -> dict[str, Any]:
    async with serve(Server(by_length, first_s=0.0)) as up:
        summary = await replay(ReplayOptions(trace, [up.url], out, quiet=True, **how))
        return dict(summary.values)


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start a Ray cluster of two nodes on this machine; yields its address."""
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    ray_constants.ENABLE_RAY_CLUSTER = False  # stays on loopback
    node: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
    cluster: Any = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def compare(way: str, found: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Print the figures of a way to send; returns whether they are those of one process."""
    same = all(found[key] == whole[key] for key in COUNTS)
    words = []
    for name, rank in FIGURES:
        value, wanted = found[name]["all"][rank], whole[name]["all"][rank]
        change = value / wanted - 1
        same = same and abs(change) <= WITHIN
        words.append(f"{name} {rank} {value:.1f} ({change:+.2%})")
    print(f"{way}: {found['completed']} of {found['requests']}; {', '.join(words)}", flush=True)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        trace, outs = Path(folder, "trace.jsonl"), map(Path(folder).joinpath, "abcd")
        write_trace(trace, requests(seconds))
        whole = asyncio.run(measure(trace, next(outs)))
        same = [
            compare("one process", whole, whole),
            compare("one again", asyncio.run(measure(trace, next(outs))), whole),
            compare("two processes", asyncio.run(measure(trace, next(outs), processes=2)), whole),
        ]
        if find_spec("ray") is not None:
            with two_nodes() as address:
                found = asyncio.run(measure(trace, next(outs), ray=address))
            same.append(compare("two nodes", found, whole))
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
