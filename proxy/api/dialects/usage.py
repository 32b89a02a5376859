"""Read the token counts of a response, in each form in which vLLM's APIs report them."""

MOST_TOKENS = 1 << 24  # in a prompt or an output. A row of a capture has a number for each 512.


def usage_tokens(usage: object) -> tuple[int, int | None, int]:
    """Return the tokens of the prompt, its cached tokens (None: not reported), and output tokens.

    An implausible count is 0 or None. Chats and completions name them prompt and completion tokens,
    the other APIs input and output tokens. Anthropic's input tokens exclude tokens read from a
    cache or written to it. Where both are 0, vLLM may not report them.
    """
    if not isinstance(usage, dict):
        return 0, None, 0
    prompt, output = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    prompt_tokens = _count(usage.get(f"{prompt}_tokens"))
    if prompt_tokens is None:
        return 0, None, 0
    details = usage.get(f"{prompt}_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    read = _count(usage.get("cache_read_input_tokens"))
    written = _count(usage.get("cache_creation_input_tokens"))
    if read or written:
        cached = read or 0
        prompt_tokens += cached + (written or 0)
    known_cached = None if cached is None else min(cached, prompt_tokens)
    return prompt_tokens, known_cached, _count(usage.get(f"{output}_tokens")) or 0


def _count(value: object) -> int | None:
    """Return a number of tokens, such as 8 or 8.0, or None for an implausible value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else None
