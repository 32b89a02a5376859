"""Read the bodies of embeddings, rerankings and scores.

vLLM checks a body against several schemas and lists the errors of all. Here one is reported, with
the same status and type.
"""

from dataclasses import dataclass
from typing import Any, Literal

from forebay.replay.engine.server.api_errors import EngineApiError, bad_value, invalid, shown
from forebay.replay.engine.server.protocol import (
    cache_salt_of,
    chat_prompt,
    check_length,
    prompts_of,
    string_of,
    truncated,
    whole_number_of,
)
from forebay.replay.engine.tokenizer import Prompt, encode_text

Convert = Literal["embed", "classify"]
FORMATS = ("float", "base64", "bytes", "bytes_only")
ENDS = {"native": "<", "little": "<", "big": ">"}
NUMBERS = {"float32": "f", "float16": "e"}
"""Kinds of numbers in bytes and base64, with the codes of `struct`."""
SCORED = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""Pairs of fields that /score takes, in vLLM's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """A request whose prompts are pooled.

    Attributes:
        prompts: each is a request of its own in the engine.
        served_name: the model's name in the answer.
    """

    prompts: tuple[Prompt, ...]
    served_name: str
    priority: int
    cache_salt: str | None
    request_id: str | None

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts, which usage reports."""
        return sum(prompt.tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall(Pooled):
    """A request for embeddings.

    Attributes:
        form: the encoding_format.
        code: format of a vector in base64 and bytes, for `struct`, with %d for its length.
        number, end: the same, under vLLM's names.
    """

    form: str
    code: str
    number: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall(Pooled):
    """A request for scores or a reranking.

    Attributes:
        pairs: the prompts of each pair that is scored.
        documents: the texts that are ranked. Empty for scores.
        top_n: most documents in the answer. 0: all.
    """

    pairs: tuple[tuple[Prompt, Prompt], ...]
    documents: tuple[str, ...] = ()
    top_n: int = 0


def read_embeddings(body: dict[str, Any], *, served_name: str, context: int) -> EmbeddingCall:
    """Read a body of /v1/embeddings (EngineApiError 400 or 404: a bad body)."""
    if "normalize" in body:
        raise bad_value(
            "Parameter `normalize` was removed; use `use_activation` instead. "
            "(parameter=normalize)",
            "normalize",
        )
    prompts = _embedded(body)
    form = _choice(body, "encoding_format", FORMATS)
    number = _choice(body, "embed_dtype", tuple(NUMBERS))
    end = _choice(body, "endianness", tuple(ENDS))
    _check_model(body, served_name)
    if (dimensions := whole_number_of(body, "dimensions")) is not None:
        raise bad_value(
            f"Model '{served_name}' does not support Matryoshka embeddings; dimensions must be "
            f"unset (received dimensions={dimensions})."
        )
    return EmbeddingCall(
        prompts=_fitting(prompts, body, context),
        form=form,
        code=f"{ENDS[end]}%d{NUMBERS[number]}",
        number=number,
        end=end,
        **_common(body, served_name),
    )


def read_score(
    body: dict[str, Any], *, served_name: str, context: int, convert: Convert
) -> ScoreCall:
    """Read a body of /score (EngineApiError 400 or 404: a bad body)."""
    pairs = [names for names in SCORED if all(name in body for name in names)]
    if not pairs:
        missing = next(name for names in SCORED for name in names if name not in body)
        raise invalid("missing", missing, "Field required", shown(body))
    first, second = pairs[0]
    texts = _texts(body, first), _texts(body, second)
    return _scored(texts, body, served_name=served_name, context=context, convert=convert)


def read_rerank(
    body: dict[str, Any], *, served_name: str, context: int, convert: Convert
) -> ScoreCall:
    """Read a body of /rerank (EngineApiError 400 or 404: a bad body)."""
    for needed in ("query", "documents"):
        if needed not in body:
            raise invalid("missing", needed, "Field required", shown(body))
    query = body["query"]
    if not isinstance(query, str | dict):
        raise invalid("string_type", "query", "Input should be a valid string", shown(query))
    top_n = whole_number_of(body, "top_n") or 0
    if top_n < 0:
        message = "Input should be greater than or equal to 0"
        raise invalid("greater_than_equal", "top_n", message, str(top_n), ", 'ctx': {'ge': 0}")
    texts = _texts(body, "query"), _texts(body, "documents")
    return _scored(
        texts, body, served_name=served_name, context=context, convert=convert, top_n=top_n
    )


def _scored(
    texts: tuple[list[str], list[str]],
    body: dict[str, Any],
    *,
    served_name: str,
    context: int,
    convert: Convert,
    top_n: int | None = None,
) -> ScoreCall:
    """Return the pairs of two lists of texts. `top_n` says that it is a reranking."""
    # The two lists must go together.
    _check_model(body, served_name)
    first, second = texts
    if len(first) > 1 and len(first) != len(second):
        raise bad_value("Input lengths must be either 1:1, 1:N or N:N")
    for name, part in (("text", first), ("text_pair", second)):
        if not part:
            raise bad_value(f"At least one {name} element must be given")
    # A classifier reads both texts of a pair as one prompt. Embeddings need each text once.
    ones, others = ([encode_text(text) for text in part] for part in (first, second))
    if convert == "classify":
        each = ones * len(others) if len(ones) == 1 else ones
        joined = [Prompt(a.data + b.data) for a, b in zip(each, others, strict=True)]
        prompts = _fitting(joined, body, context)
        pairs = tuple((prompt, prompt) for prompt in prompts)
    else:
        prompts = _fitting([*ones, *others], body, context)
        ones, others = list(prompts[: len(ones)]), list(prompts[len(ones) :])
        each = ones * len(others) if len(ones) == 1 else ones
        pairs = tuple(zip(each, others, strict=True))
    # A reranking repeats the documents.
    documents = () if top_n is None else tuple(second)
    return ScoreCall(
        prompts=prompts,
        pairs=pairs,
        documents=documents,
        top_n=top_n or 0,
        **_common(body, served_name),
    )


def _embedded(body: dict[str, Any]) -> list[Prompt]:
    """Return the prompts of `input`, or of the chats in `messages` or `input`."""
    name = "messages" if "messages" in body else "input"
    value = body.get(name)
    if isinstance(value, list) and value:
        if _is_chat(value):
            return [chat_prompt({"messages": value}, answered=False)]
        if all(map(_is_chat, value)):
            return [chat_prompt({"messages": chat}, answered=False) for chat in value]
    if name == "messages":
        return [chat_prompt(body, answered=False)]
    return prompts_of(body, "input")


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and isinstance(part.get("role"), str) for part in value)
    )


def _texts(body: dict[str, Any], name: str) -> list[str]:
    value = body[name]
    texts = value if isinstance(value, list) else [value]
    for index, text in enumerate(texts):
        if isinstance(text, dict):
            raise bad_value("MultiModalParam is not supported for the simulated model")
        if not isinstance(text, str):
            where = f"{name}.{index}" if value is texts else name
            raise invalid("string_type", where, "Input should be a valid string", shown(text))
    return texts


def _choice(body: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    """Return one of `values`, the first by default."""
    value = string_of(body, name)
    if value is None:
        return values[0]
    if value not in values:
        choices = f"{', '.join(repr(each) for each in values[:-1])} or {values[-1]!r}"
        raise invalid("literal_error", name, f"Input should be {choices}", value)
    return value


def _check_model(body: dict[str, Any], served_name: str) -> None:
    """Raise EngineApiError 404 for another model, in the words of these paths."""
    model = string_of(body, "model")
    if model is not None and model != served_name:
        raise EngineApiError(404, f"The model `{model}` does not exist.", "NotFoundError")


def _fitting(prompts: list[Prompt], body: dict[str, Any], context: int) -> tuple[Prompt, ...]:
    """Cut the prompts as asked, and check that the context holds each."""
    count = whole_number_of(body, "truncate_prompt_tokens")
    if count is not None and count > context:
        raise bad_value(
            "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller "
            "truncation size."
        )
    if count == -1:
        body = {**body, "truncate_prompt_tokens": context}
    cut = tuple(truncated(prompt, body) for prompt in prompts)
    for prompt in cut:
        if not prompt.tokens:
            raise bad_value("The decoder prompt cannot be empty")
        check_length(prompt, context, answered=False)
    return cut


def _common(body: dict[str, Any], served_name: str) -> dict[str, Any]:
    return {
        "served_name": served_name,
        "priority": whole_number_of(body, "priority") or 0,
        "cache_salt": cache_salt_of(body),
        "request_id": string_of(body, "request_id"),
    }
