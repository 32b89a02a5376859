"""Make needle-in-a-haystack prompts: a fact hidden in a long text, and questions about it.

Questions about one haystack differ only at the end, so they share nearly the whole prompt.
Haystacks of different depths share the text before the shallower needle. Haystacks of different
lengths share the text before the needle of the shorter haystack.

A trace record has no field for the expected answer. Answers are in a file next to the trace, one
JSON object a line with the request's id. `document` names the haystack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import orjson

from forebay.traces.ground.command_line.options import one_or_more
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import parse_object
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import RowError
from forebay.traces.synth.arrivals import arrival_times
from forebay.traces.text import block_text
from forebay.traces.tokens import TokenCounter

INSTRUCTION = (
    "Read the text below. One sentence in it gives a special number. Answer the question after the "
    "text with that number.\n\nText:\n"
)
_PLACES = ("Arnhem", "Bergen", "Cusco", "Dakar", "Esbjerg", "Fukuoka", "Galway", "Hobart")
_QUESTIONS = (
    "What is the special number of the sluice gate at {place}?",
    "The sluice gate at {place} has a special number. Which one?",
    "Which special number opens the sluice gate at {place}?",
    "Tell me the special number of the {place} sluice gate.",
    "According to the text, what number belongs to the sluice gate at {place}?",
    "A keeper at {place} has forgotten the number of the sluice gate. What is it?",
    "State the number that the text gives for the {place} sluice gate.",
    "What number must be set at the sluice gate of {place}?",
)


@dataclass(frozen=True, slots=True)
class NeedleAnswer:
    """The expected answer to request `id`, with its question and the position of the needle."""

    id: str
    answer: str
    question: str
    haystack_tokens: int
    depth: float

    def found_in(self, output: str) -> bool:
        """True if `output` contains the number, with digits grouped in any way."""
        return self.answer in output.replace(",", "").replace(" ", "")


def load_haystack(paths: Sequence[str | Path]) -> str:
    """Read the `text` of every row of the .jsonl files, in order, with an empty line between them.

    Raises:
        InputError: an unreadable file, a row without text, or no text at all.
    """
    texts: list[str] = []
    for path in paths:
        with reading(path), open_input(str(path)) as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = parse_object(line).get("text") if line.strip() else ""
                    if type(text) is not str:
                        raise RowError('no string under "text"; give {"doc_id", "text"} rows')
                except RowError as error:
                    raise InputError(f"{path}:{number}: {error}") from error
                if text:
                    texts.append(text)
    if not texts:
        raise InputError(f"{', '.join(map(str, paths))}: no text in the haystack; check the files")
    return "\n\n".join(texts)


def generated_haystack(tokens: int, seed: int) -> str:
    """Make sentences of meaningless words, about `tokens` tokens, to use without a text."""
    words = block_text(0, tokens, f"haystack {seed}").decode("ascii").split()
    dice = Random(f"{seed}:haystack")
    sentences: list[str] = []
    start = 0
    while start < len(words):
        end = start + dice.randint(6, 16)
        sentences.append(" ".join(words[start:end]).capitalize() + ".")
        start = end
    return " ".join(sentences)


def needle_requests(
    haystack: str,
    counter: TokenCounter,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    questions: int = 1,
    output_tokens: int = 32,
    arrivals: str = "constant",
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> Iterator[tuple[TraceRequest, NeedleAnswer]]:
    """Make requests and their answers: for each length, each depth, each question, in that order.

    Args:
        lengths: prompt lengths in tokens, including instruction and question. A prompt may be a
            few tokens shorter.
        depths: places of the fact, from 0 (right after the instruction) to 1 (just before the
            question).

    Raises:
        InputError: a length, depth or count out of range, or a haystack that is too short.
    """
    if not lengths or not depths:
        raise InputError("--lengths and --depths: give at least one of each")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise InputError(f"--depths {depth:g}: give a share of the text from 0 to 1")
    one_or_more({"--questions": questions, "--output-tokens": output_tokens})
    available = counter.count(haystack)
    for length in lengths:
        if length < 256:
            raise InputError(
                f"--lengths {length}: too short for needle and question; give 256 or more"
            )
        if length > available:
            raise InputError(
                f"--lengths {length}: the haystack has {available} tokens ({counter.name}); "
                "give more text or shorter lengths"
            )
    times = arrival_times(arrivals, rate_per_s, seed)

    def requests() -> Iterator[tuple[TraceRequest, NeedleAnswer]]:
        for length in lengths:
            dice = Random(f"{seed}:needle:{length}")  # depths of one length hide the same needle
            place, number = dice.choice(_PLACES), str(dice.randrange(1_000_000, 10_000_000))
            needle = f" The special number of the sluice gate at {place} is {number}. "
            texts = [_question(index, place) for index in range(questions)]
            # All questions about a haystack follow the same text: leave room for the longest.
            ends = [f"\n\nQuestion: {question}\nAnswer:" for question in texts]
            budget = length - counter.count(INSTRUCTION + needle) - max(map(counter.count, ends))
            body = counter.head(haystack, budget)
            for depth in depths:
                text = INSTRUCTION + _hidden(body, needle, depth)
                for index, (question, end) in enumerate(zip(texts, ends, strict=True)):
                    name = f"needle-{length}-{depth:g}-{index}"
                    request = TraceRequest(
                        id=name,
                        arrival_s=next(times),
                        input_tokens=counter.count(text + end),
                        output_tokens=output_tokens,
                        text=text + end,
                        document=f"haystack-{length}-{depth:g}",
                    )
                    yield request, NeedleAnswer(name, number, question, length, depth)

    return requests()


def _question(index: int, place: str) -> str:
    question = _QUESTIONS[index % len(_QUESTIONS)].format(place=place)
    round_number = index // len(_QUESTIONS)  # when all eight are used, number the rounds
    return f"({round_number + 1}) {question}" if round_number else question


def _hidden(body: str, needle: str, depth: float) -> str:
    """Insert `needle` into `body` after the first sentence that ends at or after `depth`."""
    at = round(len(body) * depth)
    if 0 < at < len(body):
        end = body.find(". ", at)
        at = end + 1 if end >= 0 else at
    return body[:at] + needle + body[at:]


def answer_line(answer: NeedleAnswer) -> bytes:
    return orjson.dumps(asdict(answer), option=orjson.OPT_APPEND_NEWLINE)
