"""Turn a prompt into bytes, in the order of a chat template: tools, documents, messages.

Equal prefixes of the text are equal prefixes of the bytes. This runs before admission, so its work
is bounded: items are counted before they are looped over.
"""

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_128, xxh3_128_digest

from forebay.proxy.api.block_hashes import BlockHashes
from forebay.proxy.api.json_body import LongText
from forebay.proxy.api.media_tokens import LONG_BYTES, WithoutMedia, media_tokens
from forebay.proxy.http1.errors import ApiError, invalid_type

_LONG = "-" * LONG_BYTES
MOST_ITEMS = 16_384  # bound of messages, parts and tool calls together, and of prompts in a batch
REASONING = ("reasoning", "reasoning_content")  # the new name and the old one


Text = BytesIO | BlockHashes
"""Text is written to it. A BytesIO gives its content uncopied."""


class PromptText(NamedTuple):
    """A prompt as bytes, or as the hashes of its blocks.

    Attributes:
        token_ids: the bytes are token ids.
        media_tokens: estimated tokens of media, of which the bytes hold digests only.
    """

    data: bytes | BlockHashes
    token_ids: bool = False
    media_tokens: int = 0


def messages_text(
    fields: dict[str, Any], name: str, messages: Any, system: Any, into: BlockHashes | None
) -> PromptText:
    """Return the text of a request's messages. Raises ApiError 400.

    Args:
        name: the field with the messages.
        system: content that precedes them.
        into: receives the text of a large body, instead of bytes.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid_type(name, "a list of one or more messages", name)
    items = counted(0, messages, name)
    # Appended at once: each result of orjson holds a buffer of 1 KB or more, however short it is.
    text: Text = BytesIO() if into is None else into
    media = 0
    _add_preamble(text, fields)
    if system is not None:
        _add_message(text, {"role": "system", "content": system}, 0)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid_type(f"{name}[{index}]", "an object", name)
        if "role" in message or name == "messages":
            items, tokens = _add_message(text, message, items)
            media += tokens
        else:  # a call of a tool, its output, or reasoning
            media += _add_item(text, message)
    return PromptText(made(text), media_tokens=media)


def _add_message(text: Text, message: dict[str, Any], items: int) -> tuple[int, int]:
    """Add a message. Return the number of items so far, and the estimated tokens of its media.

    Args:
        items: number of items before this message.
    """
    media = 0
    _add_role(text, message)
    content = message.get("content")
    if isinstance(content, str):
        text.write(content.encode())
    elif content is not None and not add_text(text, content):
        if not isinstance(content, list):
            raise invalid_type("content", "a string or a list of parts", "messages")
        items = counted(items, content, "messages")
        media = _add_parts(text, content)
    if calls := message.get("tool_calls"):
        if isinstance(calls, list):
            items = counted(items, calls, "messages")
        text.write(_dumped(calls))
    return items, media


def add_text(text: Text, value: Any) -> bool:
    """Add a string of any length. False, and nothing is added, if the value is not a string."""
    if isinstance(value, str):
        text.write(value.encode())
    elif isinstance(value, LongText):
        for piece in value.pieces:
            text.write(piece)
    else:
        return False
    return True


def _add_preamble(text: Text, fields: dict[str, Any]) -> None:
    """Add the parts that a chat template puts before the messages: tools, documents, options."""
    if tools := fields.get("tools"):
        text.write(_dumped(tools))
    if isinstance(documents := fields.get("documents"), list) and documents:
        text.write(_dumped(documents))
    if isinstance(options := fields.get("chat_template_kwargs"), dict) and options:
        text.write(_dumped(options))


def _add_role(text: Text, message: dict[str, Any]) -> None:
    """Add the role of a message, and its reasoning."""
    role = message.get("role")
    # The backend rejects any other role. Its JSON may be nested too deeply to be dumped here.
    text.write(f"\0{role if isinstance(role, str) else ''}\0".encode())
    for name in REASONING:
        if (thought := message.get(name)) and not add_text(text, thought):
            text.write(_dumped(thought))


def counted(before: int, items: list[Any], param: str) -> int:
    """Return the number of items so far. Raises ApiError 400 above MOST_ITEMS."""
    count = before + len(items)
    if count > MOST_ITEMS:
        what = "messages, content parts and tool calls" if param == "messages" else "prompts"
        message = f"The body holds more than {MOST_ITEMS:,} {what}."
        raise ApiError(400, "too_many_items", message, param=param)
    return count


def _add_parts(text: Text, parts: list[Any]) -> int:
    """Add multi-part content, and return the estimated tokens of its media.

    Text is added as it is, media as a digest, anything else as JSON.
    """
    media = 0
    for part in parts:
        if not isinstance(part, dict | str | LongText):  # vLLM treats strings as text parts
            raise invalid_type("A content part", "a string or an object", "messages")
        if isinstance(part, dict) and not isinstance(part.get("type", ""), str | None):
            raise invalid_type("The type of a content part", "a string", "messages")
        if not isinstance(part, dict):
            text.write(_dumped(part))
        elif tokens := media_tokens(part):
            text.write(xxh3_128_digest(_dumped(part, _begin_and_digest)))
            media += tokens
        elif not add_text(text, part.get("text")):
            media += _add_item(text, part)
    return media


def _add_item(text: Text, item: dict[str, Any]) -> int:
    """Add an item or a part as JSON, and return the estimated tokens of the media in it.

    Only a long item is searched for media.
    """
    # A stand-in for each long string is enough: its item still counts as long.
    dumped = _dumped(item, lambda _: _LONG)
    if len(dumped) < LONG_BYTES:
        text.write(dumped)
        return 0
    without = WithoutMedia()
    try:
        copy = without.copy(item)
    except RecursionError:  # nested so deeply that no API knows it
        text.write(dumped)
        return 0
    text.write(_dumped(copy) if without.differs else dumped)
    return without.tokens


def _begin_and_digest(long: LongText) -> str:
    """Return the begin and a digest of a long string, which as JSON would be copied three times."""
    digest = xxh3_128()
    for piece in long.pieces:
        digest.update(piece)
    return long.pieces[0][:LONG_BYTES].decode(errors="ignore") + digest.hexdigest()


def _dumped(value: Any, long: Callable[[Any], str] = str) -> bytes:
    try:
        return orjson.dumps(value, long)
    except orjson.JSONEncodeError:
        pass
    try:  # orjson writes no number beyond 64 bits, but reads it as a float
        return orjson.dumps(orjson.loads(json.dumps(value, default=long)))
    except (TypeError, ValueError, RecursionError):  # orjson reads 1024 levels and writes 254
        return _flat(value, long)


def _flat(value: Any, long: Callable[[Any], str]) -> bytes:
    """Join the keys and values of JSON that is nested too deeply to be written."""
    parts, nodes = [], [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += [item for pair in reversed(node.items()) for item in reversed(pair)]
        elif isinstance(node, list):
            nodes += reversed(node)
        else:
            parts.append(long(node) if isinstance(node, LongText) else str(node))
    return " ".join(parts).encode()


def made(text: Text) -> bytes | BlockHashes:
    """Return finished text as bytes, or as the hashes that it was added to."""
    return text.getvalue() if isinstance(text, BytesIO) else text
