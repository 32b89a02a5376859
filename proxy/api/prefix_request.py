"""Make the body of a request for a leading part of a prompt (split prefill).

The prompt is cut at the end of one of the policy's index blocks, between any two characters. So
the engine's last block may hold other tokens than in the whole prompt, and is computed again. In a
chat the template closes the message that was cut, which also changes the last block only.
"""

from typing import Any

import orjson

from forebay.proxy.api.body import BYTES_PER_TOKEN_ID, parse_any
from forebay.proxy.api.prompt_text import chat_text, whole_messages
from forebay.proxy.api.special_work import GRAMMARS

DROPPED = ("stream_options", "max_completion_tokens", "min_tokens", "best_of", "n", *GRAMMARS)


async def prefix_body(body: bytes, length: int, *, chat: bool) -> bytes | None:
    """Return a body that asks for one token after the first `length` bytes of the prompt.

    Returns None if the prompt cannot be cut there: before the first message, or at its end.
    """
    fields = await parse_any(body, ours=True)
    if chat:
        messages = _first_messages(fields, length)
        if not messages:
            return None
        fields["messages"] = messages
    elif isinstance(fields["prompt"], str):
        fields["prompt"] = _first_bytes(fields["prompt"], length)
    else:
        fields["prompt"] = fields["prompt"][: length // BYTES_PER_TOKEN_ID]
    for name in DROPPED:
        fields.pop(name, None)
    return orjson.dumps({**fields, "stream": False, "max_tokens": 1})


def _first_messages(fields: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """Return the messages whose text fits into `length` bytes, and what fits of the next."""
    messages, head = fields["messages"], {**fields, "messages": []}

    def size(upto: list[dict[str, Any]]) -> int:
        return len(chat_text({**head, "messages": upto}).data) if upto else 0

    count = whole_messages(fields, length)
    fit = messages[:count]
    if count < len(messages) and isinstance(content := messages[count].get("content"), str):
        cut = {k: v for k, v in messages[count].items() if k != "tool_calls"}
        room = length - size([*fit, {**cut, "content": ""}])
        if room > 0:
            return [*fit, {**cut, "content": _first_bytes(content, room)}]
    return fit  # type: ignore[no-any-return]


def _first_bytes(text: str, length: int) -> str:
    return text.encode()[:length].decode(errors="ignore")  # drops a character that was cut
