"""Sample the gauges of engines while a load runs: running and waiting requests, KV cache use.

The names come from vLLM's /metrics. A proxy does not pass them on, so each engine is asked
directly.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.target import Target as Address
from forebay.replay.results.server_metrics import KV_USE

EVERY_S, TIMEOUT_S = 0.05, 10.0  # wall time; peaks between two samples are missed
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
LAG = "forebay_engine_lag_seconds"
_SAMPLE = re.compile(r"^([^\s#{]+)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """The gauges of one engine at one moment of a load.

    Attributes:
        at_s: approximate seconds since the load started.
        kv_share: share of the usable KV blocks that running requests use, 0 to 1.
        preemptions: number since the engine started.
        lag_s: seconds that a simulated engine is behind its own clock; 0 for a real one.
    """

    engine: str
    at_s: float
    running: int
    waiting: int
    kv_share: float
    preemptions: int
    lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """The size of an engine's KV cache as reported. Blocks include the null block.

    Attributes:
        reported_tokens: the engine's own number. It knows the groups of hybrid models.
    """

    blocks: int
    block_tokens: int
    reported_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.reported_tokens or self.blocks * self.block_tokens

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that a request of `tokens` needs."""
        return -(-tokens // self.block_tokens)


def read_page(text: str, engine: str, at_s: float) -> tuple[GaugeSample | None, Pool | None]:
    """Read Prometheus text. Sums counts over several engine cores and averages their shares.

    Returns:
        The gauges and the size of the KV cache. Each is None if the page lacks it.
    """
    values: dict[str, list[float]] = {}
    pool: Pool | None = None
    for name, labels, number in _SAMPLE.findall(text):
        if name == "vllm:cache_config_info":
            pool = pool or _pool(dict(_LABEL.findall(labels)))
        with suppress(ValueError):
            values.setdefault(name, []).append(float(number))

    def of(*names: str) -> list[float]:
        return next((values[name] for name in names if name in values), [])

    running, waiting, shares = of(RUNNING), of(WAITING), of(*KV_USE)
    if not (running and waiting and shares):
        return None, pool
    in_flight, queued, preempted = (
        round(sum(counted)) for counted in (running, waiting, of(*PREEMPTIONS))
    )
    mean_share, lag_s = sum(shares) / len(shares), sum(of(LAG)[:1])
    return GaugeSample(engine, at_s, in_flight, queued, mean_share, preempted, lag_s), pool


def _pool(labels: dict[str, str]) -> Pool | None:
    try:
        blocks, block_tokens = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    except (KeyError, ValueError):  # "None" where the memory was not profiled
        return None
    reported = labels.get("kv_cache_size_tokens", "")
    return Pool(blocks, block_tokens, int(reported) if reported.isdigit() else None)


async def look(
    session: aiohttp.ClientSession, engine: Address, at_s: float = 0.0
) -> tuple[GaugeSample | None, Pool | None]:
    """Read the engine's /metrics, as `read_page` does. (None, None) without such a page."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with session.get(engine.url("/metrics"), timeout=timeout) as response:
            text = await response.text(errors="replace") if response.status == 200 else ""
            return read_page(text, engine.name, at_s)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None, None


@asynccontextmanager
async def watching(engines: Sequence[Address], clock: Clock) -> AsyncIterator[list[GaugeSample]]:
    """Sample all `engines` while the block runs. The list stays empty without gauges."""
    samples: list[GaugeSample] = []

    async def watch(session: aiohttp.ClientSession, engine: Address) -> None:
        while True:
            sample, _ = await look(session, engine, clock.now())
            if sample is None:
                return
            samples.append(sample)
            await asyncio.sleep(EVERY_S)

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(watch(session, engine)) for engine in engines]
        try:
            yield samples
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
