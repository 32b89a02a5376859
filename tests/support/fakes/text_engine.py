"""A server that always says the same text, and goes on where a prompt has a part of it."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import orjson
from fakes.faulty_backends import END, End, _ended
from stages.proxy_stage import DONE, STREAM_HEAD, Call, RawBackend, answer, chunk

WORDS = ["The", " dog", " sat", ".", "\n", "\n", "It", ' "', "saw", '"', " a", " café", " \\", "\n",
         " 🙂", " Then", " it", " went", " home", "."]  # fmt: skip
"""The tokens of the answer. The tokenizer would join the two line ends at the end of a text."""
TEXT = "".join(WORDS)
_TOKENS = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s")
ASSISTANT = "<assistant>"


def ids(text: str) -> list[int]:
    return [crc32(token.encode()) for token in _TOKENS.findall(text)]


def rendered(fields: dict[str, Any]) -> str:
    """The prompt as the engine sees it."""
    if "messages" not in fields:
        return str(fields["prompt"])
    text = "".join(f"<{each['role']}>{each['content']}" for each in fields["messages"])
    return text if fields.get("continue_final_message") else text + ASSISTANT


@dataclass(slots=True)
class TextEngine:
    """Serves chats and completions as vLLM streams them.

    Attributes:
        dies_after: events of a stream until it dies, by `how`. None: it lives.
        asked: the bodies of the requests that it got.
        first: an event before all others.
        refuses: the answer to a request that goes on with a text.
        thinks: its chat template writes this before the text of an answer.
    """

    dies_after: int | None = None
    how: End | bytes = "reset"
    first: bytes = b""
    refuses: bytes = b""
    thinks: str = ""
    pause_s: float = 0.01
    asked: list[dict[str, Any]] = field(default_factory=list)
    backend: RawBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = RawBackend(self.serve)
        self.backend.tokenize = self.tokenize

    def tokenize(self, fields: dict[str, Any]) -> bytes:
        text = rendered(fields)
        if fields.get("continue_final_message"):
            text = text.replace(ASSISTANT, ASSISTANT + self.thinks)
        return answer(200, orjson.dumps({"tokens": ids(text)}))

    async def serve(self, call: Call) -> None:
        fields = orjson.loads(call.body)
        self.asked.append(fields)
        before = rendered(fields).partition(ASSISTANT)[2]
        if "messages" not in fields:
            before = fields["prompt"].partition("?")[2]
        if before and self.refuses:
            await call.send(self.refuses)
            return
        done = next(n for n in range(len(WORDS) + 1) if "".join(WORDS[:n]) == before)
        events = self._events(fields, WORDS[done:])
        await call.send(STREAM_HEAD + (chunk(self.first) if self.first else b""))
        for event in events[: self.dies_after]:
            await call.send(chunk(event))
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        if self.dies_after is None:
            await call.send(END)
        elif isinstance(self.how, bytes):
            await call.send(chunk(self.how) + END)
        else:
            await _ended(call, self.how)

    def _events(self, fields: dict[str, Any], words: list[str]) -> list[bytes]:
        chat, most = "messages" in fields, fields.get("max_tokens", 1_000)
        name = f"answer-{len(self.asked)}-{id(self)}"
        told: list[tuple[str | None, str | None]] = [(word, None) for word in words[:most]]
        if len(words) < most:
            told.append(("", "stop"))
        else:
            told[-1] = words[most - 1], "length"
        events = [self._event(name, chat, text, finish) for text, finish in told]
        if chat:
            events.insert(0, self._event(name, chat, None, None))
        if (fields.get("stream_options") or {}).get("include_usage"):
            prompt, output = len(ids(rendered(fields))), min(most, len(words) + 1)
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + output,
                     "completion_tokens": output,
                     "prompt_tokens_details": {"cached_tokens": prompt - 1}}  # fmt: skip
            events.append(self._said(name, [], usage=usage))
        return [*events, DONE]

    def _event(self, name: str, chat: bool, text: str | None, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if chat:
            role = {"role": "assistant"} if text is None else {}
            choice["delta"] = role | {"content": text or ""}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        return self._said(name, [choice])

    def _said(self, name: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": name, "created": len(self.asked), "model": "m"}
        return b"data: %b\n\n" % orjson.dumps({**head, "choices": choices, **more})
