"""Read the health and the load of a vLLM server."""

import re
from dataclasses import dataclass

import aiohttp

ASK_S = 5.0
_LINE = re.compile(r"^(?:vllm:)?(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests and KV cache of a server, summed over its engines. Shares are 0 to 1."""

    running: int
    waiting: int
    kv_usage: float
    hit_ratio: float | None
    preemptions: int


async def healthy(session: aiohttp.ClientSession, url: str, timeout_s: float = ASK_S) -> bool:
    """Return True if /health answers 200 in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def load(session: aiohttp.ClientSession, url: str) -> ServerLoad | None:
    """Read /metrics, None when they cannot be read."""
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    try:
        async with session.get(f"{url}/metrics", timeout=timeout) as answer:
            return read_load(await answer.text()) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def read_load(text: str) -> ServerLoad:
    """Read the text of vLLM's /metrics, where a missing metric counts as 0."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    queries = sums.get("prefix_cache_queries_total", 0.0)
    return ServerLoad(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_usage=sums.get("kv_cache_usage_perc", 0.0),
        hit_ratio=sums.get("prefix_cache_hits_total", 0.0) / queries if queries else None,
        preemptions=int(sums.get("num_preemptions_total", 0)),
    )
