"""Recognise requests that are more than a prefill of text: grammars, batches, prompt logprobs."""

from typing import Any

_IMPURE = frozenset((
    # An engine compiles a grammar before the first token.
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "tool_choice",
    "echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "suffix",
    "prompt_embeds", "kv_transfer_params",
))  # fmt: skip
"""Fields by which an engine may do more than prefill before the first token."""


def is_pure(fields: dict[str, Any]) -> bool:
    """True if an engine does nothing before the first token but prefill the text.

    A model with tools answers freely unless it must call a tool: vLLM compiles no grammar for
    `auto`.
    """
    if _IMPURE.isdisjoint(fields):
        return True
    format_ = fields.get("response_format")
    free = (
        {"response_format"} if isinstance(format_, dict) and format_.get("type") == "text" else ()
    )
    values = [fields.get(name) for name in _IMPURE.difference(free, ("tool_choice",))]
    # The number 0 counts, too: prompt_logprobs.
    return not (must_call(fields) or any(value or type(value) is int for value in values))


def wants_logprobs_of_prompt(fields: dict[str, Any], echoed: Any) -> bool:
    """True if vLLM must compute the whole prompt, as its cache holds no logprobs.

    Args:
        echoed: the number of logprobs that `echo` wants of each prompt token, None for no logprobs.
    """
    echoes = bool(fields.get("echo")) and echoed is not None
    return echoes or fields.get("prompt_logprobs") is not None


def must_call(fields: dict[str, Any]) -> bool:
    """True if the answer must be a call of a tool, which a grammar ensures."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        choice = choice.get("type")
    return bool(fields.get("tools")) and choice not in (None, "none", "auto")


def has_schema(fields: dict[str, Any]) -> bool:
    """True if a request to /v1/responses or /v1/messages wants its answer in a format."""
    for name in ("text", "output_config"):
        holder = fields.get(name)
        format_ = holder.get("format") if isinstance(holder, dict) else None
        if isinstance(format_, dict) and format_.get("type") != "text":
            return True
    return False
