"""Describe an API whose requests are shaped: its fields, events and errors."""

from typing import Any

from forebay.proxy.api.block_hashes import BlockHashes
from forebay.proxy.api.dialects.special_work import is_pure
from forebay.proxy.api.dialects.usage import usage_tokens
from forebay.proxy.api.fields import BEYOND_64_BITS, integer
from forebay.proxy.api.prompt_text import PromptText, messages_text
from forebay.proxy.http1.errors import ApiError


class Dialect:
    """An API of vLLM. A subclass overrides the defaults that differ.

    Attributes:
        path: its path on the public port, and on vLLM.
        operation: the name of the API in traces (OpenTelemetry's `gen_ai.operation.name`).
        prompt_field: the field that holds the prompt.
        has_parts: the prompt is messages, whose content may be parts such as images.
        limits: fields for the most tokens of an answer. The first field that is present counts.
        asks_usage: `stream_options` can ask for the usage of a stream.
        tokenizes: vLLM's /tokenize reads such a body.
        keeps_responses: a later request can refer to a response by its id.
        types_errors: the JSON of an error has a type.
        opens: types of events that precede the first token.
        ends: types of the last event of a stream. Empty if streams end with `[DONE]`.
        ping: type of the event that says only that the server is alive, or "".
        heartbeat: bytes that keep a client's stream alive, without content.
    """

    path: str
    operation = "chat"
    prompt_field = "messages"
    has_parts = True
    limits: tuple[str, ...] = ("max_tokens",)
    asks_usage = False
    tokenizes = False
    keeps_responses = False
    types_errors = False
    opens: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    ping = ""
    heartbeat = b": keep-alive\n\n"

    @property
    def types_events(self) -> bool:
        """True if the events of its streams have types."""
        return bool(self.ends)

    def prompt_text(self, fields: dict[str, Any], into: BlockHashes | None = None) -> PromptText:
        """Return the text of the prompt, as bytes or added to `into`. Raises ApiError 400."""
        return messages_text(fields, self.prompt_field, fields.get(self.prompt_field), None, into)

    def previous_id(self, fields: dict[str, Any]) -> str:
        """Return the id of the response that this request goes on from, or "". Raises ApiError."""
        return ""

    def has_prompts(self, fields: dict[str, Any]) -> bool:
        """True if a request has a list of prompts."""
        return False

    def prefill_only(self, fields: dict[str, Any]) -> bool:
        """True if an engine only prefills text before the first token."""
        return is_pure(fields)

    def reads_cache(self, fields: dict[str, Any]) -> bool:
        """True if an engine takes the cached part of the prompt instead of computing it."""
        return True

    def sequences(self, fields: dict[str, Any]) -> int:
        """Return the number of outputs, each with a slot of its own. Raises ApiError 400."""
        return 1

    def usage_tokens(self, usage: object) -> tuple[int, int | None, int]:
        """Return the tokens that a response reports, as `usage.usage_tokens` does."""
        return usage_tokens(usage)


def answers(fields: dict[str, Any]) -> int:
    """Return the number of answers to each prompt, `n`, at least 1. Raises ApiError 400."""
    count = fields.get("n")
    if count is None:
        return 1
    try:
        return max(1, integer(fields, "n", 1))
    except ApiError:
        # The backend rejects a value that is not a number. But vLLM accepts a whole number
        # beyond 64 bits, which orjson returns as a float.
        if type(count) in (int, float) and count >= BEYOND_64_BITS:
            raise
        return 1
