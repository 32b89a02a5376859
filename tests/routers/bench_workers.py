"""What `--workers N` brings: CPU per request of N processes against that of one.

On two cores the client would take what the second worker needs, so throughput is not read off a
clock. At saturation a process answers 1 / (its CPU-s per request), and the proxy as a whole as much
as the busiest process lets it: N workers bring (CPU-s of one process alone) / (CPU-s of the busiest
worker), both for the same requests. That counts what the workers' exchange costs and how unevenly
the kernel deals connections out; what it leaves out is memory bandwidth shared by cores.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from load import Client, chat

CONNECTIONS, SMALL = 64, 200


class Use(NamedTuple):
    """CPU-seconds of a proxy's processes for the same requests."""

    busiest: float
    whole: float


async def use(
    port: int, pids: Callable[[], list[int]], cpu_s: Callable[[int], float], requests: int
) -> Use:
    client = Client(port)
    await client.at_once([chat(SMALL) for _ in range(4 * CONNECTIONS)], CONNECTIONS)
    before = {pid: cpu_s(pid) for pid in pids()}
    await client.at_once([chat(SMALL) for _ in range(requests)], CONNECTIONS)
    spent = [cpu_s(pid) - since for pid, since in before.items()]
    client.close()
    return Use(max(spent), sum(spent))


async def speedup(
    measure: Callable[[int], Awaitable[Use]], workers: int, rounds: int = 3
) -> list[tuple[float, float, float]]:
    """For each round: the factor; the factor if connections were dealt evenly; CPU over one's."""
    found = []
    for _ in range(rounds):
        one, many = await measure(1), await measure(workers)
        even = one.whole / (many.whole / workers)
        found.append((one.whole / many.busiest, even, many.whole / one.whole))
    return found
