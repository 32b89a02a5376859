"""/v1/messages, Anthropic's API: a chat under other names (vllm/entrypoints/anthropic)."""

from typing import Any

import orjson

from forebay.replay.engine.server.answers import Chunks, ServedAnswer, WholeAnswer
from forebay.replay.engine.server.api_errors import EngineApiError, invalid, shown
from forebay.replay.engine.server.protocol import Call, read_call

STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def read_messages(body: dict[str, Any], *, served_name: str) -> Call:
    """Read a body as the chat that vLLM makes of it (EngineApiError 400 or 404: a bad body)."""
    for needed in ("model", "messages", "max_tokens"):
        if needed not in body:
            raise invalid("missing", needed, "Field required", shown(body))
    chat = {key: value for key, value in body.items() if key not in ("system", "n")}
    system, messages = body.get("system"), body["messages"]
    if system and isinstance(messages, list):
        chat["messages"] = [{"role": "system", "content": system}, *messages]
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return read_call(chat, chat=True, served_name=served_name)


class MessageChunks(Chunks):
    """The events of one streamed message."""

    __slots__ = ("_open", "_reason")

    done = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def __init__(self, answer: ServedAnswer) -> None:
        super().__init__(answer)
        self._open = False  # the content block has begun
        self._reason = "stop"
        self.before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta",'
            b'"delta":{"type":"text_delta","text":"'
        )
        self.after = b'"},"index":0'

    def role(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._answer.origin.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._call.prompt.tokens, "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def tokens(self, text: bytes, produced: int) -> bytes:
        if not text:
            return b""
        began = b""
        if not self._open:
            self._open = True
            block = {"type": "text", "text": ""}
            began = _event("content_block_start", content_block=block, index=0)
        return began + self.before + text + self.after + b"}\n\n"

    def last(self, text: bytes, produced: int, reason: str) -> bytes:
        self._reason = reason
        return self.tokens(text, produced)

    def usage(self, produced: int, cached: int) -> bytes:
        ended = _event("content_block_stop", index=0) if self._open else b""
        delta = {"stop_reason": STOP_REASONS.get(self._reason), "stop_sequence": None}
        usage = _usage(self._answer, produced, cached)
        return ended + _event("message_delta", delta=delta, usage=usage)


def whole_message(answer: WholeAnswer) -> bytes:
    """Return the body of a message that is not streamed."""
    body = {
        "id": answer.begun.id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": answer.text.decode()}],
        "model": answer.begun.origin.model,
        "stop_reason": STOP_REASONS.get(answer.reason),
        "usage": _usage(answer.begun, answer.produced, answer.cached),
    }
    return orjson.dumps({key: value for key, value in body.items() if value is not None})


def message_error(error: EngineApiError) -> bytes:
    """Return an error's body as this API has it."""
    return orjson.dumps({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def _usage(answer: ServedAnswer, produced: int, cached: int) -> dict[str, int]:
    """Count input tokens without tokens that were read from the cache or written to it."""
    prompt = answer.call.prompt.tokens
    if not answer.origin.tells_cached:
        return {"input_tokens": prompt, "output_tokens": produced}
    cache_writes = answer.cache_writes(cached)
    return {
        "input_tokens": max(0, prompt - cached - cache_writes),
        "output_tokens": produced,
        "cache_creation_input_tokens": cache_writes,
        "cache_read_input_tokens": cached,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
