"""OpenAI's chats."""

from typing import Any, Final

from forebay.proxy.api.dialects.base import Dialect, answers
from forebay.proxy.api.dialects.special_work import wants_logprobs_of_prompt


class Chat(Dialect):
    """`/v1/chat/completions`."""

    # Only here: vLLM's completions ignore max_completion_tokens, even if a client sends it.
    limits: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    asks_usage = True
    tokenizes = True

    def reads_cache(self, fields: dict[str, Any]) -> bool:
        return not wants_logprobs_of_prompt(fields, fields.get("top_logprobs", 0))

    def sequences(self, fields: dict[str, Any]) -> int:
        return answers(fields)


DIALECT: Final = Chat()
