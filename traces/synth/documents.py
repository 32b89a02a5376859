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
from itertools import count
from random import Random

from forebay.traces.errors import InputError
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.arrivals import arrival_times, check_rate
from forebay.traces.synth.lengths import (
    AZURE_CONV_INPUT,
    AZURE_CONV_OUTPUT,
    Fixed,
    Length,
    Lognormal,
)
from forebay.traces.synth.popularity import Zipf


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings: N users ask about D documents, and perhaps chat.

    Attributes:
        users: number of users. User u is session `user-u` of tenant `tenant-(u mod tenants)`.
        documents: number of documents. Only users of tenant d mod tenants ask about document d.
        zipf_s: exponent of the popularity of a tenant's documents. 0 is even.
        chat_share: probability that a request is chat instead.
        arrivals: burst, constant or poisson at `rate_per_s`. Ignored with `think_s`.
        think_s: instead of a rate, each user's mean (exponential) time between arrivals.
        duration_s: no request arrives after it.
        requests: most requests. A burst needs this limit.
        instruction_tokens: length of the prefix that all prompts share, 0 for no prefix.
    """

    users: int = 50
    documents: int = 20
    zipf_s: float = 0.8
    document_tokens: Length = field(default=Lognormal(12_000, 0.7, 4_096, 100_000))
    question_tokens: Length = field(default=Fixed(64))
    output_tokens: Length = field(default=Fixed(128))
    chat_share: float = 0.0
    chat_tokens: Length = AZURE_CONV_INPUT
    chat_output_tokens: Length = AZURE_CONV_OUTPUT
    arrivals: str = "poisson"
    rate_per_s: float = 2.0
    think_s: float | None = None
    duration_s: float | None = 600.0
    requests: int | None = None
    instruction_tokens: int = 0
    tenants: int = 1
    block_tokens: int = BLOCK_TOKENS
    seed: int = 0


def shared_document(
    *,
    users: int = 50,
    document_tokens: int = 32_000,
    question_tokens: int = 64,
    output_tokens: int = 128,
    arrivals: str = "burst",
    rate_per_s: float = 2.0,
    instruction_tokens: int = 0,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Make a trace in which each user asks one question about one document, at once or at a rate.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    # `parse_length` checks the other distributions of lengths.
    check_tokens("--document-tokens", document_tokens, least=1)
    check_tokens("--question-tokens", question_tokens, least=1)
    check_tokens("--output-tokens", output_tokens, least=0)
    people = iter(range(users))  # each user once, not at random
    return workload(
        Workload(
            users=users,
            documents=1,
            document_tokens=Fixed(document_tokens),
            question_tokens=Fixed(question_tokens),
            output_tokens=Fixed(output_tokens),
            arrivals=arrivals,
            rate_per_s=rate_per_s,
            duration_s=None,
            requests=users,
            instruction_tokens=instruction_tokens,
            seed=seed,
        ),
        people,
    )


def workload(spec: Workload, people: Iterator[int] | None = None) -> Iterator[TraceRequest]:
    """Make the requests of `spec`, in order of arrival. `people` replaces random users.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    _check(spec)
    makers = RequestMaker(spec)
    return _requests(spec, makers, people)


def _requests(
    spec: Workload, maker: "RequestMaker", people: Iterator[int] | None
) -> Iterator[TraceRequest]:
    kinds = Random(f"{spec.seed}:kinds")
    choices = Random(f"{spec.seed}:choices")
    ranks = [
        Zipf(len(range(tenant, spec.documents, spec.tenants)), spec.zipf_s)
        for tenant in range(spec.tenants)
    ]
    sizes = Random(f"{spec.seed}:documents")
    documents = [
        maker.new_document(spec.document_tokens.draw(sizes)) for _ in range(spec.documents)
    ]
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


@dataclass(frozen=True, slots=True)
class Document:
    name: str
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
        return self._request(
            "document",
            arrival_s,
            user,
            self._root + document.blocks,
            self._spec.question_tokens.draw(self._lengths),
            self._spec.output_tokens.draw(self._lengths),
            document.name,
        )

    def chat(self, arrival_s: float, user: int) -> TraceRequest:
        """Make a prompt that shares only the instruction."""
        return self._request(
            "chat",
            arrival_s,
            user,
            self._root,
            self._spec.chat_tokens.draw(self._lengths),
            self._spec.chat_output_tokens.draw(self._lengths),
            None,
        )

    def _request(
        self,
        kind: str,
        arrival_s: float,
        user: int,
        shared: tuple[int, ...],
        fresh_tokens: int,
        output_tokens: int,
        document: str | None,
    ) -> TraceRequest:
        spec = self._spec
        return TraceRequest(
            id=f"{kind}-{next(self._numbers)}",
            arrival_s=arrival_s,
            input_tokens=len(shared) * spec.block_tokens + fresh_tokens,
            output_tokens=output_tokens,
            blocks=shared + self._fresh(fresh_tokens),
            block_tokens=spec.block_tokens,
            session=f"user-{user}",
            tenant=f"tenant-{user % spec.tenants}" if spec.tenants > 1 else None,
            document=document,
        )


def check_tokens(option: str, tokens: int, *, least: int) -> None:
    if tokens < least:
        raise InputError(f"{option} {tokens}: give {least} or more")


def _check(spec: Workload) -> None:
    _check_population(spec)
    _check_pace(spec)
    if not 0 <= spec.chat_share <= 1:
        raise InputError(f"--chat-share {spec.chat_share:g}: not a share; give 0 to 1")
    if not 0 <= spec.zipf_s <= 10:
        raise InputError(f"--zipf {spec.zipf_s:g}: give an exponent from 0 (even) to 10")
    check_tokens("--instruction-tokens", spec.instruction_tokens, least=0)


def _check_population(spec: Workload) -> None:
    counts = {
        "--users": spec.users,
        "--documents": spec.documents,
        "--tenants": spec.tenants,
        "--block-tokens": spec.block_tokens,
    }
    if spec.requests is not None:
        counts["--requests"] = spec.requests
    for option, value in counts.items():
        if value < 1:
            raise InputError(f"{option} {value}: give 1 or more")
    if spec.tenants > min(spec.users, spec.documents):
        raise InputError(
            f"--tenants {spec.tenants}: each needs a user and a document; give at most "
            f"{min(spec.users, spec.documents)} or more --users and --documents"
        )


def _check_pace(spec: Workload) -> None:
    if spec.think_s is not None:
        if not 0 < spec.think_s < float("inf"):
            raise InputError(f"--think {spec.think_s:g}: give more than 0 seconds")
    elif spec.arrivals != "burst":
        check_rate(spec.rate_per_s, "--rate")
    if spec.duration_s is not None and not 0 < spec.duration_s < float("inf"):
        raise InputError(f"--duration {spec.duration_s:g}: give more than 0 seconds")
    if spec.requests is None and (
        spec.duration_s is None or (spec.arrivals == "burst" and spec.think_s is None)
    ):
        raise InputError("--requests: a burst never ends by itself; give a number of requests")
