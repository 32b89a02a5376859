"""Generate the traffic of a number of users: chats and questions about long documents.

Arrivals are open-loop: users who wait long do not ask less. This is the usual model of many users,
and gives higher load than a closed population.
"""

from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import Annotated

import typer

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.documents import Zipf
from forebay.traces.synth.lengths import (
    AZURE_CONV_INPUT,
    AZURE_CONV_OUTPUT,
    Fixed,
    Length,
    length_option,
)

CHAT, DOCUMENT = "chat", "document"
CLASSES = (CHAT, DOCUMENT)
SAMPLED = 2_000  # draws that represent a distribution of lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """A population of users, and the options of `forebay size` about it (InputError: bad values).

    Questions without a document are chats. A question that is not about a common document brings a
    document of its own. Arrival gaps are gamma distributed.
    """

    users: Annotated[int, typer.Option(help="How many people ask questions.")]
    document_tokens: Annotated[
        Length,
        length_option("--document-tokens", "Length of a document in tokens, or a distribution."),
    ]
    think_s: Annotated[
        float, typer.Option("--think", help="Mean seconds between two questions of a user.")
    ] = 60.0
    document_share: Annotated[
        float, typer.Option(help="Share of questions that carry a document.")
    ] = 0.3
    shared: Annotated[
        float, typer.Option(help="Share of document questions about common documents.")
    ] = 0.0
    documents: Annotated[int, typer.Option(help="Number of common documents.")] = 50
    zipf_s: Annotated[
        float, typer.Option("--zipf", help="Exponent of the documents' Zipf popularity; 0: even.")
    ] = 0.8
    cv: Annotated[
        float, typer.Option(help="Coefficient of variation of arrival gaps; 1: Poisson.")
    ] = 1.0
    question_tokens: Annotated[
        Length, length_option("--question-tokens", "Length of a question about a document.")
    ] = field(default=Fixed(64))
    document_output_tokens: Annotated[
        Length, length_option("--document-output-tokens", "Length of an answer about a document.")
    ] = field(default=Fixed(128))
    chat_tokens: Annotated[
        Length, length_option("--chat-tokens", "Length of a prompt without a document.")
    ] = AZURE_CONV_INPUT
    chat_output_tokens: Annotated[
        Length, length_option("--chat-output-tokens", "Length of an answer without a document.")
    ] = AZURE_CONV_OUTPUT

    def __post_init__(self) -> None:
        for option, count in (("--users", self.users), ("--documents", self.documents)):
            if count < 1:
                raise InputError(f"{option} {count}: give 1 or more")
        if not (isfinite(self.think_s) and self.think_s > 0):
            raise InputError(f"--think {self.think_s:g}: give seconds, more than 0")
        for option, share in (
            ("--document-share", self.document_share),
            ("--shared", self.shared),
        ):
            if not 0 <= share <= 1:
                raise InputError(f"{option} {share:g}: not a share; give 0 to 1")
        if not 0 <= self.zipf_s <= 10:
            raise InputError(f"--zipf {self.zipf_s:g}: give an exponent from 0 (even) to 10")
        if not 0.1 <= self.cv <= 20:
            raise InputError(f"--cv {self.cv:g}: give a coefficient of variation from 0.1 to 20")

    @property
    def rate_per_s(self) -> float:
        return self.users / self.think_s

    def rates_per_s(self) -> dict[str, float]:
        """Requests per second of each class, without empty classes."""
        documents = self.rate_per_s * self.document_share
        rates = {CHAT: self.rate_per_s - documents, DOCUMENT: documents}
        return {name: rate for name, rate in rates.items() if rate > 0}

    def requests(self, seed: int, duration_s: float) -> list[TraceRequest]:
        """All arrivals within `duration_s`, in order.

        The mean rate and the shares of the kinds are exact over the whole duration: arrivals are
        conditioned on their number, kinds are drawn without replacement. So seeds differ in how
        requests bunch, not in their number. Otherwise a window of minutes would measure luck.
        """
        # Every choice has dice of its own, so that one option changes no other draw.
        dice = {name: Random(f"{seed}:{name}") for name in ("gaps", "kinds", "lengths", "choices")}
        sizes = Random(f"{seed}:documents")
        library = _Library(self, sizes) if self.shared else None
        lengths = dice["lengths"]
        # The number of arrivals and the shares of kinds are exact, only their order is drawn.
        count = max(1, round(self.rate_per_s * duration_s))
        shape = 1 / (self.cv * self.cv)
        gaps = [dice["gaps"].gammavariate(shape, 1.0) for _ in range(count + 1)]
        scale = duration_s / sum(gaps)
        kinds = dealt(count, self.document_share, dice["kinds"])
        commons = iter(dealt(sum(kinds), self.shared, dice["kinds"]))
        rows: list[TraceRequest] = []
        now_s = 0.0
        for number, (gap, about) in enumerate(zip(gaps, kinds, strict=False)):
            now_s += gap * scale
            at = round(now_s, 6)
            if not about:
                tokens = self.chat_tokens.draw(lengths)
                output = self.chat_output_tokens.draw(lengths)
                rows.append(TraceRequest(f"c{number}", at, tokens, output))
                continue
            question = self.question_tokens.draw(lengths)
            output = self.document_output_tokens.draw(lengths)
            if next(commons) and library:
                rows.append(library.question(f"d{number}", at, question, output, dice["choices"]))
            else:
                tokens = self.document_tokens.draw(lengths) + question
                rows.append(
                    TraceRequest(f"d{number}", at, tokens, output, document=f"own-{number}")
                )
        return rows

    def prompt_tokens(self, kind: str, share: float) -> int:
        """The `share` quantile of a sample of the prompt lengths of a class."""
        return self._sample(kind)[0][min(SAMPLED - 1, int(share * SAMPLED))]

    def output_tokens(self, kind: str, share: float) -> int:
        """The `share` quantile of a sample of the answer lengths of a class."""
        return self._sample(kind)[1][min(SAMPLED - 1, int(share * SAMPLED))]

    def mean_tokens(self, kind: str) -> tuple[float, float]:
        """Mean prompt and output tokens of a class."""
        prompts, outputs = self._sample(kind)
        return sum(prompts) / SAMPLED, sum(outputs) / SAMPLED

    def output_tokens_per_s(self) -> float:
        return sum(rate * self.mean_tokens(kind)[1] for kind, rate in self.rates_per_s().items())

    def mean_question_tokens(self) -> float:
        dice = Random(0)
        return sum(self.question_tokens.draw(dice) for _ in range(SAMPLED)) / SAMPLED

    def _sample(self, kind: str) -> tuple[list[int], list[int]]:
        if kind == CHAT:
            return _drawn(self.chat_tokens), _drawn(self.chat_output_tokens)
        # Adds sorted lengths: nearly the same sums, because questions are short next to documents.
        questions = _drawn(self.question_tokens)
        lengths = [a + b for a, b in zip(_drawn(self.document_tokens), questions, strict=True)]
        return lengths, _drawn(self.document_output_tokens)


def dealt(count: int, share: float, dice: Random) -> list[bool]:
    """A random order of `count` values, of which exactly a `share` are True."""
    chosen = round(count * share)
    pack = [True] * chosen + [False] * (count - chosen)
    dice.shuffle(pack)
    return pack


def _drawn(length: Length) -> list[int]:
    dice = Random(0)
    return sorted(length.draw(dice) for _ in range(SAMPLED))


class _Library:
    """The common documents, each made of whole blocks, because engines share whole blocks.

    Lengths are rounded down, so no length exceeds the longest sample, which was checked against
    the context. A document shorter than one block is part of every question instead.
    """

    def __init__(self, users: Users, sizes: Random) -> None:
        self._popularity = Zipf(users.documents, users.zipf_s)
        self._blocks: list[range] = []
        self._rest: list[int] = []
        next_block, longest = 0, _drawn(users.document_tokens)[-1]
        for _ in range(users.documents):
            tokens = min(longest, users.document_tokens.draw(sizes))
            count = tokens // BLOCK_TOKENS
            self._blocks.append(range(next_block, next_block + count))
            self._rest.append(0 if count else tokens)
            next_block += count
        self._next_own = next_block

    def question(
        self, name: str, at: float, tokens: int, output: int, choices: Random
    ) -> TraceRequest:
        which = self._popularity.draw(choices)
        blocks = self._blocks[which]
        tokens += self._rest[which]
        own = range(self._next_own, self._next_own - (-tokens // BLOCK_TOKENS))
        self._next_own = own.stop
        return TraceRequest(
            name,
            at,
            len(blocks) * BLOCK_TOKENS + tokens,
            output,
            blocks=(*blocks, *own),
            document=f"library-{which}",
        )


def class_of(row: TraceRequest) -> str:
    return CHAT if row.document is None else DOCUMENT
