"""Ask a server one question at a time, and count prompt tokens with its own tokenizer."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from forebay.analysis.experiments.target import StudyFailed
from forebay.replay.engine.tokenizer import WORDS
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.target import Target as Address
from forebay.replay.send.http import outcome

TIMEOUT_S = 600.0
SIMULATED_WORDS = frozenset(word.decode().strip() for word in WORDS)
LEAST_WORDS = 4  # a real model could answer with fewer of these words


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The answer of a model. `error` is set instead of `text` when the request failed."""

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
) -> ModelReply:
    """The answer at temperature 0. Raises StudyFailed if the server is gone."""
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    status, raw = await _post(session, address, PATHS[endpoint], body)
    if status != 200:
        kind, reason = outcome.of_status(status, raw)
        return ModelReply(error=f"{status} {reason or kind}")
    try:
        reply = orjson.loads(raw)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        text = choice["message"]["content"] if endpoint == "chat" else choice["text"]
        return ModelReply(text or "", outcome.token_count(usage.get("prompt_tokens")))
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return ModelReply(error="malformed answer")


async def count_tokens(
    session: aiohttp.ClientSession, address: Address, model: str, prompt: str
) -> int | None:
    """Tokens of `prompt` without a chat template, or None if the server has no /tokenize."""
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    status, raw = await _post(session, address, "/tokenize", body)
    if status != 200:
        return None
    try:
        return outcome.token_count(orjson.loads(raw)["count"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def is_simulated(text: str) -> bool:
    """True if `text` holds only the words that the simulated engine generates."""
    words = text.split()
    return len(words) >= LEAST_WORDS and all(word in SIMULATED_WORDS for word in words)


async def _post(
    session: aiohttp.ClientSession, address: Address, path: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    try:
        async with session.post(
            address.url(path),
            data=orjson.dumps(body),
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise StudyFailed(f"{address.base}: no longer answers ({reason})") from error
