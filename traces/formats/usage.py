"""Turn a usage object of any API or tracing tool into the whole prompt and the whole answer.

Some APIs name the whole: OpenAI's `prompt_tokens` include `cached_tokens`. Others name parts that
add up: Anthropic's `input_tokens` and Langfuse's `input` are the tokens that were not cached. If
the usage has a total, the total decides. A part that is larger than the whole decides, too. Else
the names decide.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from forebay.traces.rows import FileFacts, SourceRow, is_missing

PREFIXES: Final = ("gen_ai.usage.", "gen_ai.response.", "llm.usage.", "llm.token_count.")
PROMPTS: Final = (
    *("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "promptTokenCount"),
    *("inputTokenCount", "prompt_token_count", "input", "prompt", "prompt_eval_count"),
)
ANSWERS: Final = (
    *("completion_tokens", "output_tokens", "completionTokens", "outputTokens"),
    *("candidatesTokenCount", "outputTokenCount", "candidates_token_count", "output"),
    *("completion", "eval_count"),
)
TOTALS: Final = ("total_tokens", "totalTokens", "totalTokenCount", "total_token_count", "total")
BARE: Final = frozenset({"input", "output", "prompt", "completion", "total"})
"""Names of counts in a usage object. In a row they name texts or money."""
ADD_UP: Final = frozenset({"input", "output", "candidatesTokenCount", "candidates_token_count"})
"""Names of parts in Langfuse and Gemini, to which the other parts are added."""
PARTS_OF_PROMPT: Final = ("input_tokens", "inputTokens", "input")
"""Names of the uncached tokens, if the usage also has a name that matches `EXCLUDED`."""
CACHED: Final = re.compile(r"cach(?!e.*miss)|^input_", re.IGNORECASE)
REASONING: Final = re.compile(r"reasoning|thought|^output_", re.IGNORECASE)
NOT_COUNTS: Final = re.compile(r"details|cost|price|ephemeral|rate|ttl", re.IGNORECASE)
# Names of Anthropic, Bedrock and Claude Code, for tokens that `input_tokens` do not include.
EXCLUDED: Final = re.compile(
    r"cache_?(read|creation|write)_?(input_?)?tokens?(count)?", re.IGNORECASE
)
OWN_PARTS: Final = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")  # Gemini
DOES_NOT_ADD_UP: Final = "usages whose parts do not add up to their total"


class WholeUsage(NamedTuple):
    """Tokens of a whole prompt and a whole answer, None if the usage does not have them.

    `adds_up` is False if the total differs from every possible sum of the parts.
    """

    prompt: int | None
    answer: int | None
    adds_up: bool = True


def whole_usage(usage: Mapping[str, Any], *, flat: bool = False) -> WholeUsage:
    """Add up a usage object. With `flat` it is a row that has further columns.

    Raises:
        RowError: a count is not a whole number of 0 or more.
    """
    # Sort the counts into prompt, answer, total and parts.
    counts = SourceRow(1, _counts(usage, flat), FileFacts())
    prompt, prompt_name = _first(counts, PROMPTS)
    answer, answer_name = _first(counts, ANSWERS)
    total, _ = _first(counts, TOTALS)
    parts = _parts(counts.values)
    cached = {name: count for name, count in parts.items() if CACHED.search(name)}
    thought = sum(count for name, count in parts.items() if REASONING.search(name))
    if prompt is not None:
        prompt += sum(counts.whole(part) for part in OWN_PARTS if part in counts.values)
    # Decide by the names if cached tokens are to be added to the prompt.
    added = prompt_name in ADD_UP or (
        prompt_name in PARTS_OF_PROMPT
        and f"gen_ai.usage.{prompt_name}" not in usage  # OpenTelemetry's is the whole prompt
        and any(map(EXCLUDED.fullmatch, cached))
    )
    prompts = _readings(prompt, sum(cached.values()), added=added)
    answers = _readings(answer, thought, added=answer_name in ADD_UP)
    return _decided(prompts, answers, total)


def _decided(prompts: list[int | None], answers: list[int | None], total: int | None) -> WholeUsage:
    """Choose the readings whose sum is the total, else the likeliest readings."""
    likeliest = WholeUsage(prompts[0], answers[0])
    if not total or likeliest.prompt is None or likeliest.answer is None:
        return likeliest
    pairs = (WholeUsage(prompt, answer) for prompt in prompts for answer in answers)
    sums = (pair for pair in pairs if (pair.prompt or 0) + (pair.answer or 0) == total)
    return next(sums, likeliest._replace(adds_up=False))


def usage_of(row: SourceRow, *places: str, flat: bool = True) -> WholeUsage:
    """Read the first usage object among `places`, or else the row. Note a wrong total."""
    usage = next((usage for usage in map(row.object, places) if usage), {})
    whole = whole_usage(usage)
    if flat and whole.prompt is None and whole.answer is None:
        whole = whole_usage(row.values, flat=True)
    if not whole.adds_up:
        row.note(DOES_NOT_ADD_UP)
    return whole


def _counts(usage: Mapping[str, Any], flat: bool) -> dict[str, Any]:
    """Return the numbers of a usage by name, without the prefixes of span attributes."""
    counts: dict[str, Any] = {}
    for key, value in usage.items():
        name = str(key)
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if is_missing(value) or isinstance(value, dict | list):
            continue
        if flat and (key in BARE or not _is_known(name)):
            continue
        counts.setdefault(name, value)
    return counts


def _is_known(name: str) -> bool:
    """True if a column has the name of a token count."""
    if name in (*PROMPTS, *ANSWERS, *TOTALS, *OWN_PARTS):
        return True
    lower = name.lower()
    return "token" in lower and any(word in lower for word in ("cach", "reasoning", "thought"))


def _parts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts other than prompt, answer and total."""
    whole = (*PROMPTS, *ANSWERS, *TOTALS, *OWN_PARTS)
    parts: dict[str, int] = {}
    for name, value in counts.items():
        if name in whole or NOT_COUNTS.search(name):
            continue
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int or (type(value) is str and value.isdecimal() and len(value) < 12):
            parts[name] = max(int(value), 0)
    return parts


def _first(counts: SourceRow, names: tuple[str, ...]) -> tuple[int | None, str]:
    name = next((candidate for candidate in names if candidate in counts.values), "")
    return (counts.whole(name), name) if name else (None, "")


def _readings(whole: int | None, parts: int, *, added: bool) -> list[int | None]:
    """List the possible values of a count with or without its `parts`, the likeliest first."""
    if whole is None or not parts:
        return [whole]
    if parts > whole:
        return [whole + parts]
    return [whole + parts, whole] if added else [whole, whole + parts]
