"""Make the prompt of a ZeroSCROLLS sample: chat or completions form, cut to a context length.

The end of the document is cut off, so that the shared prefix stays shared.
Source: experiments/api of tau-nlp/zero_scrolls.
"""

from dataclasses import replace

from forebay.traces.ground.errors import InputError
from forebay.traces.synth.prompts.zeroscrolls import TASKS, ZeroScrollsSample
from forebay.traces.tokens import TokenCounter

NO_EXPLANATION = " Do not provide any explanation."
FORMS = ("completions", "chat")


def prompt_form(sample: ZeroScrollsSample, form: str) -> ZeroScrollsSample:
    """Adapt the input of `sample`, and its indices, to the endpoint.

    Completions: unchanged. Chat: up to the end of the query, because the response header
    ("Answer:") is only for text completion. The first paragraph of six tasks asks for no
    explanation.
    """
    if form == "completions":
        return sample
    if form != "chat":
        raise InputError(f"--form {form}: not a form; one of: {', '.join(FORMS)}")
    if not TASKS[sample.task].summary:
        sample = _without_explanation(sample)
    return replace(sample, input=sample.input[: sample.query_end])


def _without_explanation(sample: ZeroScrollsSample) -> ZeroScrollsSample:
    at = sample.input.find("\n\n")
    if at < 0:
        at = sample.document_start
    added = len(NO_EXPLANATION)

    def moved(index: int) -> int:
        return index + added if index >= at else index

    # Unlike the official code, this moves the inner documents, too.
    return replace(
        sample,
        input=sample.input[:at] + NO_EXPLANATION + sample.input[at:],
        document_start=moved(sample.document_start),
        document_end=moved(sample.document_end),
        query_start=moved(sample.query_start),
        query_end=moved(sample.query_end),
        inner_starts=tuple(moved(index) for index in sample.inner_starts),
    )


def truncated_prompt(
    sample: ZeroScrollsSample, counter: TokenCounter, context_tokens: int, max_new_tokens: int
) -> str:
    """Cut the input of `sample` so that it and `max_new_tokens` fit in `context_tokens`.

    The result is the beginning (whole tokens), the separator, and everything from the query on.

    Raises:
        InputError: not even the query fits.
    """
    room = context_tokens - max_new_tokens
    if counter.count(sample.input) <= room:
        return sample.input
    suffix = sample.separator + sample.input[sample.query_start :]
    before = sample.input[: sample.query_start]
    budget = room - counter.count(suffix)
    while budget > 0:
        prompt = counter.head(before, budget) + suffix
        over = counter.count(prompt) - room
        if over <= 0:
            return prompt
        budget -= over  # tokens at the joint may differ from the tokens of the two parts
    raise InputError(
        f"{sample.task} {sample.id!r}: the query and {max_new_tokens} new tokens do not fit in "
        f"--context {context_tokens}; give a longer one"
    )
