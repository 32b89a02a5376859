"""Ask one question at a time and read the answer; count a prompt as the server does."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from forebay.analysis.experiments.target import StudyFailed
from forebay.replay import outcome
from forebay.replay.bodies import PATHS
from forebay.replay.engine.tokenizer import WORDS
from forebay.replay.target import Target as Address

TIMEOUT_S = 600.0
SIMULATED_WORDS = frozenset(word.decode().strip() for word in WORDS)
LEAST_WORDS = 4  # fewer of them could be an answer


@dataclass(frozen=True, slots=True)
class Told:
    """An answer: its text, the prompt tokens the server counted, and what went wrong instead."""

    text: str = ""
    prompt_tokens: int | None = None
    error: str | None = None


async def ask(
    session: aiohttp.ClientSession,
    address: Address,
    model: str,
    prompt: str,
    output_tokens: int,
    endpoint: str,
) -> Told:
    """The most likely answer to `prompt`; raises StudyFailed when nobody answers any more."""
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    status, raw = await _post(session, address, PATHS[endpoint], body)
    if status != 200:
        kind, reason = outcome.of_status(status, raw)
        return Told(error=f"{status} {reason or kind}")
    try:
        told = orjson.loads(raw)
        choice, usage = told["choices"][0], told.get("usage") or {}
        text = choice["message"]["content"] if endpoint == "chat" else choice["text"]
        return Told(text or "", outcome.token_count(usage.get("prompt_tokens")))
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return Told(error="malformed answer")


async def count_tokens(
    session: aiohttp.ClientSession, address: Address, model: str, prompt: str
) -> int | None:
    """Tokens of `prompt` without any template, by the server's own tokenizer; None if it has no
    /tokenize."""
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    status, raw = await _post(session, address, "/tokenize", body)
    if status != 200:
        return None
    try:
        return outcome.token_count(orjson.loads(raw)["count"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def is_simulated(text: str) -> bool:
    """Whether an answer is made of nothing but the words that our simulated engine utters."""
    words = text.split()
    return len(words) >= LEAST_WORDS and all(word in SIMULATED_WORDS for word in words)


async def _post(
    session: aiohttp.ClientSession, address: Address, path: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    try:
        async with session.post(
            address.url(path),
            data=orjson.dumps(body),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise StudyFailed(f"{address.base}: does not answer any more ({reason})") from error
