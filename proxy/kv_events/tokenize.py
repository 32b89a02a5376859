"""Learn which engine blocks a prompt has, by asking an engine's /tokenize in the background.

No request waits for this: one prompt at a time, a fifth of the time at most, from a bounded queue.
A prompt that teaches nothing new is skipped. The estimated index is used if
/tokenize does not work, or does not show the engine's tokens (images, truncation).
"""

import asyncio
from array import array
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import orjson

from forebay.proxy.api.body import BYTES_PER_TOKEN_ID, ParsedBody
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.pool import Backends
from forebay.proxy.core.learn.engine_blocks import BlockTranslations
from forebay.proxy.http1.client.backend_errors import UpstreamFault
from forebay.proxy.http1.client.client import read_all
from forebay.proxy.kv_events.decode import chain_keys
from forebay.proxy.log_events import LogEvent, Say

TOKENIZE = "/tokenize"
WAITING_PROMPTS = 16
REST = 4.0  # pause after a prompt, as a multiple of its duration
RESPONSE_BYTES = 32 << 20
TIMEOUT_S = 10.0
GIVE_UP_S = 60.0  # pause after a failure
CHAT_FIELDS = (
    "model", "messages", "tools", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
TEXT_FIELDS = ("model", "prompt", "add_special_tokens")
UNTRANSLATABLE = ("truncate_prompt_tokens", "documents", "prompt_embeds")


class NotTokenised(Exception):
    """The engine did not tokenise the prompt. The message is the reason."""


@dataclass(frozen=True, slots=True)
class _Offer:
    body: bytes
    parsed: ParsedBody
    link: BackendLink


@dataclass(slots=True, eq=False)
class Translator:
    """Tokenises prompts, and learns which engine blocks their text blocks become."""

    backends: Backends
    translations: BlockTranslations
    block_bytes: int
    say: Say
    _offers: asyncio.Queue[_Offer] = field(default_factory=lambda: asyncio.Queue(WAITING_PROMPTS))
    _logged: bool = False
    _failed: bool = False
    _busy: bool = False

    @property
    def idle(self) -> bool:
        """No prompt waits or is being tokenised."""
        return self._offers.empty() and not self._busy

    def reconfigure(self, block_bytes: int) -> None:
        """Use another length of text blocks. Lessons about the old blocks are dropped."""
        if block_bytes != self.block_bytes:
            self.block_bytes = block_bytes
            self.translations.clear()

    def offer(self, body: bytes, parsed: ParsedBody, link: BackendLink) -> None:
        """Offer a prompt that `link` has computed, to be tokenised when there is time.

        Args:
            body: the bytes that were sent, with the salt. The blocks of `parsed` must be chained to
                the same salt.
        """
        translations = self.translations
        if not translations.block_size or self._offers.full():
            return
        if translations.wanted(parsed.request.blocks):
            self._offers.put_nowait(_Offer(body, parsed, link))

    async def run(self) -> None:
        """Tokenise offered prompts until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            offer = await self._offers.get()
            if not self.translations.wanted(offer.parsed.request.blocks):
                continue
            if self.backends.links.get(offer.link.name) is not offer.link:
                continue  # it has been moved or removed since
            # A backend that cannot tokenise is left alone for a while, and named once.
            started, self._busy = clock(), True
            try:
                await self._translate(offer)
            except NotTokenised as why:
                if not self._logged:
                    self.say(
                        LogEvent.PREFIX_ESTIMATED,
                        f"backend {offer.link.name} does not tokenise ({why}): its cached "
                        "prefixes are estimated, not exact",
                        offer.link.name,
                    )
                    self._logged = True
                await asyncio.sleep(GIVE_UP_S)
            except Exception as error:
                # Our own fault with one prompt must not stop the others.
                if not self._failed:
                    line = f"a prompt was not tokenised: internal error: {type(error).__name__}"
                    self.say(LogEvent.INTERNAL_ERROR, line, offer.link.name)
                    self._failed = True
            # Rest, so that backends spend only a part of their time on tokenising.
            self._busy = False
            await asyncio.sleep(REST * (clock() - started))

    async def _translate(self, offer: _Offer) -> None:
        """Tokenise one prompt and learn its blocks. Raises NotTokenised."""
        # Token ids need no backend. A prompt of text is tokenised by its backend.
        fields = await asyncio.to_thread(orjson.loads, offer.body)
        body_fields = _tokenize_body(fields)
        if body_fields is None:
            return
        if isinstance(body_fields, list):
            ids, text_bytes = body_fields, BYTES_PER_TOKEN_ID * len(body_fields)
        else:
            try:
                body = orjson.dumps(body_fields)
            except orjson.JSONEncodeError:  # orjson reads 1024 levels and writes 254
                return  # no NotTokenised: one prompt must not stop the others
            data = await self._ask(offer.link, body)
            ids, text_bytes = await asyncio.to_thread(_tokens, data), offer.parsed.prompt_bytes
        size = self.translations.block_size
        if not size:  # no backend is followed any more
            return
        # Even a full hit leaves one token to compute.
        whole = (len(ids) - 1) // size * size
        extra = [[salt]] if (salt := fields.get("cache_salt")) else []
        try:
            keys = await asyncio.to_thread(chain_keys, ids[:whole], size, extra_keys=extra)
        except (OverflowError, TypeError) as error:
            raise NotTokenised("a response without token ids") from error
        if text_bytes and size == self.translations.block_size:
            tokens_per_block = len(ids) * self.block_bytes / text_bytes
            blocks = offer.parsed.request.blocks
            self.translations.learn(blocks, array("Q", keys), tokens_per_block)

    async def tokens(self, link: BackendLink, fields: dict[str, Any]) -> list[int]:
        """Return the token ids of the text in a request's body. Raises NotTokenised."""
        body = _tokenize_body(fields)
        if not isinstance(body, dict):
            raise NotTokenised("the prompt is more than text")
        return _tokens(await self._ask(link, orjson.dumps(body)))

    async def _ask(self, link: BackendLink, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self.backends.open("POST", link, TOKENIZE, body, headers)
                with closing(response):
                    data = await read_all(response, RESPONSE_BYTES)
            if response.status != 200:
                raise NotTokenised(f"/tokenize returned {response.status}")
            return data
        except (TimeoutError, UpstreamFault) as error:
            raise NotTokenised(type(error).__name__) from error


def _tokenize_body(fields: dict[str, Any]) -> dict[str, Any] | list[int] | None:
    """Return the body for /tokenize, the token ids of the prompt, or None if it would not help."""
    if any(fields.get(name) is not None for name in UNTRANSLATABLE):
        return None
    if "messages" in fields:
        if fields.get("prompt") is not None:  # it is not known here which of them counts
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
    """Return the token ids in a response of /tokenize. Raises NotTokenised."""
    try:
        tokens = orjson.loads(data)["tokens"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise NotTokenised("a response without tokens") from error
    if not isinstance(tokens, list) or not tokens:
        raise NotTokenised("a response without tokens")
    return tokens
