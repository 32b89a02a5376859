"""The beginning of a prompt as a request of its own: its body, for an engine to compute and keep.

Cut where the policy's index blocks end, which is between any two characters: the engine's last
block may then hold other tokens than in the whole prompt, and is computed again. In a chat the
template closes the message that was cut; that, too, is in the last block alone.
"""

from typing import Any

import orjson

from forebay.proxy.api.body import BYTES_PER_TOKEN_ID, parse_any
from forebay.proxy.api.prompt_text import chat_text

DROPPED = ("stream_options", "max_completion_tokens", "min_tokens", "best_of", "n")


async def prefix_body(body: bytes, length: int, *, chat: bool) -> bytes | None:
    """A body that asks for one token behind the first `length` bytes of the prompt.

    None where the prompt cannot be cut there: before the first message, or at its very end.
    """
    fields = await parse_any(body)
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
    """Those whose text fits into so many bytes, and what fits of the next."""
    messages, head = fields["messages"], {**fields, "messages": []}

    def size(upto: list[dict[str, Any]]) -> int:
        return len(chat_text({**head, "messages": upto}).data) if upto else 0

    low, high = 0, len(messages)
    while low < high:  # how many fit whole
        middle = (low + high + 1) // 2
        if size(messages[:middle]) <= length:
            low = middle
        else:
            high = middle - 1
    fit = messages[:low]
    if low < len(messages) and isinstance(content := messages[low].get("content"), str):
        cut = {k: v for k, v in messages[low].items() if k != "tool_calls"}
        room = length - size([*fit, {**cut, "content": ""}])
        if room > 0:
            return [*fit, {**cut, "content": _first_bytes(content, room)}]
    return fit  # type: ignore[no-any-return]


def _first_bytes(text: str, length: int) -> str:
    return text.encode()[:length].decode(errors="ignore")  # no half a character
