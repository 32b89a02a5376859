"""Anthropic's messages."""

from typing import Any, Final

from forebay.proxy.api.block_hashes import BlockHashes
from forebay.proxy.api.dialects.base import Dialect
from forebay.proxy.api.dialects.special_work import has_schema
from forebay.proxy.api.prompt_text import PromptText, messages_text


class Messages(Dialect):
    """`/v1/messages`."""

    types_errors = True
    opens = frozenset(("ping",))
    ends = frozenset(("message_stop",))
    ping = "ping"
    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'  # valid also before message_start

    def prompt_text(self, fields: dict[str, Any], into: BlockHashes | None = None) -> PromptText:
        return messages_text(fields, "messages", fields.get("messages"), fields.get("system"), into)

    def prefill_only(self, fields: dict[str, Any]) -> bool:
        return not has_schema(fields) and super().prefill_only(fields)


DIALECT: Final = Messages()
