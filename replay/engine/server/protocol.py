"""Read request bodies of the OpenAI-compatible API.

Bodies are checked by hand, not by a schema library: vLLM 0.32 defines the accepted shapes and the
answers, which were recorded. Unknown fields are ignored, as there.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

from forebay.replay.engine.server.api_errors import (
    EngineApiError,
    bad_request,
    bad_value,
    invalid,
    shown,
)
from forebay.replay.engine.tokenizer import (
    BYTES_PER_TOKEN,
    Prompt,
    encode_chat,
    encode_ids,
    encode_text,
)

MOST_DIGITS = 4_300  # the limit of pydantic and of Python's int()
_NUMBER = re.compile(r"([+-]?)([0-9]+)")
COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's default for /v1/completions, but not for chat


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request as the engine needs it.

    Attributes:
        max_tokens: None: as many as the context has room for.
        include_usage, continuous_usage: the options in `stream_options`.
    """

    chat: bool
    prompt: Prompt
    stream: bool
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    request_id: str | None


def read_json(data: bytes, content_type: str) -> dict[str, Any]:
    """Parse the body as an object (EngineApiError 400: not an object, with vLLM's message)."""
    if content_type != "application/json":
        raise bad_request(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        )
    if not data:
        raise invalid("missing", "", "Field required", "None")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise _json_error(data) from None
    if not isinstance(body, dict):
        raise invalid(
            "model_attributes_type", "", "Input should be a valid dictionary", shown(body)
        )
    return body


def read_call(body: dict[str, Any], *, chat: bool, served_name: str) -> Call:
    """Read a chat completion (`chat`) or completion body (EngineApiError 400 or 404: it is bad)."""
    # The prompt comes first, because vLLM reports its errors first.
    prompt = _truncated(_chat_prompt(body) if chat else _completion_prompt(body), body)
    check_model(body, served_name)
    # Fields that cannot work are rejected, with vLLM's message where it has one.
    stream = _boolean(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid(
            "model_attributes_type",
            "stream_options",
            "Input should be a valid dictionary",
            shown(options),
        )
    if options is not None and not stream:
        raise bad_value(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            "stream_options",
        )
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        value = float(temperature)
        raise bad_value(
            f"temperature must be non-negative, got {value}. "
            f"(parameter=temperature, value={value})",
            "temperature",
        )
    n = _whole_number_of(body, "n")
    if n not in (None, 1):
        raise bad_value(f"n must be 1 on the simulated engine, got {n}.", "n")
    most = _max_tokens(body, chat)
    # Fields that are left out have vLLM's defaults.
    options = options or {}
    return Call(
        chat=chat,
        prompt=prompt,
        stream=stream,
        max_tokens=most,
        min_tokens=_min_tokens(body, most),
        ignore_eos=_boolean(body, "ignore_eos"),
        include_usage=_boolean(options, "include_usage", "stream_options."),
        continuous_usage=_boolean(options, "continuous_usage_stats", "stream_options."),
        priority=_whole_number_of(body, "priority") or 0,
        cache_salt=_cache_salt_of(body),
        request_id=_string_of(body, "request_id"),
    )


def check_model(body: dict[str, Any], served_name: str) -> None:
    """Raise EngineApiError 404 for another model. A missing `model` is the served model."""
    model = _string_of(body, "model")
    if model is not None and model != served_name:
        raise EngineApiError(
            404,
            f"The model `{model}` does not exist. Valid aliases: {served_name}.",
            "NotFoundError",
            "model",
        )


def check_length(prompt: Prompt, context: int) -> None:
    """Raise EngineApiError 400 for a prompt that leaves no room for a token of output."""
    if prompt.tokens < context:
        return
    # vLLM stops tokenising one token past the limit and does not know the full length.
    seen = min(prompt.tokens, context + 1)
    raise bad_value(
        f"This model's maximum context length is {context} tokens. However, your prompt "
        f"contains at least {seen} input tokens, which exceeds this limit even without any "
        "output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={seen})",
        "input_tokens",
    )


def read_tokenize(body: dict[str, Any], served_name: str) -> Prompt:
    """Read the prompt of a /tokenize body, given as `prompt` or as `messages`."""
    check_model(body, served_name)
    return _chat_prompt(body) if "messages" in body else _completion_prompt(body)


def _json_error(data: bytes) -> EngineApiError:
    try:
        json.loads(data)
        where, why = 0, "not UTF-8 or beyond what JSON allows"
    except json.JSONDecodeError as error:
        where, why = error.pos, error.msg
    except (UnicodeDecodeError, RecursionError):
        where, why = 0, "not UTF-8 or nested too deeply"
    context = f", 'ctx': {{'error': '{why}'}}"
    return invalid("json_invalid", str(where), "JSON decode error", "<dict of 0 items>", context)


def _truncated(prompt: Prompt, body: dict[str, Any]) -> Prompt:
    """Keep the last `truncate_prompt_tokens` tokens, or the first if `truncation_side` is right."""
    count = _whole_number_of(body, "truncate_prompt_tokens")
    if count is None:
        return prompt
    if count < 1:
        raise bad_value(
            "truncate_prompt_tokens must be at least 1 on the simulated engine.",
            "truncate_prompt_tokens",
        )
    side = _string_of(body, "truncation_side") or "left"
    if side not in ("left", "right"):
        raise bad_value(
            "`truncation_side` must be either 'left' or 'right'. "
            f"(parameter=truncation_side, value={side})",
            "truncation_side",
        )
    size = count * BYTES_PER_TOKEN
    data = prompt.data[-size:] if side == "left" else prompt.data[:size]
    return Prompt(data, prompt.text)


def _chat_prompt(body: dict[str, Any]) -> Prompt:
    """Read `messages`. The prompt ends with the mark of the assistant's turn."""
    if "messages" not in body:
        raise invalid("missing", "messages", "Field required", shown(body))
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise invalid("list_type", "messages", "Input should be a valid list", shown(messages))
    read = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("missing", f"messages.{index}.role", "Field required", shown(message))
        read.append((message["role"], _content(message.get("content"), index)))
    return encode_chat(read)


def _content(content: Any, index: int) -> str:
    if content is None:  # an assistant's turn that called tools
        return ""
    if isinstance(content, str):
        return content
    where = f"messages.{index}.content"
    if not isinstance(content, list):
        raise invalid("string_type", where, "Input should be a valid string", shown(content))
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise bad_value("Only text parts are served by the simulated engine.", "messages")
        texts.append(text)
    return "\n".join(texts)


def _completion_prompt(body: dict[str, Any]) -> Prompt:
    """Read `prompt`: a text or token ids, or a list with one of these."""
    if "prompt" not in body:
        raise invalid("missing", "prompt", "Field required", shown(body))
    prompt = body["prompt"]
    if prompt == []:
        raise bad_value("You must pass at least one prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise bad_value("The simulated engine answers one prompt a request.", "prompt")
        prompt = prompt[0]
    encoded = _prompt(prompt)
    if not encoded.tokens:
        raise bad_value("The decoder prompt cannot be empty", "prompt")
    return encoded


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        encoded = encode_text(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        try:
            encoded = encode_ids(prompt)
        except ValueError:
            raise bad_value("Token id out of vocabulary: 0 to 4294967295.", "prompt") from None
    else:
        raise invalid("string_type", "prompt", "Input should be a valid string", shown(prompt))
    return encoded


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    name = "max_tokens"
    if chat and body.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    value = _whole_number_of(body, name)
    if value is not None and value < 1:
        raise bad_value(
            f"max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})",
            "max_tokens",
        )
    return value if value is not None or chat else COMPLETION_DEFAULT_TOKENS


def _min_tokens(body: dict[str, Any], most: int | None) -> int:
    fewest = _whole_number_of(body, "min_tokens") or 0
    if most is not None and fewest > most:
        raise bad_value(
            f"min_tokens must be less than or equal to max_tokens={most}, got {fewest}."
        )
    return fewest


def _cache_salt_of(body: dict[str, Any]) -> str | None:
    """Return `cache_salt` (EngineApiError 400: it is empty or no text)."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise bad_value(
            "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"
        )
    return salt


def _whole_number_of(body: dict[str, Any], name: str) -> int | None:
    """Return a field as vLLM's schemas read a whole number (EngineApiError 400: another kind)."""
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        number = _NUMBER.fullmatch(value.strip())
        if number is None:
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid("int_parsing", name, message, value)
        digits = number[2].lstrip("0") or "0"
        if len(digits) > MOST_DIGITS:
            message = "Unable to parse input string as an integer, exceeded maximum size"
            raise invalid("int_parsing_size", name, message, value)
        return int(number[1] + digits)
    raise invalid("int_type", name, "Input should be a valid integer", shown(value))


def _boolean(body: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid("bool_type", prefix + name, "Input should be a valid boolean", shown(value))


def _string_of(body: dict[str, Any], name: str) -> str | None:
    """Return a field that has to be a text (EngineApiError 400: another kind)."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value
    raise invalid("string_type", name, "Input should be a valid string", shown(value))
