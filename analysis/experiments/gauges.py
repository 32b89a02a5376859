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

EVERY_S, TIMEOUT_S = 0.05, 10.0  # wall time; peaks between two samples are missed
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the latter to vLLM 0.9
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
LAG = "forebay_engine_lag_seconds"
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


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The gauges on one /metrics page, None for a gauge that the page lacks."""

    running: float | None
    waiting: float | None
    kv_share: float | None
    preemptions: float
    pool: Pool | None
    lag_s: float | None  # None: not a simulated engine

    def sample(self, engine: str, at_s: float) -> GaugeSample | None:
        if self.running is None or self.waiting is None or self.kv_share is None:
            return None
        running, waiting = round(self.running), round(self.waiting)
        return GaugeSample(
            engine,
            at_s,
            running,
            waiting,
            self.kv_share,
            round(self.preemptions),
            self.lag_s or 0.0,
        )


def read_page(text: str) -> MetricsPage:
    """Read Prometheus text. Sums counts over several engine cores and averages their shares."""
    values: dict[str, list[float]] = {}
    pool: Pool | None = None
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, rest = line.partition("{")
        labels, _, number = rest.rpartition("}") if rest else ("", "", line.partition(" ")[2])
        name = name.partition(" ")[0]
        if name == "vllm:cache_config_info":
            pool = pool or _pool(dict(_LABEL.findall(labels)))
        with suppress(ValueError, IndexError):
            values.setdefault(name, []).append(float(number.split()[0]))
    shares = next((values[name] for name in KV_SHARE if name in values), None)
    preempted = next((values[name] for name in PREEMPTIONS if name in values), [0.0])
    return MetricsPage(
        sum(values[RUNNING]) if RUNNING in values else None,
        sum(values[WAITING]) if WAITING in values else None,
        sum(shares) / len(shares) if shares else None,
        sum(preempted),
        pool,
        values[LAG][0] if LAG in values else None,
    )


def _pool(labels: dict[str, str]) -> Pool | None:
    try:
        blocks, block_tokens = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    except (KeyError, ValueError):  # "None" where the memory was not profiled
        return None
    reported = labels.get("kv_cache_size_tokens", "")
    return Pool(blocks, block_tokens, int(reported) if reported.isdigit() else None)


async def look(session: aiohttp.ClientSession, engine: Address) -> MetricsPage | None:
    """Read the engine's /metrics. None if the engine has no such page."""
    try:
        async with session.get(
            engine.url("/metrics"), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        ) as response:
            if response.status != 200:
                return None
            return read_page(await response.text(errors="replace"))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


@asynccontextmanager
async def watching(engines: Sequence[Address], clock: Clock) -> AsyncIterator[list[GaugeSample]]:
    """Sample all `engines` while the block runs. The list stays empty without gauges."""
    samples: list[GaugeSample] = []

    async def watch(session: aiohttp.ClientSession, engine: Address) -> None:
        while True:
            page = await look(session, engine)
            sample = page.sample(engine.name, clock.now()) if page else None
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
