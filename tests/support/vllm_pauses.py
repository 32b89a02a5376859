"""Chats beside long prompts on a real vLLM: when each token of a chat comes."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from stages.vllm_stage import words

LIMIT_S = 400.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the workload: it comes after `at_s`, and a chat is one with a short prompt."""

    at_s: float
    name: str
    tokens: int
    output: int
    is_chat: bool


@dataclass(slots=True)
class Answer:
    """When the tokens of an answer came, seconds after it was asked for, and its text."""

    ask: Ask
    token_s: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def longest_pause_s(self) -> float:
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


def draw_asks(seed: int, seconds: float, chats: int, documents: int, tokens: int) -> list[Ask]:
    """Chats at random times, and documents of `tokens` tokens at equal distances."""
    rng = random.Random(seed)
    asks = [
        Ask(rng.uniform(0.0, seconds), f"chat {n}", rng.randint(20, 300), rng.randint(20, 60), True)
        for n in range(chats)
    ]
    asks += [
        Ask(seconds * (n + 0.1) / documents, f"document {n}", tokens, 8, False)
        for n in range(documents)
    ]
    return sorted(asks, key=lambda ask: ask.at_s)


def play(url: str, asks: list[Ask], salt: str) -> list[Answer]:
    """Send all at their times, and return their answers. A new salt finds nothing in the cache."""

    async def main() -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            start_s = time.perf_counter()
            return await asyncio.gather(*(_ask(client, url, ask, salt, start_s) for ask in asks))

    return asyncio.run(main())


async def _ask(
    client: aiohttp.ClientSession, url: str, ask: Ask, salt: str, start_s: float
) -> Answer:
    await asyncio.sleep(max(0.0, start_s + ask.at_s - time.perf_counter()))
    body: dict[str, Any] = {
        "model": "tiny", "prompt": words(f"{ask.name} {salt}", ask.tokens), "temperature": 0,
        "max_tokens": ask.output, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    answer, began_s = Answer(ask), time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                answer.token_s.append(time.perf_counter() - began_s)
                answer.text += json.loads(line[6:])["choices"][0]["text"]
    return answer


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, of all chats and documents of a run."""

    chat_p50: float
    chat_p90: float
    chat_max: float
    pause_max: float
    chat_end_max: float
    document_max: float


def figures_of(answers: list[Answer]) -> Figures:
    chats = [answer for answer in answers if answer.ask.is_chat]
    firsts = sorted(answer.token_s[0] for answer in chats)
    return Figures(
        firsts[len(firsts) // 2],
        firsts[int(0.9 * (len(firsts) - 1))],
        firsts[-1],
        max(answer.longest_pause_s for answer in chats),
        max(answer.token_s[-1] for answer in chats),
        max(answer.token_s[0] for answer in answers if not answer.ask.is_chat),
    )


def scheduler_flags(pause_s: float) -> tuple[str, ...]:
    """Return the options of a server with the class."""
    return (
        "--scheduler-cls", "forebay.proxy.vllm_scheduler.ForebayScheduler",
        "--additional-config", json.dumps({"forebay": {"pause": pause_s}}),
    )  # fmt: skip


def log_of(path: Path, words_: str) -> str:
    """Return the line of a log with these words, or ""."""
    lines = path.read_text(errors="replace").splitlines()
    return next((line for line in lines if words_ in line), "")
