"""OpenAI's chats."""

from typing import Any, Final

from forebay.proxy.api.dialects.base import Dialect, answers


class Chat(Dialect):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    # vLLM's completions know no max_completion_tokens: the client may mean it, the engine does not.
    limits = ("max_completion_tokens", "max_tokens")
    asks_usage = True
    tokenizes = True

    def sequences(self, fields: dict[str, Any]) -> int:
        return answers(fields, "n")


CHAT: Final = Chat()
