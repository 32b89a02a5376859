"""/v1/responses, OpenAI's API: one text message of output (vllm/entrypoints/openai/responses).

The answer is not stored, as in vLLM without VLLM_ENABLE_RESPONSES_API_STORE. Only the fields of the
request that a simulated engine reads are echoed.
"""

from typing import Any

import orjson

from forebay.replay.engine.server.answers import Chunks, ServedAnswer, WholeAnswer
from forebay.replay.engine.server.api_errors import EngineApiError, bad_value, invalid, shown
from forebay.replay.engine.server.protocol import Call, read_call

TOLD = {"include_usage": True, "continuous_usage_stats": True}


def read_responses(body: dict[str, Any], *, served_name: str) -> Call:
    """Read a body as a chat (EngineApiError 400 or 404: a bad body)."""
    if "input" not in body:
        raise invalid("missing", "input", "Field required", shown(body))
    if earlier := body.get("previous_response_id"):
        raise EngineApiError(
            404, f"Response with id '{earlier}' not found.", "NotFoundError", "response_id"
        )
    content = body["input"]
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if isinstance(messages, list):
        if any(isinstance(message, dict) and "role" not in message for message in messages):
            raise bad_value("Only messages are served by the simulated engine.", "input")
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
    chat = {**body, "messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
    for name in ("max_tokens", "n"):
        chat.pop(name, None)
    if body.get("stream"):
        chat["stream_options"] = TOLD
    return read_call(chat, chat=True, served_name=served_name)


class ResponseChunks(Chunks):
    """The events of one streamed response, numbered from 0."""

    __slots__ = ("_item", "_number", "_reason", "_text")

    done = b""

    def __init__(self, answer: ServedAnswer) -> None:
        super().__init__(answer)
        self._item = _item_id(answer.id)
        self._number = 0
        self._reason = "stop"
        self._text = bytearray()

    def opening(self) -> bytes:
        begun = _response(self._answer)
        first = self._event("response.created", response=begun)
        return first + self._event("response.in_progress", response=begun)

    def role(self) -> bytes:
        item = {"id": self._item, "type": "message", "role": "assistant", "content": []}
        added = self._event(
            "response.output_item.added", output_index=0, item={**item, "status": "in_progress"}
        )
        return added + self._of_part("response.content_part.added", part=_part(""))

    def tokens(self, text: bytes, produced: int) -> bytes:
        self._text += text
        if not text:
            return b""
        return self._of_part("response.output_text.delta", delta=text.decode(), logprobs=[])

    def last(self, text: bytes, produced: int, reason: str) -> bytes:
        self._reason = reason
        return self.tokens(text, produced)

    def usage(self, produced: int, cached: int) -> bytes:
        text = self._text.decode()
        events = self._of_part("response.output_text.done", text=text, logprobs=[])
        events += self._of_part("response.content_part.done", part=_part(text))
        item = _item(self._item, text)
        events += self._event("response.output_item.done", output_index=0, item=item)
        whole = _ended(self._answer, text, self._reason, produced, cached)
        return events + self._event("response.completed", response=whole)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def whole_response(answer: WholeAnswer) -> bytes:
    """Return the body of a response that is not streamed."""
    text = answer.text.decode()
    return orjson.dumps(_ended(answer.begun, text, answer.reason, answer.produced, answer.cached))


def _response(answer: ServedAnswer) -> dict[str, Any]:
    """Return a response that has begun."""
    return {
        "id": answer.id, "created_at": answer.created, "incomplete_details": None,
        "instructions": None, "metadata": None, "model": answer.origin.model,
        "object": "response", "output": [], "parallel_tool_calls": True, "temperature": 1.0,
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "background": False,
        "max_output_tokens": answer.call.max_tokens,
        "max_tool_calls": None, "previous_response_id": None, "prompt": None, "reasoning": None,
        "service_tier": "auto", "status": "in_progress", "text": None, "top_logprobs": None,
        "truncation": "disabled", "usage": None, "user": None,
    }  # fmt: skip


def _ended(
    answer: ServedAnswer, text: str, reason: str, produced: int, cached: int
) -> dict[str, Any]:
    cut = {"reason": "max_output_tokens"} if reason == "length" else None
    return _response(answer) | {
        "incomplete_details": cut,
        "output": [_item(_item_id(answer.id), text)],
        "status": "incomplete" if cut else "completed",
        "usage": _usage(answer, produced, cached),
    }


def _item_id(answer_id: str) -> str:
    return f"msg_{answer_id.rpartition('_')[2]}"


def _item(item_id: str, text: str) -> dict[str, Any]:
    content = [_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "content": content,
            "status": "completed"}  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _usage(answer: ServedAnswer, produced: int, cached: int) -> dict[str, Any]:
    """Count tokens. vLLM reports cached tokens here without --enable-prompt-tokens-details, too."""
    prompt = answer.call.prompt.tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": cached, "cache_write_tokens": answer.cache_writes(cached),
            "input_tokens_per_turn": [], "cached_tokens_per_turn": [],
        },
        "output_tokens": produced,
        "output_tokens_details": {
            "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + produced,
    }  # fmt: skip
