"""Parse the fields of a request body that the policy needs.

Only fields that decisions depend on are validated. The backend judges the rest. Tokens are
estimated, because a tokenizer would block the loop for 20 ms at 100k tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.proxy.api.block_hashes import LARGE_BYTES, BlockHashes, chain, identity
from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.api.dialects import DIALECTS, Dialect
from forebay.proxy.api.dialects.continuation import may_continue
from forebay.proxy.api.fields import boolean, client_salt, integer, string, with_members
from forebay.proxy.api.prompt_text import PromptText
from forebay.proxy.api.token_estimate import TokenEstimate, fewest_tokens
from forebay.proxy.backends.models import Models, Wanted
from forebay.proxy.backends.salt_support import FIELD as SALT
from forebay.proxy.core.model import CLASSES, Request, ServiceClass
from forebay.proxy.http1.errors import ApiError, invalid_type
from forebay.traces.ground.command_line.quantities import seconds

DEFAULT_OUTPUT_TOKENS = 512  # reserved for the output of a request without a limit
MOST_OUTPUT_TOKENS = 1 << 20  # bound of what is reserved for all outputs of one request
BYTES_PER_TOKEN_ID = 4
# Replaces the stream options: without usage, no other of them has an effect.
INCLUDE_USAGE = '{"include_usage":true}'
OTHER_TIMEOUTS = (
    ("x-llm-d-slo-ttft-ms", "ms"), ("x-slo-ttft-ms", "ms"),  # llm-d
    ("x-llm-d-inference-ttl", ""), ("request-timeout-ms", "ms"),  # llm-d, Baseten's client
)  # fmt: skip
"""Headers of other tools for the client's patience, with the unit of their numbers. The first that
a request has counts."""


@dataclass(slots=True)  # never changed, but frozen it would take each request 1 us more
class ParsedBody:
    """A parsed request body.

    Attributes:
        body: the bytes to send on, with the cache salt if tenants are isolated.
        prompt_bytes: length of the prompt as text, or 0 for token ids or media, from which the
            bytes per token of text cannot be learned.
        streams: the client asked for a stream.
        dialect: the API of the request.
        hides_usage: the body asks for usage, which the client did not.
        previous_id: id of the response that a request to /v1/responses goes on from.
        model: the name that the backends use.
        continues: another backend may go on with the answer.
    """

    request: Request
    body: bytes
    prompt_bytes: int
    token_ids: bool
    streams: bool
    dialect: Dialect
    hides_usage: bool = False
    previous_id: str = ""
    model: str = ""
    continues: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """The settings of a proxy that decide how it reads a body.

    Attributes:
        sdk_timeout: the timeout of OpenAI's Python client counts where no other header gives one.
        most_tokens: the longest prompt of any bucket. A longer estimate is cut to it if the prompt
            may fit: an estimate rejects no prompt, and if it is served it is no longer than this.
        models: the models that the backends serve, with their aliases.
        continue_streams: another backend may go on with a stream.
    """

    estimate: TokenEstimate
    block_bytes: int
    sdk_timeout: bool = True
    most_tokens: float = math.inf
    models: Models = field(default_factory=Models)
    continue_streams: bool = True


def read_fields(
    reading: ReadSettings,
    fields: dict[str, Any],
    body: bytes,
    headers: Mapping[str, str],
    *,
    id_: str,
    dialect: Dialect,
    tenant: str = "",
    salts: CacheSalts | None = None,
    ignore_salt: frozenset[str] = frozenset(),
    counted: bool = False,
) -> ParsedBody:
    """Parse a request that is shaped. Raises ApiError 400 naming the parameter.

    Args:
        fields: `body` as JSON. Parsing that is half of the work for a large body (`parse_any`).
        counted: ask the backend for the usage of a stream, too, because the ledger or a budget
            counts it.
        ignore_salt: paths on which the backends drop the salt, so all tenants share their caches.
    """
    # Fields with a plain value.
    answer_tokens = _answer_tokens(fields, dialect)
    streams, priority = boolean(fields, "stream"), integer(fields, "priority", 0)
    name, salt = string(fields, "model"), client_salt(fields)
    previous_id = dialect.previous_id(fields)
    # The seed of the hashes: prefix caches of models and tenants are apart.
    members: dict[str, str] = {}  # of the body that is sent on; they override the client's
    model = reading.models.of_body(name, members)
    if salts is not None:
        reject_media_ids(fields)
        salt = salts.salt(tenant, salt)
        members[SALT] = f'"{salt}"'
    cache = _cache_of(salt, model, shared=dialect.path in ignore_salt)
    # The estimated length. A large prompt is hashed as it is read, and never kept as a whole.
    block_bytes, most_tokens = reading.block_bytes, reading.most_tokens
    into = BlockHashes(block_bytes, cache) if len(body) >= LARGE_BYTES else None
    text = dialect.prompt_text(fields, into)
    prompt = text.data
    tokens = _text_tokens(text, reading.estimate, tenant)
    all_tokens = tokens + text.media_tokens
    if all_tokens > most_tokens and _may_fit(fields, text, most_tokens, dialect):
        all_tokens = int(most_tokens)
        tokens = min(tokens, all_tokens)
    pure = not text.media_tokens and dialect.prefill_only(fields)
    sequences = min(dialect.sequences(fields), MOST_OUTPUT_TOKENS)
    timeout_s = _timeout_s(headers, reading.sdk_timeout)
    service_class = _service_class(priority, headers)
    # The body that is sent on, and what the tenant's quota is charged.
    if hides_usage := counted and streams and _uncounted(fields, dialect):
        members["stream_options"] = INCLUDE_USAGE
    quota_tokens = 0
    if tenant:
        _keep_equal(members, priority)
        quota_tokens = _quota_tokens(text, reading, tokens)
    body = with_members(body, members)
    blocks = chain(prompt, block_bytes, cache)
    request = Request(
        id_,
        prompt_tokens=all_tokens,
        output_tokens=min(answer_tokens * sequences, MOST_OUTPUT_TOKENS),
        blocks=blocks,
        # Without media: prompts that share their first blocks may have other media.
        block_tokens=tokens * block_bytes / max(1, len(prompt)),
        timeout_s=timeout_s,
        streams=(streams or answer_tokens == 1) and pure,  # one token: the end shows it
        tenant=tenant,
        service_class=service_class,
        pure=pure,
        reads_cache=dialect.reads_cache(fields),
        sequences=sequences,
        quota_tokens=quota_tokens,
        identity=identity(prompt, block_bytes, blocks),
        model=model.route,
    )
    teaches = not (text.token_ids or text.media_tokens or previous_id)
    return ParsedBody(
        request, body, len(prompt) if teaches else 0, text.token_ids, streams, dialect, hides_usage,
        previous_id, model.name, _continues(fields, streams, request, dialect, text, reading),
    )  # fmt: skip


def _continues(
    fields: dict[str, Any], streams: bool, request: Request, dialect: Dialect, text: PromptText,
    reading: ReadSettings,
) -> bool:  # fmt: skip
    """True if another backend may go on with the answer: a stream of one text, from a text."""
    one_text = streams and request.pure and request.sequences == 1
    text_only = dialect.tokenizes and not text.token_ids and reading.continue_streams
    return one_text and text_only and may_continue(fields)


def _keep_equal(members: dict[str, str], priority: int) -> None:
    """Give no client a priority over other tenants."""
    if priority:
        members["priority"] = "0"


def _cache_of(salt: str | None, model: Wanted, *, shared: bool) -> str | None:
    """Return the seed of a prompt's first hash, from its salt and its model.

    Prompts with different seeds never count as equal prefixes.
    """
    salt = None if shared else salt
    return f"{salt or ''}\0{model.name}" if model.name else salt


def _may_fit(
    fields: dict[str, Any], text: PromptText, most_tokens: float, dialect: Dialect
) -> bool:
    """True if a prompt whose estimate is above `most_tokens` may have fewer tokens.

    False for a batch of prompts: their sum is the work, however short each prompt is.
    """
    if fields.get("truncate_prompt_tokens") is not None:
        return True  # the engine cuts it
    if text.token_ids or dialect.has_prompts(fields):
        return False
    return fewest_tokens(len(text.data)) <= most_tokens


def _text_tokens(text: PromptText, estimate: TokenEstimate, tenant: str) -> int:
    """Return the tokens of a prompt without its media."""
    if text.token_ids:
        return max(1, len(text.data) // BYTES_PER_TOKEN_ID)
    return estimate.tokens(len(text.data), tenant)


def _quota_tokens(text: PromptText, reading: ReadSettings, tokens: int) -> int:
    """Return the tokens that a quota is charged until an engine counts the prompt.

    0 for token ids, whose number is exact.
    """
    if text.token_ids:
        return 0
    tokens = max(tokens, reading.estimate.untaught_tokens(len(text.data)))
    return int(min(reading.most_tokens, tokens + text.media_tokens))


def _uncounted(fields: dict[str, Any], dialect: Dialect) -> bool:
    """True if the API can report the usage of a stream, and the client does not ask for it."""
    options = fields.get("stream_options")
    asks_usage = isinstance(options, dict) and options.get("include_usage") is True
    return dialect.asks_usage and not asks_usage


def _answer_tokens(fields: dict[str, Any], dialect: Dialect) -> int:
    for name in dialect.limits:
        if fields.get(name) is not None:
            return max(0, min(integer(fields, name, 0), MOST_OUTPUT_TOKENS))
    return DEFAULT_OUTPUT_TOKENS


def reject_media_ids(fields: dict[str, Any]) -> None:
    """Raise ApiError 400 for a content part with a `uuid`.

    vLLM caches media under that id without regard to the salt. A part with an id and no media then
    means the cached media: another tenant's image.
    """
    for name in dict.fromkeys(d.prompt_field for d in DIALECTS.values() if d.has_parts):
        items = fields.get(name)
        if not isinstance(items, list) or not items or not isinstance(items[0], dict):
            continue  # `input` may be 100,000 token ids
        for item in items:
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("uuid") is not None:
                    message = "A content part may not have a uuid: caches are isolated here."
                    raise ApiError(400, "uuid_not_allowed", message, param=name)


def _service_class(priority: int, headers: Mapping[str, str]) -> ServiceClass:
    """Return the class of the header, else of vLLM's `priority`, where lower is more urgent."""
    named = headers.get("x-forebay-class")
    if named is None:
        return CLASSES[1 + (priority > 0) - (priority < 0)]
    for name in CLASSES:
        if named == name:
            return name
    raise invalid_type("x-forebay-class", f"one of {', '.join(CLASSES)}", "x-forebay-class")


def _timeout_s(headers: Mapping[str, str], sdk: bool) -> float:
    """Return the seconds within which the client wants its first token, or inf.

    openai-python sends its read timeout with every request (600 s by default). It is the longest
    silence that the client accepts, so the first byte must come within it. Other routers and
    clients have headers of their own. A strange value in them is ignored, because no user wrote it.
    """
    header = headers.get("x-request-timeout")
    if header is not None:
        if not (timeout_s := _seconds(header)):
            raise invalid_type(
                "x-request-timeout", "a time above 0 such as 30 or 30s", "x-request-timeout"
            )
        return timeout_s
    for name, unit in OTHER_TIMEOUTS:
        if name in headers:
            return _seconds(headers[name] + unit) or math.inf
    header = headers.get("x-stainless-read-timeout") if sdk else None
    return math.inf if header is None else _seconds(header) or math.inf


def _seconds(text: str) -> float:
    """Parse a duration such as `30`, `30s` or `500ms`. Returns 0 for any other text."""
    try:
        return max(0.0, float(seconds(text)))
    except ValueError:
        return 0.0
