"""Go on with an answer at another backend, so that its client sees one stream.

The text that the client has been sent becomes the end of the prompt. White space at its end stays
out: the other backend makes it again. Tokenizers join it to what follows, and some chat templates
cut it off.
"""

from typing import Any

import orjson

from forebay.proxy.api.fields import integer
from forebay.traces.ground.sse import read_object

MOST_TEXT_BYTES = 64 << 10  # of an answer that is kept; a longer answer cannot go on
HEAD = ("id", "created", "model")  # members that are equal in all events of a stream
COMPLETION_TOKENS = 16  # vLLM's max_tokens of a completion that names none
# Fields with which an answer is more than its text, or with which the text is not all that the
# engine has generated. Their other value stands for "not so".
_MORE = {
    "logprobs": False, "return_token_ids": False, "return_tokens_as_token_ids": False,
    "continue_final_message": False, "add_generation_prompt": True, "include_reasoning": True,
    "vllm_xargs": False,
}  # fmt: skip


class CannotContinue(Exception):
    """Another backend cannot go on with an answer."""


def may_continue(fields: dict[str, Any]) -> bool:
    """True if the text of the answer is all of it, as far as the body of a request shows."""
    if _MORE.keys().isdisjoint(fields):
        return True
    return all(fields.get(name) is None or fields[name] is no for name, no in _MORE.items())


def with_text(fields: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the body of a chat or a completion whose prompt ends with `text` of the answer.

    Raises CannotContinue if a part of a stop string has been sent: the rest of it would not stop.
    """
    stops = fields.get("stop") if fields.get("include_stop_str_in_output") else None
    for stop in [stops] if isinstance(stops, str) else stops or ():
        parts = (stop[:size].rstrip() for size in range(1, len(stop)))
        if any(part and text.endswith(part) for part in parts):
            raise CannotContinue
    if not text:
        return fields
    if "messages" not in fields:
        return {**fields, "prompt": fields["prompt"] + text}
    said = {"role": "assistant", "content": text}
    mode = {"continue_final_message": True, "add_generation_prompt": False}
    return {**fields, "messages": [*fields["messages"], said], **mode}


def limited(fields: dict[str, Any], limits: tuple[str, ...], tokens: int) -> dict[str, Any]:
    """Return a body that asks for less by the tokens that were generated. Raises CannotContinue.

    Args:
        limits: `Dialect.limits`.
    """
    least = dict.fromkeys(limits, 1) | {"min_tokens": 0}
    if "messages" not in fields:
        fields = {"max_tokens": COMPLETION_TOKENS, **fields}
    most = {name: integer(fields, name, 0) for name in least if fields.get(name) is not None}
    if any(most[name] - tokens < 1 for name in most if name in limits):
        raise CannotContinue
    return fields | {name: max(least[name], value - tokens) for name, value in most.items()}


def generated(text: list[int], before: list[int], after: list[int]) -> int:
    """Return the number of a prompt's tokens that are an answer's text. Raises CannotContinue.

    A template may write more into the prompt than the text, or write the text differently. The
    first token is not compared: some tokenizers begin a text with a space of their own.

    Args:
        text: the tokens of the text alone.
        before, after: the tokens of the prompt without and with the text.
    """
    count, same = len(after) - len(before), after[: len(before)] == before
    rest = after[len(before) + 1 :]
    if not same or count < 1 or abs(count - len(text)) > 1 or rest != text[len(text) - len(rest) :]:
        raise CannotContinue
    return count


class SentText:
    """The text of an answer that its client has been sent, and the events that go on with it.

    Attributes:
        text: as JSON writes it, without the quotes.
        lost: it is not all of the answer, or too long: another backend cannot go on.
        ended: an event with a reason to finish has been sent.
        counted: the usage has been sent.
        tokens: tokens of the text that the present backend was given as a prompt.
        limit: a sentence about the limit of this proxy that ended the last part, or "".
    """

    __slots__ = ("_again", "_head", "counted", "ended", "limit", "lost", "text", "tokens")

    def __init__(self) -> None:
        self.text = bytearray()
        self.lost = self.ended = self.counted = False
        self.tokens = 0
        self.limit = ""
        self._head: dict[str, Any] = {}  # of the first event
        self._again: int | None = None  # white space that comes again; None: the first backend

    def words(self) -> str:
        """Return the text without white space at its end. Raises ValueError if it is no JSON."""
        return self._sent().rstrip()

    def go_on(self, tokens: int) -> None:
        """From now on events come from another backend, which has `tokens` of the text."""
        self.tokens = tokens
        self._again = len(self._sent()) - len(self.words())

    def _sent(self) -> str:
        text: str = orjson.loads(b'"%b"' % bytes(self.text))
        return text

    def add(self, payload: bytes) -> None:
        """Note an event that is sent to the client."""
        if self.lost or payload == b"[DONE]":
            return
        try:
            body = orjson.loads(payload)
            choices = body["choices"]
            if not self._head:
                self._head = {name: body[name] for name in HEAD if name in body}
            for choice in choices:
                self._add(choice)
            self.counted = not choices and bool(body.get("usage"))
        except (ValueError, KeyError, TypeError, AttributeError):  # no event of this API
            self.lost = True
        self.bound()

    def _add(self, choice: dict[str, Any]) -> None:
        delta = choice.pop("delta", None)
        parts = choice if delta is None else delta
        text = parts.pop("text" if delta is None else "content", None) or ""
        self.text += orjson.dumps(text)[1:-1]
        self.ended = self.ended or bool(choice.pop("finish_reason", None))
        choice.pop("stop_reason", None)
        parts.pop("role", None)
        # Reasoning, calls of tools, logprobs, another choice: more than a text.
        if any(parts.values()) or any(choice.values()) or not isinstance(text, str):
            self.lost = True

    def bound(self) -> bool:
        """Give up a text that is too long. True if it is still kept."""
        if len(self.text) > MOST_TEXT_BYTES:
            self.lost = True
        if self.lost:
            self.text.clear()
        return not self.lost

    def joined(self, raw: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """Return an event of the present backend as one of the first, or no bytes if it adds none.

        Args:
            raw, payload: as of `EventScanner.events`.
        """
        body = read_object(payload) if self._again is not None and payload else None
        if body is None or not isinstance(body.get("choices"), list):
            return raw, payload
        body |= self._head
        usage = body.get("usage")
        if isinstance(usage, dict):
            _count_all(usage, self.tokens)
        if body["choices"] and not self._adds(body["choices"][0]):
            return b"", b""
        payload = orjson.dumps(body)
        return b"data: %b\n\n" % payload, payload

    def _adds(self, choice: dict[str, Any]) -> bool:
        """Leave out white space that the client already has. False if the choice adds nothing."""
        delta = choice.get("delta")
        parts, name = (choice, "text") if delta is None else (delta, "content")
        parts.pop("role", None)
        if self._again and (text := parts.get(name)):
            space = len(text) - len(text.lstrip())
            parts[name] = text[min(space, self._again) :]
            self._again = max(0, self._again - space) if space == len(text) else 0
        return bool(parts.get(name) or choice.get("finish_reason") or any((delta or {}).values()))


def _count_all(usage: dict[str, Any], tokens: int) -> None:
    """Count the text that a backend was given as a prompt as output."""
    for name, more in (("prompt_tokens", -tokens), ("completion_tokens", tokens)):
        if type(usage.get(name)) is int:
            usage[name] += more
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
        details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
