"""Make a trace in which users share documents, as a stream that is deterministic for a seed.

A document request is the instruction, a document and a new question. A chat request is the
instruction and a new prompt. All requests share the instruction, which misleads naive prefix
routing. Prompts are block ids. The instruction and the documents are rounded up to whole blocks, so
that they can be shared. The last block of a question or chat is partial.

Each aspect has its own stream of random numbers, so that changing the lengths does not change the
arrivals. Memory grows with users and documents, never with rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import accumulate, count
from random import Random
from typing import Annotated

import typer

from forebay.traces.ground.command_line.options import (
    Arrivals,
    Rate,
    a_time,
    one_or_more,
    same_named,
)
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.arrivals import arrival_times, check_rate, check_seconds, check_share
from forebay.traces.synth.lengths import (
    AZURE_CONV_INPUT,
    AZURE_CONV_OUTPUT,
    ChatOutputTokens,
    ChatTokens,
    DocumentTokens,
    Fixed,
    Length,
    Lognormal,
    OutputTokens,
    QuestionTokens,
)

Users = Annotated[int, typer.Option(help="number of users")]
Instruction = Annotated[int, typer.Option(help="length of a prefix that all prompts share")]
MostRequests = Annotated[int | None, typer.Option(help="most requests of the trace")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings: N users ask about D documents, and perhaps chat.

    User u is session `user-u` of tenant `tenant-(u mod tenants)`. Only users of tenant d mod
    tenants ask about document d. Popularity is among a tenant's documents.
    """

    users: Users = 50
    documents: Annotated[int, typer.Option(help="documents they share")] = 20
    zipf_s: Annotated[
        float, typer.Option("--zipf", help="exponent of the documents' popularity; 0 is even")
    ] = 0.8
    document_tokens: DocumentTokens = field(default=Lognormal(12_000.0, 0.7, 4_096, 100_000))
    question_tokens: QuestionTokens = field(default=Fixed(64))
    output_tokens: OutputTokens = field(default=Fixed(128))
    chat_share: Annotated[float, typer.Option(help="share of requests that are chat, 0 to 1")] = 0.0
    chat_tokens: ChatTokens = AZURE_CONV_INPUT
    chat_output_tokens: ChatOutputTokens = AZURE_CONV_OUTPUT
    arrivals: Arrivals = "poisson"
    rate_per_s: Rate = 2.0
    think_s: Annotated[
        float | None,
        typer.Option("--think", help="instead of --rate: mean seconds between a user's requests"),
    ] = None
    duration_s: Annotated[
        float | None,
        a_time("length of the trace; default: 10m, or no limit with --requests", "--duration"),
    ] = None
    requests: MostRequests = None
    instruction_tokens: Instruction = 0
    tenants: Annotated[int, typer.Option(help="tenants that divide users and documents")] = 1
    block_tokens: int = BLOCK_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.duration_s is None and self.requests is None:
            object.__setattr__(self, "duration_s", 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDocument:
    """Settings: each user asks one question about one document, at once or at a rate."""

    seed: int = 0
    users: Users = 50
    document_tokens: Annotated[int, typer.Option(help="tokens of the document")] = 32_000
    question_tokens: Annotated[int, typer.Option(help="tokens of each question")] = 64
    output_tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 128
    arrivals: Annotated[str, typer.Option(help="burst (all at once), poisson or constant")] = (
        "burst"
    )
    rate_per_s: Rate = 2.0
    instruction_tokens: Instruction = 0


def shared_document(spec: SharedDocument) -> Iterator[TraceRequest]:
    """Make the requests of `spec`, in order of arrival.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    # `parse_length` checks the other distributions of lengths.
    check_tokens("--document-tokens", spec.document_tokens, least=1)
    check_tokens("--question-tokens", spec.question_tokens, least=1)
    check_tokens("--output-tokens", spec.output_tokens, least=0)
    names = ("document_tokens", "question_tokens", "output_tokens")
    lengths = {name: Fixed(getattr(spec, name)) for name in names}
    settings = same_named(spec, Workload) | lengths
    people = iter(range(spec.users))  # each user once, not at random
    return workload(Workload(**settings, documents=1, requests=spec.users), people)


def workload(spec: Workload, people: Iterator[int] | None = None) -> Iterator[TraceRequest]:
    """Make the requests of `spec`, in order of arrival. `people` replaces random users.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    _check(spec)
    return _requests(spec, people)


def _requests(spec: Workload, people: Iterator[int] | None) -> Iterator[TraceRequest]:
    maker = RequestMaker(spec)
    kinds = Random(f"{spec.seed}:kinds")
    choices = Random(f"{spec.seed}:choices")
    owned = (len(range(tenant, spec.documents, spec.tenants)) for tenant in range(spec.tenants))
    ranks = [Zipf(count, spec.zipf_s) for count in owned]
    sizes = Random(f"{spec.seed}:documents")
    lengths = [spec.document_tokens.draw(sizes) for _ in range(spec.documents)]
    documents = [maker.new_document(tokens) for tokens in lengths]
    # One request for each arrival, until a limit.
    for number, (arrival_s, asker) in enumerate(_arrivals(spec)):
        if (spec.requests is not None and number >= spec.requests) or (
            spec.duration_s is not None and arrival_s > spec.duration_s
        ):
            return
        # A question and a chat make the same draws, so that `chat_share` moves no other request.
        user = choices.randrange(spec.users)
        user = next(people) if people is not None else user if asker is None else asker
        tenant = user % spec.tenants
        document = documents[tenant + spec.tenants * ranks[tenant].draw(choices)]
        if kinds.random() < spec.chat_share:
            yield maker.chat(arrival_s, user)
        else:
            yield maker.question(arrival_s, user, document)


def _arrivals(spec: Workload) -> Iterator[tuple[float, int | None]]:
    """Make arrival times, each with its user if users set the pace (`think_s`)."""
    if spec.think_s is None:
        for arrival_s in arrival_times(spec.arrivals, spec.rate_per_s, spec.seed):
            yield arrival_s, None
    else:
        dice = Random(f"{spec.seed}:arrivals")
        pace = 1 / spec.think_s
        due = [(dice.expovariate(pace), user) for user in range(spec.users)]
        heapify(due)
        while True:
            now_s, user = due[0]
            yield round(now_s, 6), user
            heapreplace(due, (now_s + dice.expovariate(pace), user))


class Zipf:
    """Draws rank k of `count` (from 0) with probability proportional to 1 / (k + 1)^s.

    All ranks are equally likely with s = 0.
    """

    def __init__(self, count: int, s: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -s for rank in range(count)))

    def draw(self, dice: Random) -> int:
        return dice.choices(range(len(self._sums)), cum_weights=self._sums)[0]


@dataclass(frozen=True, slots=True)
class Document:
    """A document's name and blocks. A chat is about a document without either."""

    name: str | None
    blocks: tuple[int, ...]


class RequestMaker:
    """Makes requests, with new block ids, names and lengths."""

    def __init__(self, spec: Workload) -> None:
        self._spec = spec
        self._lengths = Random(f"{spec.seed}:lengths")
        self._next_block = 0
        self._numbers = count()
        self._document_numbers = count()
        self._root = self._fresh(spec.instruction_tokens)

    def _fresh(self, tokens: int) -> tuple[int, ...]:
        start = self._next_block
        self._next_block += -(-tokens // self._spec.block_tokens)
        return tuple(range(start, self._next_block))

    def new_document(self, tokens: int) -> Document:
        return Document(f"document-{next(self._document_numbers)}", self._fresh(tokens))

    def question(self, arrival_s: float, user: int, document: Document) -> TraceRequest:
        """Make a new question about `document`."""
        lengths = (self._spec.question_tokens, self._spec.output_tokens)
        return self._request("document", arrival_s, user, lengths, document)

    def chat(self, arrival_s: float, user: int) -> TraceRequest:
        """Make a prompt that shares only the instruction."""
        lengths = (self._spec.chat_tokens, self._spec.chat_output_tokens)
        return self._request("chat", arrival_s, user, lengths, Document(None, ()))

    def _request(
        self, kind: str, arrival_s: float, user: int, lengths: tuple[Length, Length],
        document: Document,
    ) -> TraceRequest:  # fmt: skip
        spec, shared = self._spec, self._root + document.blocks
        fresh_tokens, output_tokens = [length.draw(self._lengths) for length in lengths]
        return TraceRequest(
            id=f"{kind}-{next(self._numbers)}",
            arrival_s=arrival_s,
            input_tokens=len(shared) * spec.block_tokens + fresh_tokens,
            output_tokens=output_tokens,
            blocks=shared + self._fresh(fresh_tokens),
            block_tokens=spec.block_tokens,
            session=f"user-{user}",
            tenant=f"tenant-{user % spec.tenants}" if spec.tenants > 1 else None,
            document=document.name,
        )


def check_tokens(option: str, tokens: int, *, least: int) -> None:
    if tokens < least:
        raise InputError(f"{option} {tokens}: give {least} or more")


def _check(spec: Workload) -> None:
    one_or_more(
        {
            "--users": spec.users,
            "--documents": spec.documents,
            "--tenants": spec.tenants,
            "--block-tokens": spec.block_tokens,
            "--requests": spec.requests,
        }
    )
    most = min(spec.users, spec.documents)
    if spec.tenants > most:
        raise InputError(
            f"--tenants {spec.tenants}: each needs a user and a document; give at most {most} or "
            "more --users and --documents"
        )
    # The pace: of the users, or of all requests.
    if spec.think_s is not None:
        check_seconds(spec.think_s, "--think")
    elif spec.arrivals != "burst":
        check_rate(spec.rate_per_s, "--rate")
    elif spec.requests is None:
        raise InputError("--requests: a burst never ends by itself; give a number of requests")
    if spec.duration_s is not None:
        check_seconds(spec.duration_s, "--duration")
    # The mix.
    check_share(spec.chat_share, "--chat-share")
    if not 0 <= spec.zipf_s <= 10:
        raise InputError(f"--zipf {spec.zipf_s:g}: give an exponent from 0 (even) to 10")
    check_tokens("--instruction-tokens", spec.instruction_tokens, least=0)
