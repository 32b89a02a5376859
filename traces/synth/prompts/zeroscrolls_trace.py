"""Make a trace from ZeroSCROLLS samples, in a chosen order at chosen times.

The order matters more to prefix caching than the rate, so it is an option with a seed. A prompt has
the chat or the completions form, and is cut to a context length: the end of the document is cut
off, so that the shared prefix stays shared.
Source of the prompts: experiments/api of tau-nlp/zero_scrolls.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

import orjson

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.arrivals import arrival_times
from forebay.traces.synth.prompts.zeroscrolls import TASKS, ZeroScrollsSample, by_document
from forebay.traces.tokens import TokenCounter

ORDERS = ("file", "grouped", "shuffled", "zipf")
NO_EXPLANATION = " Do not provide any explanation."
FORMS = ("completions", "chat")


def ordered(
    samples: Sequence[ZeroScrollsSample], order: str, *, seed: int, zipf_s: float = 0.8
) -> list[ZeroScrollsSample]:
    """Put the samples into one of four orders, each sample once.

    `file`: as read. `grouped`: all samples of a document together, by first appearance.
    `shuffled`: at random. `zipf`: documents get a random order of popularity. Each step draws a
    document with unused questions by Zipf(s), and takes its next question in file order.
    """
    if order not in ORDERS:
        raise InputError(f"--order {order}: not an order; one of: {', '.join(ORDERS)}")
    if order == "file":
        return list(samples)
    dice = Random(f"{seed}:order")
    if order == "shuffled":
        return dice.sample(samples, len(samples))
    groups = list(by_document(samples).values())
    if order == "grouped":
        return [sample for group in groups for sample in group]
    if not 0 <= zipf_s <= 10:
        raise InputError(f"--zipf {zipf_s:g}: give an exponent from 0 (even) to 10")
    dice.shuffle(groups)
    left = [(list(reversed(group)), (rank + 1) ** -zipf_s) for rank, group in enumerate(groups)]
    result: list[ZeroScrollsSample] = []
    while left:  # quadratic in the documents of a task, which are at most 500
        sums = list(accumulate(weight for _, weight in left))
        place = min(bisect_right(sums, dice.random() * sums[-1]), len(sums) - 1)
        group = left[place][0]
        result.append(group.pop())
        if not group:
            del left[place]
    return result


def to_trace(
    samples: Sequence[ZeroScrollsSample],
    counter: TokenCounter,
    *,
    form: str = "completions",
    context_tokens: int | None = None,
    arrivals: str = "poisson",
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Make one request for each sample, in this order, with the id `TASK/ID`.

    `document` is the first 16 hex digits of the sha256 of the whole document.
    """
    times = arrival_times(arrivals, rate_per_s, seed)

    def requests() -> Iterator[TraceRequest]:
        for sample, arrival_s in zip(samples, times, strict=False):  # the times never end
            max_new_tokens = TASKS[sample.task].max_new_tokens
            shaped = prompt_form(sample, form)
            text = shaped.input
            if context_tokens is not None:
                text = truncated_prompt(shaped, counter, context_tokens, max_new_tokens)
            yield TraceRequest(
                id=request_id(sample),
                arrival_s=arrival_s,
                input_tokens=max(counter.count(text), 1),
                output_tokens=max_new_tokens,
                text=text,
                document=sample.document_sha256()[:16],
            )

    return requests()


def has_references(samples: Sequence[ZeroScrollsSample]) -> bool:
    """True if any sample has reference answers. The test split has no answers."""
    return any(sample.outputs for sample in samples)


def reference_lines(samples: Sequence[ZeroScrollsSample]) -> Iterator[bytes]:
    """Yield a line of reference answers for each sample, with the id of its request."""
    for sample in samples:
        line = {"id": request_id(sample), "references": sample.outputs}
        yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def request_id(sample: ZeroScrollsSample) -> str:
    return f"{sample.task}/{sample.id}"


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
