"""What a router costs in front of backends that cost nothing: measured by `bench_ratios.py`.

CPU is the router's process tree's own (user and system); what is added is the median against
asking a backend directly.
"""

import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from routers.load import Answer, Broken, Client, chat
from routers.peers import Missing, environment
from routers.processes import last_line, running, tree_cpu_s

Figures = dict[str, float]
SMALL, DOCUMENT = 200, 400_000
START_S = 60.0


def pinned(command: Sequence[str], core: int | None) -> list[str]:
    """Return the command on one core, where there are several."""
    return [*(("taskset", "-c", str(core)) if core is not None else ()), *command]


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


def p50_ms(answers: list[Answer]) -> float:
    return median(a.whole_s for a in answers) * 1e3


def p99_ms(answers: list[Answer]) -> float:
    ordered = sorted(a.whole_s for a in answers)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3


@dataclass(frozen=True, slots=True)
class Bench:
    """One router that serves."""

    port: int
    admin_port: int  # of Forebay; another's is not asked
    backend: int
    pid: int
    scale: float

    def many(self, count: int) -> int:
        return max(10, round(count * self.scale))

    async def costs(self) -> Figures:
        """Measure the cost of small requests, short streams, prompts of 400 KB, and tokens."""
        found = await self.small()
        stream = {"stream": (20, 1)}
        found |= await self._latency("stream_ms", "cpu_stream_ms", SMALL, self.many(400), **stream)
        found |= await self._latency("document_ms", "cpu_document_ms", DOCUMENT, self.many(150))
        return found | await self._streams()

    async def small(self) -> Figures:
        """Measure the cost of small requests, one after another and 64 at once."""
        found = await self._latency("added_ms", "cpu_small_ms", SMALL, self.many(2000))
        return found | await self._at_once(self.many(8000))

    async def _latency(
        self, added: str, cpu: str, size: int, count: int, stream: tuple[int, int] | None = None
    ) -> Figures:
        client, direct = Client(self.port), Client(self.backend)
        await client.in_turn([chat(size) for _ in range(20)])
        asked = [chat(size, stream=stream) for _ in range(2 * count)]
        bare = p50_ms(await direct.in_turn(asked[count:]))
        before = tree_cpu_s(self.pid)
        through = p50_ms(await client.in_turn(asked[:count]))
        used = tree_cpu_s(self.pid) - before
        client.close()
        direct.close()
        return {added: through - bare, cpu: used / count * 1e3}

    async def _at_once(self, count: int) -> Figures:
        client, requests = Client(self.port), [chat(SMALL) for _ in range(count)]
        await client.at_once(requests[:64], 64)
        before, start = tree_cpu_s(self.pid), time.perf_counter()
        await client.at_once(requests, 64)
        wall_s, used = time.perf_counter() - start, tree_cpu_s(self.pid) - before
        client.close()
        return {"cpu_64_ms": used / count * 1e3, "rate_64": count / wall_s}

    async def _streams(self) -> Figures:
        """While 64 streams run: what their requests cost is measured elsewhere."""
        client, tokens, interval_s = Client(self.port), 170, 0.02
        requests = [chat(SMALL, stream=(tokens, 20)) for _ in range(64)]
        answers = asyncio.ensure_future(client.at_once(requests, 64))
        await asyncio.sleep(0.7)
        before, start = tree_cpu_s(self.pid), time.perf_counter()
        await asyncio.sleep(2.0)
        used, seconds = tree_cpu_s(self.pid) - before, time.perf_counter() - start
        if any(answer.tokens != tokens for answer in await answers):
            raise Broken("tokens were lost")
        client.close()
        return {"cpu_1k_tokens_s": used / (64 * seconds / interval_s) * 1e3}

    async def beside(self) -> Figures:
        """Small chats at 50/s alone and beside big prompts; streams keep the engine slots short."""
        found = {}
        for name, size, per_s in (
            ("chat_p99_ms", 0, 0.0),
            ("chat_20_p99_ms", DOCUMENT, 20.0),
            ("chat_60_p99_ms", DOCUMENT, 60.0),
            ("chat_8mb_p99_ms", 8_000_000, 2.0),
        ):
            seconds = max(1.0, 6.0 * self.scale)
            lags = self._lags()
            small, big = Client(self.port), Client(self.port)
            load = [chat(size, stream=(1, 0)) for _ in range(round(per_s * seconds))]
            chats = [chat(SMALL, stream=(1, 0)) for _ in range(round(50 * seconds))]
            answers, _ = await asyncio.gather(
                small.paced(chats, 50.0), big.paced(load, per_s or 1.0)
            )
            found[name] = p99_ms(answers)
            small.close()
            big.close()
        if lags:
            found["lag_8mb_p99_ms"] = lag_p99_ms(lags, self._lags())
        return found

    def _lags(self) -> dict[float, float]:
        """Forebay's own count of how late its event loop was: up to so many seconds."""
        try:
            url = f"http://127.0.0.1:{self.admin_port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        found = re.findall(r'forebay_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        return {float(most): float(count) for most, count in found}


def lag_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """The upper edge of the histogram's bucket that holds it."""
    counts = {most: after[most] - before[most] for most in after}
    total = max(counts.values())
    return min(most for most, count in counts.items() if count >= 0.99 * total) * 1e3


@contextmanager
def mock(folder: Path, ports: list[int], cores: bool) -> Iterator[None]:
    """Start the backends that cost nothing, on the client's core."""
    command = [sys.executable, str(Path(__file__).with_name("mock_backend.py")), *map(str, ports)]
    core = 0 if cores else None
    with running(pinned(command, core), folder / "mock.log", environment()):
        yield
