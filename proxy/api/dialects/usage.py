"""Read the token counts of a response, in each form in which vLLM's APIs report them."""

MOST_TOKENS = 1 << 24  # tokens of a prompt or output. A row of a capture has a number for each 512.
_INPUT = "input_tokens", "input_tokens_details", "output_tokens"
_PROMPT = "prompt_tokens", "prompt_tokens_details", "completion_tokens"


def usage_tokens(usage: object) -> tuple[int, int | None, int]:
    """Return the tokens of the prompt, its cached tokens (None: not reported), and output tokens.

    An implausible count is 0 or None. Chats and completions name them prompt and completion tokens,
    the other APIs input and output tokens. Anthropic's input tokens exclude tokens read from a
    cache or written to it. Where both are 0, vLLM may not report them.
    """
    if not isinstance(usage, dict):
        return 0, None, 0
    prompt, details, output = _INPUT if "input_tokens" in usage else _PROMPT
    prompt_tokens = _count(usage.get(prompt))
    if prompt_tokens is None:
        return 0, None, 0
    detailed = usage.get(details)
    cached = _count(detailed.get("cached_tokens")) if isinstance(detailed, dict) else None
    if prompt == "input_tokens":
        read = _count(usage.get("cache_read_input_tokens"))
        written = _count(usage.get("cache_creation_input_tokens"))
        if read or written:
            cached = read or 0
            prompt_tokens += cached + (written or 0)
    known_cached = None if cached is None else min(cached, prompt_tokens)
    return prompt_tokens, known_cached, _count(usage.get(output)) or 0


def _count(value: object) -> int | None:
    """Return a number of tokens, such as 8 or 8.0, or None for an implausible value."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else None
