"""Make a trace from ZeroSCROLLS samples, in a chosen order at chosen times.

The order matters more to prefix caching than the rate, so it is an option with a seed.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

import orjson

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.arrivals import arrival_times
from forebay.traces.synth.prompts.zeroscrolls import TASKS, ZeroScrollsSample, by_document
from forebay.traces.synth.prompts.zeroscrolls_prompts import prompt_form, truncated_prompt
from forebay.traces.tokens import TokenCounter

ORDERS = ("file", "grouped", "shuffled", "zipf")


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
    return _rows(samples, counter, form, context_tokens, times)


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


def _rows(
    samples: Sequence[ZeroScrollsSample],
    counter: TokenCounter,
    form: str,
    context_tokens: int | None,
    times: Iterator[float],
) -> Iterator[TraceRequest]:
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
