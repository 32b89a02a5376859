"""OpenAI's responses: messages and calls of tools, which may go on from an earlier response."""

from typing import Any, Final

from forebay.proxy.api.block_hashes import BlockHashes
from forebay.proxy.api.dialects.base import Dialect
from forebay.proxy.api.dialects.special_work import has_schema
from forebay.proxy.api.fields import boolean, string
from forebay.proxy.api.json_body import LongText
from forebay.proxy.api.prompt_text import PromptText, messages_text
from forebay.proxy.http1.errors import ApiError


class Responses(Dialect):
    """`/v1/responses`."""

    prompt_field = "input"
    limits: tuple[str, ...] = ("max_output_tokens",)
    keeps_responses = True
    opens = frozenset(("response.created", "response.queued", "response.in_progress"))
    ends = frozenset(("response.completed", "response.incomplete", "response.failed"))

    def prompt_text(self, fields: dict[str, Any], into: BlockHashes | None = None) -> PromptText:
        messages = fields.get("input")
        if isinstance(messages, str | LongText):
            messages = [{"role": "user", "content": messages}]
        return messages_text(fields, "input", messages, fields.get("instructions"), into)

    def prefill_only(self, fields: dict[str, Any]) -> bool:
        return not has_schema(fields) and super().prefill_only(fields)

    def previous_id(self, fields: dict[str, Any]) -> str:
        """Also raises ApiError 400 for a response in the background, which would pass the queues.

        See `Dialect.previous_id`.
        """
        if boolean(fields, "background"):
            message = "This server makes no responses in the background: leave background out."
            raise ApiError(400, "unsupported_value", message, param="background")
        return string(fields, "previous_response_id")  # type: ignore[no-any-return]


DIALECT: Final = Responses()
