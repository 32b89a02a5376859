"""Read of a request body what the policy needs, and nothing else.

Validates only what is routed on; the rest is the backend's to judge. Nothing here counts tokens
exactly: a tokenizer would stop the loop for 20 ms at 100k tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from forebay.proxy.api.cache_salt import FIELD, CacheSalts, with_salt
from forebay.proxy.api.large_json import TooMuchJson, is_dense, loads_in_steps
from forebay.proxy.api.prompt_text import chat_text, completion_text
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.core.model import Request, ServiceClass
from forebay.proxy.http1.errors import ApiError, invalid_type

DEFAULT_OUTPUT_TOKENS = 512  # reserved for an answer to a request that states no limit
MOST_OUTPUT_TOKENS = 1 << 20  # reserved for all answers to one request
BYTES_PER_TOKEN_ID = 4
LARGE_BYTES = 1 << 20  # of a body: others are let in between while it is parsed
WHOLE_ONLY = frozenset(
    ("echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "suffix")
)
"""Fields of which an engine makes more of the prompt than tokens to compute."""
CLASSES: tuple[ServiceClass, ...] = ("interactive", "standard", "batch")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A request body, understood.

    Attributes:
        body: what is to be sent on: what came, unless a salt had to be written.
        prompt_bytes: length of the prompt as text, 0 when it was token ids or held media: what a
            backend counts then says nothing about text.
        streams: the client asked for a stream.
        chat: not a completion.
        block_bytes: of the prompt, in each block of `request`.
    """

    request: Request
    body: bytes
    prompt_bytes: int
    token_ids: bool
    streams: bool
    chat: bool
    block_bytes: int


def read_fields(
    fields: dict[str, Any],
    body: bytes,
    headers: Mapping[str, str],
    *,
    id_: str,
    chat: bool,
    estimate: TokenEstimate,
    block_bytes: int,
    tenant: str = "",
    salts: CacheSalts | None = None,
) -> ParsedBody:
    """Understand a chat (or completion) request; raises ApiError 400 naming the parameter.

    Args:
        fields: the body, parsed: for a large one that is half of the work, and done apart.
    """
    streams = _typed(fields, "stream", bool, False)
    _typed(fields, "model", str, "")
    text = chat_text(fields) if chat else completion_text(fields)
    prompt = text.data
    tokens = (
        len(prompt) // BYTES_PER_TOKEN_ID
        if text.token_ids
        else estimate.tokens(len(prompt), tenant)
    )
    tokens = max(1, tokens)
    answer_tokens = _answer_tokens(fields)
    salt = _client_salt(fields)
    if salts is not None:
        _refuse_media_ids(fields)
        salt = salts.salt(tenant, salt)
        body = with_salt(body, salt)
    request = Request(
        id_,
        prompt_tokens=tokens + text.media_tokens,
        output_tokens=min(answer_tokens * _answers(fields, chat), MOST_OUTPUT_TOKENS),
        blocks=_chain(prompt, block_bytes, salt),
        # Media are no part of it: prompts that share their first blocks need not share these.
        block_tokens=tokens * block_bytes / max(1, len(prompt)),
        timeout_s=_timeout_s(headers),
        streams=streams or answer_tokens == 1,  # the end of one token is its beginning
        tenant=tenant,
        service_class=_service_class(fields, headers),
        whole=bool(text.media_tokens) or _only_whole(fields, chat),
    )
    teaches = not (text.token_ids or text.media_tokens)
    return ParsedBody(
        request, body, len(prompt) if teaches else 0, text.token_ids, streams, chat, block_bytes
    )


async def salted(body: bytes, content_type: str, tenant: str, salts: CacheSalts) -> bytes:
    """The body of a request that is not shaped, with the tenant's salt; raises ApiError 400.

    Forms (audio) pass: vLLM reads no salt from them.
    """
    if content_type == "multipart/form-data":
        return body
    fields = await parse_any(body)
    _refuse_media_ids(fields)
    return with_salt(body, salts.salt(tenant, _client_salt(fields)), empty=not fields)


async def parse_any(body: bytes) -> dict[str, Any]:
    """As `parse`, but in steps where it would take long; raises ApiError 400."""
    if len(body) < LARGE_BYTES and not is_dense(body):
        return parse(body)
    try:
        return _fields(await loads_in_steps(body))
    except TooMuchJson as error:
        raise ApiError(400, "too_many_items", f"The body holds {error}.") from None
    except orjson.JSONDecodeError as error:
        raise _not_json(error) from None


def parse(body: bytes) -> dict[str, Any]:
    """The fields of a body; raises ApiError 400."""
    try:
        return _fields(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise _not_json(error) from None


def _not_json(error: orjson.JSONDecodeError) -> ApiError:
    # The decoder's own words may quote the prompt: only where it stopped is said.
    where = f"line {error.lineno}, column {error.colno}"
    return ApiError(400, "invalid_json", f"The body is not valid JSON ({where}).")


def _fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise invalid_type("body", "a JSON object", None)
    return fields


def _chain(prompt: bytes, block_bytes: int, salt: str | None) -> tuple[int, ...]:
    """Hashes of the full blocks, each covering all before it, and the cache salt first."""
    before, hashes = xxh3_64_intdigest(salt.encode()) if salt else 0, []
    # A view costs more than a copy of a block that the CPU's cache holds, and less than another.
    text = prompt if len(prompt) < LARGE_BYTES else memoryview(prompt)
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        before = xxh3_64_intdigest(text[start : start + block_bytes], before)
        hashes.append(before)
    return tuple(hashes)


def _only_whole(fields: dict[str, Any], chat: bool) -> bool:
    """Whether the prompt must be sent as it is."""
    if not WHOLE_ONLY.isdisjoint(fields) and (
        any(fields.get(name) for name in WHOLE_ONLY) or fields.get("prompt_logprobs") == 0
    ):
        return True
    if chat:
        return list in [type(message.get("content")) for message in fields["messages"]]
    prompt = fields["prompt"]
    return not isinstance(prompt, str) and not isinstance(prompt[0], int)


def _answers(fields: dict[str, Any], chat: bool) -> int:
    """How many are generated side by side, each with KV cache of its own behind the prompt."""
    answers = 1
    for name in ("n",) if chat else ("n", "best_of"):
        asked = fields.get(name)
        if type(asked) is int and asked > answers:  # anything else is the backend's to refuse
            answers = asked
    return answers


def _answer_tokens(fields: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = _typed(fields, name, int, None)
        if limit is not None:
            return max(0, min(int(limit), MOST_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS


def _client_salt(fields: dict[str, Any]) -> str | None:
    salt = _typed(fields, FIELD, str, None)
    if salt == "":
        raise invalid_type(FIELD, "a string that is not empty", FIELD)
    return salt  # type: ignore[no-any-return]


def _refuse_media_ids(fields: dict[str, Any]) -> None:
    """Raise ApiError 400 for a part of a message whose client says under what it is cached.

    vLLM caches media under such a `uuid` whatever the salt is, and takes one without media for what
    is there: another tenant's image.
    """
    for name in ("messages", "input"):
        items = fields.get(name)
        if not isinstance(items, list) or not items or not isinstance(items[0], dict):
            continue  # `input` may be 100,000 token ids
        for item in items:
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("uuid") is not None:
                    message = "A content part may not have a uuid here: caches are kept apart."
                    raise ApiError(400, "uuid_not_allowed", message, param=name)


def _service_class(fields: dict[str, Any], headers: Mapping[str, str]) -> ServiceClass:
    """The header decides, else vLLM's `priority`, where lower is sooner."""
    priority: int = _typed(fields, "priority", int, 0)
    named = headers.get("x-forebay-class")
    if named is None:
        return CLASSES[1 + (priority > 0) - (priority < 0)]
    for one in CLASSES:
        if named == one:
            return one
    raise invalid_type("x-forebay-class", f"one of {', '.join(CLASSES)}", "x-forebay-class")


def _timeout_s(headers: Mapping[str, str]) -> float:
    given = headers.get("x-request-timeout")
    if given is None:
        return math.inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise invalid_type("x-request-timeout", "a number of seconds above 0", "x-request-timeout")
    return seconds


def _typed(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise invalid_type(
            name, {bool: "true or false", str: "a string", int: "a whole number"}[kind], name
        )
    return value
