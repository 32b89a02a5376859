"""Turn a usage object of any API or tracing tool into the whole prompt and the whole answer.

Some name the whole (`prompt_tokens` of OpenAI, of which `cached_tokens` are a part), others name
parts that add up (`input_tokens` of Anthropic is what was not cached, as `input` of Langfuse). The
total decides where there is one. A part cannot be larger than the whole, which decides further
cases. Else the names do.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from forebay.traces.rows import FileFacts, SourceRow

PREFIXES: Final = ("gen_ai.usage.", "llm.usage.", "llm.token_count.")
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
"""Names of counts in a usage object, but of texts or of money in a row."""
ADD_UP: Final = frozenset({"input", "output", "candidatesTokenCount", "candidates_token_count"})
"""Names of parts in Langfuse and Gemini: what else is there is beside them."""
PARTS_OF_PROMPT: Final = ("input_tokens", "inputTokens", "input")
"""Names of what was not cached, if names as in `BESIDE` stand beside them."""
CACHED: Final = re.compile(r"cach(?!e.*miss)|^input_", re.IGNORECASE)
REASONING: Final = re.compile(r"reasoning|thought|^output_", re.IGNORECASE)
NOT_COUNTS: Final = re.compile(r"details|cost|price|ephemeral|rate|ttl", re.IGNORECASE)
# Names of Anthropic, Bedrock and Claude Code: beside the prompt's `input_tokens`, not in them.
BESIDE: Final = re.compile(
    r"cache_?(read|creation|write)_?(input_?)?tokens?(count)?", re.IGNORECASE
)
OWN_PARTS: Final = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")  # Gemini
DOES_NOT_ADD_UP: Final = "usages whose parts do not add up to their total"


class WholeUsage(NamedTuple):
    """Tokens of a whole prompt and a whole answer, None if the usage does not tell.

    `adds_up` is False if there is a total that no reading of the parts gives.
    """

    prompt: int | None
    answer: int | None
    adds_up: bool = True


def whole_usage(usage: Mapping[str, Any], *, flat: bool = False) -> WholeUsage:
    """Add up a usage object; `flat` if it is a row that has further columns.

    Raises:
        RowError: a count is no whole number of 0 or more.
    """
    counts = SourceRow(1, _counts(usage, flat), FileFacts())
    prompt, prompt_name = _first(counts, PROMPTS)
    answer, answer_name = _first(counts, ANSWERS)
    total, _ = _first(counts, TOTALS)
    parts = _parts(counts.values)
    cached = {name: count for name, count in parts.items() if CACHED.search(name)}
    thought = sum(count for name, count in parts.items() if REASONING.search(name))
    if prompt is not None:
        prompt += sum(counts.whole(one) for one in OWN_PARTS if one in counts.values)
    added = prompt_name in ADD_UP or (
        prompt_name in PARTS_OF_PROMPT
        and f"gen_ai.usage.{prompt_name}" not in usage  # OpenTelemetry's is the whole prompt
        and any(map(BESIDE.fullmatch, cached))
    )
    prompts = _readings(prompt, sum(cached.values()), added=added)
    answers = _readings(answer, thought, added=answer_name in ADD_UP)
    return _decided(prompts, answers, total)


def _decided(prompts: list[int | None], answers: list[int | None], total: int | None) -> WholeUsage:
    """Choose the readings that give the total, else the likeliest ones."""
    if total and prompts[0] is not None and answers[0] is not None:
        for one in prompts:
            for other in answers:
                if (one or 0) + (other or 0) == total:
                    return WholeUsage(one, other)
        return WholeUsage(prompts[0], answers[0], adds_up=False)
    return WholeUsage(prompts[0], answers[0])


def usage_of(row: SourceRow, *places: str, flat: bool = True) -> WholeUsage:
    """Read the first usage object among `places`, or else the row; notes what does not add up."""
    found = next((one for one in map(row.object, places) if one), None)
    whole = WholeUsage(None, None)
    if found is not None:
        whole = whole_usage(found)
    if flat and whole.prompt is None and whole.answer is None:
        whole = whole_usage(row.values, flat=True)
    if not whole.adds_up:
        row.note(DOES_NOT_ADD_UP)
    return whole


def _counts(usage: Mapping[str, Any], flat: bool) -> dict[str, Any]:
    """Return the numbers of a usage by name, without the prefixes of span attributes."""
    found: dict[str, Any] = {}
    for key, value in usage.items():
        name = str(key)
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if value is None or value == "" or isinstance(value, dict | list):
            continue
        if flat and (key in BARE or not _is_known(name)):
            continue
        found.setdefault(name, value)
    return found


def _is_known(name: str) -> bool:
    """Tell a count from other columns of a row by its name."""
    if name in (*PROMPTS, *ANSWERS, *TOTALS, *OWN_PARTS):
        return True
    lower = name.lower()
    return "token" in lower and any(word in lower for word in ("cach", "reasoning", "thought"))


def _parts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts beside prompt, answer and total."""
    whole = (*PROMPTS, *ANSWERS, *TOTALS, *OWN_PARTS)
    found: dict[str, int] = {}
    for name, value in counts.items():
        if name in whole or NOT_COUNTS.search(name):
            continue
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int or (type(value) is str and value.isdecimal() and len(value) < 12):
            found[name] = max(int(value), 0)
    return found


def _first(counts: SourceRow, names: tuple[str, ...]) -> tuple[int | None, str]:
    name = next((one for one in names if one in counts.values), "")
    return (counts.whole(name), name) if name else (None, "")


def _readings(whole: int | None, parts: int, *, added: bool) -> list[int | None]:
    """List what a count may be with the parts beside it, the likeliest first."""
    if whole is None or not parts:
        return [whole]
    if parts > whole:
        return [whole + parts]
    return [whole + parts, whole] if added else [whole, whole + parts]
