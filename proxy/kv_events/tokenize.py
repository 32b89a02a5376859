"""Learn which engine blocks a prompt becomes, by asking an engine's /tokenize in the background.

Off the request's way: one prompt at a time, at most a fifth of the time, a bounded queue; a prompt
that tells nothing new is not asked for. Where /tokenize is not to be had, or cannot say what the
engine makes of a prompt (images, truncation), the believed index stands.
"""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import orjson

from forebay.proxy.api.body import BYTES_PER_TOKEN_ID, ParsedBody
from forebay.proxy.backends import Backends
from forebay.proxy.core.learn.engine_blocks import Translations
from forebay.proxy.http1.connection import read_all
from forebay.proxy.http1.faults import UpstreamFault
from forebay.proxy.kv_events.decode import chain_keys
from forebay.proxy.probes import Upstream

WAITING_PROMPTS = 16
REST = 4.0  # times as long as the last took
ANSWER_BYTES = 32 << 20
TIMEOUT_S = 10.0
GIVE_UP_S = 60.0  # after a refusal
CHAT_FIELDS = (
    "model", "messages", "tools", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
TEXT_FIELDS = ("model", "prompt", "add_special_tokens")
UNTRANSLATABLE = ("truncate_prompt_tokens", "documents", "prompt_embeds")


class NotTokenised(Exception):
    """The engine did not tokenise the prompt; the text says why."""


@dataclass(frozen=True, slots=True)
class _Offer:
    body: bytes
    asked: ParsedBody
    upstream: Upstream


class Translator:
    def __init__(
        self,
        backends: Backends,
        translations: Translations,
        block_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self._backends = backends
        self._translations = translations
        self._block_bytes = block_bytes
        self._say = say
        self._offers: asyncio.Queue[_Offer] = asyncio.Queue(WAITING_PROMPTS)
        self._said = False
        self._failed = False
        self._busy = False

    @property
    def idle(self) -> bool:
        """Nothing waits to be tokenised."""
        return self._offers.empty() and not self._busy

    def reconfigure(self, block_bytes: int) -> None:
        """Text blocks of another length: what is known is of blocks that nobody has any more."""
        if block_bytes != self._block_bytes:
            self._block_bytes = block_bytes
            self._translations.clear()

    def offer(self, body: bytes, asked: ParsedBody, upstream: Upstream) -> None:
        """A prompt that `upstream` has computed; it is looked at when there is time.

        `body` is what was sent to it, salt and all; the blocks of `asked` must be chained to the
        same salt.
        """
        translations = self._translations
        if not translations.block_size or self._offers.full():
            return
        if translations.wanted(asked.request.blocks):
            self._offers.put_nowait(_Offer(body, asked, upstream))

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            offer = await self._offers.get()
            if not self._translations.wanted(offer.asked.request.blocks):
                continue
            if self._backends.upstreams.get(offer.upstream.name) is not offer.upstream:
                continue  # it has been moved or taken out since
            started, self._busy = clock(), True
            try:
                await self._translate(offer)
            except NotTokenised as why:
                if not self._said:
                    self._say(
                        f"{offer.upstream.name} does not tokenise ({why}): what it holds of a "
                        "prompt is believed, not known"
                    )
                    self._said = True
                await asyncio.sleep(GIVE_UP_S)
            except Exception as error:
                # A fault of ours over one prompt: the others are translated all the same.
                if not self._failed:
                    self._say(
                        f"a prompt was not translated: internal error: {type(error).__name__}"
                    )
                    self._failed = True
            self._busy = False
            await asyncio.sleep(REST * (clock() - started))

    async def _translate(self, offer: _Offer) -> None:
        """Tokenise and learn; raises NotTokenised."""
        fields = await asyncio.to_thread(orjson.loads, offer.body)
        question = _question(fields)
        if question is None:
            return
        if isinstance(question, list):
            ids, text_bytes = question, BYTES_PER_TOKEN_ID * len(question)
        else:
            try:
                body = orjson.dumps(question)
            except orjson.JSONEncodeError:  # it reads 1024 levels and writes 254
                return  # no NotTokenised: one prompt must not stop the others
            data = await self._ask(offer.upstream, body)
            ids, text_bytes = await asyncio.to_thread(_tokens, data), offer.asked.prompt_bytes
        size = self._translations.block_size
        if not size:  # nobody is followed any more
            return
        # A hit leaves at least one token to compute.
        whole = (len(ids) - 1) // size * size
        extra = [[salt]] if (salt := fields.get("cache_salt")) else []
        try:
            keys = await asyncio.to_thread(chain_keys, ids[:whole], size, extra_keys=extra)
        except (OverflowError, TypeError) as error:
            raise NotTokenised("an answer without token ids") from error
        if text_bytes and size == self._translations.block_size:
            tokens_per_block = len(ids) * self._block_bytes / text_bytes
            blocks = offer.asked.request.blocks
            self._translations.learn(blocks, array("Q", keys), tokens_per_block)

    async def _ask(self, upstream: Upstream, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._backends.open("POST", upstream, "/tokenize", body, headers)
                with closing(answer):
                    data = await read_all(answer, ANSWER_BYTES)
            if answer.status != 200:
                raise NotTokenised(f"/tokenize says {answer.status}")
            return data
        except (TimeoutError, UpstreamFault) as error:
            raise NotTokenised(type(error).__name__) from error


def _question(fields: dict[str, Any]) -> dict[str, Any] | list[int] | None:
    """The body for /tokenize, token ids that need none, or None where it could not tell."""
    if any(fields.get(name) is not None for name in UNTRANSLATABLE):
        return None
    if "messages" in fields:
        if fields.get("prompt") is not None:  # which of them it was is not known here
            return None
        if not all(_is_text(message.get("content")) for message in fields["messages"]):
            return None
        return {name: fields[name] for name in CHAT_FIELDS if name in fields}
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return {name: fields[name] for name in TEXT_FIELDS if name in fields}
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    return None


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _tokens(data: bytes) -> list[int]:
    """The token ids in an answer of /tokenize; raises NotTokenised."""
    try:
        tokens = orjson.loads(data)["tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise NotTokenised("an answer without tokens") from error
    if not isinstance(tokens, list) or not tokens:
        raise NotTokenised("an answer without tokens")
    return tokens
