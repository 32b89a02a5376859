"""Read the fields of a trace record from the body of an OpenAI request and its answer."""

from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.traces.formats.table import ReadOptions
from forebay.traces.formats.usage import whole_usage
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.reader import Ended
from forebay.traces.rows import RowError, SourceRow, decoded, shown
from forebay.traces.text import messages_text

ID_BLOCK_TOKENS = 16
"""Tokens of a block made from a prompt of token ids: vLLM's default."""
DURATIONS = (("latency_ms", "ms"), ("duration_ms", "ms"), ("latency_s", "s"), ("duration_s", "s"))
CHARACTERS_PER_TOKEN = 4
CONTRADICTION = 100  # a prompt and its count that differ by more are not of one request
_TAKEN = frozenset(
    ("messages", "prompt", "input", "tools", "model", "stream", "max_tokens", "user",
     "max_completion_tokens", "max_output_tokens", "min_tokens", "ignore_eos", "stream_options",
     "metadata", "system", "timestamp", "session_id", "output_length", "input_length", "delay",
     "message_mode", "extra", "custom_id")
)  # fmt: skip


def of_body(body: Mapping[str, Any], options: ReadOptions) -> dict[str, Any]:
    """Return the fields of a `TraceRequest` from the body of any OpenAI endpoint.

    `output_tokens` is among them if the body has a limit. Other fields become `parameters`.

    Raises:
        RowError: a field has another type than in the API.
    """
    fields = _prompt(body)
    if tools := body.get("tools"):
        fields["tools"] = _tools(tools)
    for key, name in (("model", "model"), ("user", "tenant")):
        if isinstance(body.get(key), str) and body[key]:
            fields[name] = body[key]
    if "stream" in body:
        fields["stream"] = bool(body["stream"])
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if type(body.get(key)) is int and body[key] > 0:
            fields["output_tokens"] = body[key]
            break
    rest = {key: value for key, value in body.items() if key not in _TAKEN and value is not None}
    if rest:
        fields["parameters"] = rest
    return fields


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools: {shown(tools)} is not a list of objects")
    return tuple(tools)


def _prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    text = body.get("prompt", body.get("input"))
    if messages is None and isinstance(text, list) and text and isinstance(text[0], dict):
        messages, text = text, None  # the responses API
    if messages is not None:
        chat = message_list(messages)
        if isinstance(body.get("system"), str):  # Anthropic's API
            chat = ({"role": "system", "content": body["system"]}, *chat)
        return {"messages": chat}
    if isinstance(text, str):
        return {"text": text}
    return _of_list(text) if isinstance(text, list) and text else {}


def _of_list(prompt: list[Any]) -> dict[str, Any]:
    if all(isinstance(part, str) for part in prompt):
        if len(prompt) > 1:
            raise RowError(f"prompt: {len(prompt)} prompts in one request; split them into rows")
        return {"text": prompt[0]}
    if all(type(token) is int for token in prompt):
        return {
            "blocks": token_blocks(prompt),
            "block_tokens": ID_BLOCK_TOKENS,
            "input_tokens": len(prompt),
        }
    raise RowError(f"prompt: {shown(prompt)} is neither text nor a list of token ids")


def token_blocks(ids: list[int]) -> tuple[int, ...]:
    """Make prefix-chained block ids of a prompt of token ids."""
    chain, blocks = 0, []
    for start in range(0, len(ids), ID_BLOCK_TOKENS):
        piece = ",".join(map(str, ids[start : start + ID_BLOCK_TOKENS]))
        chain = xxh3_64_intdigest(piece.encode(), chain)
        blocks.append(chain)
    return tuple(blocks)


def message_list(messages: Any) -> tuple[dict[str, Any], ...]:
    """Check that `messages` are objects with a role."""
    messages = decoded(messages)
    if not isinstance(messages, list) or not messages:
        raise RowError(f"messages: {shown(messages)} is not a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"messages: {shown(message)} is not an object with a role")
    return tuple(messages)


def text_tokens(text: str, options: ReadOptions) -> int:
    """Count the tokens of `text`, at least 1."""
    return max(1, options.counter.count(text))


def prompt_tokens(fields: Mapping[str, Any], options: ReadOptions) -> int | None:
    """Count the tokens of the prompt in `fields`, or return None without a prompt."""
    if "input_tokens" in fields:
        return int(fields["input_tokens"])
    if "messages" in fields:
        return text_tokens(messages_text(fields["messages"]), options)
    return text_tokens(fields["text"], options) if "text" in fields else None


def answer_tokens(answer: Any, options: ReadOptions, counted: int | None = None) -> int | None:
    """Return the tokens of an answer from its usage, else count its text. None without both.

    The tokens that a row has `counted` come first. An HTML page, which a gateway sends when the
    server is down, counts as 0 tokens.
    """
    if counted is not None:
        return counted
    answer = decoded(answer)
    if isinstance(answer, str):
        return 0 if is_html(answer) else options.counter.count(answer)
    if not isinstance(answer, dict):
        return None
    usage = answer.get("usage")
    if isinstance(usage, dict) and (reported := whole_usage(usage).answer) is not None:
        return reported
    text = answer.get("content")
    for choice in answer.get("choices") or ():
        if isinstance(choice, dict):
            message = choice.get("message")
            text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return options.counter.count(text) if isinstance(text, str) else None


def is_html(text: str) -> bool:
    return text.lstrip()[:15].lower().startswith(("<html", "<!doctype html", "<head"))


def build(
    row: SourceRow,
    fields: dict[str, Any],
    options: ReadOptions,
    *,
    name: str,
    arrival_s: float,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
) -> TraceRequest:
    """Make the request of a log row. Missing lengths are from the text or the options.

    Many logs have no prompt length of a rejected or failed request. It is still an arrival, and
    gets the length of the row before it.

    Raises:
        RowError: a length is missing. The message says how to give it.
    """
    # The prompt: its logged length, else its text, else an option.
    fields = {key: value for key, value in fields.items() if value is not None}
    failed = fields.get("status", 200) >= 400
    _refuse_contradiction(fields.get("text"), input_tokens)
    length = input_tokens or prompt_tokens(fields, options) or options.input_tokens
    if length is None and failed:
        length = row.facts.last_input_tokens
        row.note("failed requests without a prompt length, which got that of the row before")
    if length is None:
        raise RowError(
            "no number of input tokens and no prompt; log them, or give --input-tokens for all rows"
        )
    # The answer: its logged length, else the limit in the body, else an option.
    outputs = (output_tokens, fields.get("output_tokens"), options.output_tokens)
    output = next((tokens for tokens in outputs if tokens is not None), 0 if failed else None)
    if output is None:
        raise RowError(
            "no number of output tokens, answer or limit; log them, or give --output-tokens for "
            "all rows"
        )
    row.facts.last_input_tokens = length
    if "blocks" in fields and length != fields.get("input_tokens"):
        del fields["blocks"], fields["block_tokens"]  # ids for another number of tokens
    fields |= {"input_tokens": length, "output_tokens": output}
    return TraceRequest(id=name, arrival_s=arrival_s, **fields)


def _refuse_contradiction(text: Any, tokens: int | None) -> None:
    """Raise RowError if a prompt's length and its count differ a hundredfold."""
    if not isinstance(text, str) or not tokens:
        return
    about = max(1, len(text) // CHARACTERS_PER_TOKEN)
    if max(about, tokens) > CONTRADICTION * min(about, tokens):
        raise RowError(
            f"the prompt has {len(text):,} characters, and its count says {tokens:,} tokens; one "
            "of the two columns is another: map the right one with --map"
        )


def ended(row: SourceRow, request: TraceRequest, ends: tuple[str, ...]) -> Ended:
    """Add the end of the answer: the first of the columns `ends`, or start and duration."""
    for column in ends:
        if row.get(column) is not None:
            return Ended(request, row.moment(column))
    for column, unit in DURATIONS:
        if row.get(column) is not None:
            return Ended(request, request.arrival_s + row.seconds(column, unit=unit))
    return Ended(request, None)
