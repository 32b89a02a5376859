"""OpenAI's older completions: a `prompt`, or several, instead of messages."""

from array import array
from contextlib import suppress
from io import BytesIO
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from forebay.proxy.api.block_hashes import BlockHashes
from forebay.proxy.api.dialects.base import Dialect, answers
from forebay.proxy.api.dialects.special_work import wants_logprobs_of_prompt
from forebay.proxy.api.json_body import LongText
from forebay.proxy.api.media_tokens import EMBEDS_BYTES, digest_of
from forebay.proxy.api.prompt_text import PromptText, Text, add_text, counted, made
from forebay.proxy.http1.errors import invalid_type

_TOKEN_IDS: Final = TypeAdapter(list[int])  # vLLM's own reader: 7.0, "7" and true are token ids


class Completions(Dialect):
    """`/v1/completions`."""

    operation = "text_completion"
    prompt_field = "prompt"
    has_parts = False
    asks_usage = True
    tokenizes = True

    def prompt_text(self, fields: dict[str, Any], into: BlockHashes | None = None) -> PromptText:
        prompt = fields.get("prompt")
        if (embeds := fields.get("prompt_embeds")) and (prompt is None or prompt in ("", [])):
            return _embeds_text(embeds)
        if isinstance(prompt, str):
            return PromptText(prompt.encode())
        if isinstance(prompt, LongText):
            return PromptText(_joined([prompt], into))
        if isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], int):
                return PromptText(_id_bytes(prompt), token_ids=True)
            counted(0, prompt, "prompt")
            if all(isinstance(item, str | LongText) for item in prompt):
                return PromptText(_joined(prompt, into))
            if all(isinstance(item, list) for item in prompt):
                return PromptText(b"".join(map(_id_bytes, prompt)), token_ids=True)
            return PromptText(_id_bytes(prompt), token_ids=True)
        raise invalid_type("prompt", "a string or a list of token ids", "prompt")

    def has_prompts(self, fields: dict[str, Any]) -> bool:
        return isinstance(fields.get("prompt"), list)

    def prefill_only(self, fields: dict[str, Any]) -> bool:
        # The first prompt of a batch answers first.
        return batch_of(fields) is None and super().prefill_only(fields)

    def reads_cache(self, fields: dict[str, Any]) -> bool:
        return not wants_logprobs_of_prompt(fields, fields.get("logprobs"))

    def sequences(self, fields: dict[str, Any]) -> int:
        batch = batch_of(fields)
        # vLLM has no best_of any more: it would keep slots free for answers that never come.
        return answers(fields) * (len(batch) if batch is not None else 1)


def batch_of(fields: dict[str, Any]) -> list[Any] | None:
    """Return the prompts of a request that has several, or None."""
    prompt = fields.get("prompt") or fields.get("prompt_embeds")
    if not isinstance(prompt, list) or isinstance(prompt[0], int):
        return None
    kind: Any = list if isinstance(prompt[0], list) else (str, LongText)
    return prompt if all(isinstance(item, kind) for item in prompt) else None  # else token ids


def _embeds_text(embeds: Any) -> PromptText:
    """Return a digest in place of each embedding (base64, or a list of it), and their tokens."""
    several = embeds if isinstance(embeds, list) else [embeds]
    counted(0, several, "prompt_embeds")
    if not all(isinstance(item, str | LongText) for item in several):
        raise invalid_type("prompt_embeds", "base64 or a list of it", "prompt_embeds")
    sizes = [
        sum(map(len, item.pieces)) if isinstance(item, LongText) else len(item) for item in several
    ]
    tokens = sum(max(1, size // EMBEDS_BYTES) for size in sizes)
    return PromptText("\0".join(map(digest_of, several)).encode(), media_tokens=tokens)


def _joined(prompts: list[str | LongText], into: BlockHashes | None) -> bytes | BlockHashes:
    """Return prompts with a zero byte between any two."""
    text: Text = BytesIO() if into is None else into
    for index, prompt in enumerate(prompts):
        if index:
            text.write(b"\0")
        add_text(text, prompt)
    return made(text)


def _id_bytes(ids: list[Any]) -> bytes:
    try:
        return array("I", ids).tobytes()
    except TypeError:
        with suppress(ValidationError, OverflowError):
            return array("I", _TOKEN_IDS.validate_python(ids)).tobytes()
    except OverflowError:
        pass
    raise invalid_type("prompt", "a string or a list of token ids", "prompt")


DIALECT: Final = Completions()
