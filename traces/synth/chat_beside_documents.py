"""Make chat traffic next to long documents that several users ask about one after another.

Each document opens at a random time and gets a fixed number of questions, with exponential gaps.
The traffic is steady from the first second: documents that opened before the trace begins are in it
with their remaining questions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import count
from operator import itemgetter
from random import Random
from typing import Annotated

import typer

from forebay.traces.ground.command_line.options import a_time, one_or_more, same_named
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.arrivals import check_rate, check_seconds, poisson
from forebay.traces.synth.documents import (
    Document,
    Instruction,
    RequestMaker,
    Users,
    Workload,
    check_tokens,
)
from forebay.traces.synth.lengths import (
    AZURE_CONV_INPUT,
    AZURE_CONV_OUTPUT,
    ChatOutputTokens,
    ChatTokens,
    DocumentTokens,
    Fixed,
    OutputTokens,
    QuestionTokens,
)

# Documents that opened before this many mean life spans have practically no questions left.
_WARM_LIVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBesideDocuments:
    """Settings of two Poisson-like streams: chat, and questions about documents.

    Chats have lengths like Azure's conversation trace. Random users ask about a document.
    """

    chat_rate_per_s: Annotated[
        float, typer.Option("--chat-rate", help="chat requests a second")
    ] = 4.0
    document_rate_per_s: Annotated[
        float, typer.Option("--document-rate", help="requests about documents a second")
    ] = 0.2
    questions: Annotated[int, typer.Option(help="questions about each document")] = 5
    follow_gap_s: Annotated[
        float, typer.Option("--follow-gap", help="mean seconds between questions about a document")
    ] = 20.0
    document_tokens: DocumentTokens = field(default=Fixed(120_000))
    question_tokens: QuestionTokens = field(default=Fixed(64))
    output_tokens: OutputTokens = field(default=Fixed(128))
    chat_tokens: ChatTokens = AZURE_CONV_INPUT
    chat_output_tokens: ChatOutputTokens = AZURE_CONV_OUTPUT
    users: Users = 50
    duration_s: Annotated[float, a_time("length of the trace", "--duration")] = 180.0
    instruction_tokens: Instruction = 0
    seed: int = 0


def chat_beside_documents(spec: ChatBesideDocuments) -> Iterator[TraceRequest]:
    """Make the requests of `spec`, in order of arrival.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    check_rate(spec.chat_rate_per_s, "--chat-rate")
    check_rate(spec.document_rate_per_s, "--document-rate")
    if spec.questions < 1:
        raise InputError(f"--questions {spec.questions}: give 1 or more a document")
    one_or_more({"--users": spec.users})
    check_tokens("--instruction-tokens", spec.instruction_tokens, least=0)
    check_seconds(spec.follow_gap_s, "--follow-gap")
    check_seconds(spec.duration_s, "--duration")
    return _requests(spec)


def _requests(spec: ChatBesideDocuments) -> Iterator[TraceRequest]:
    maker = RequestMaker(Workload(**same_named(spec, Workload)))
    # Each aspect has its own random numbers, so that a setting changes only its own aspect.
    users = Random(f"{spec.seed}:choices")
    sizes = Random(f"{spec.seed}:documents")
    times = poisson(spec.chat_rate_per_s, Random(f"{spec.seed}:chat"))
    chats = ((arrival_s, None) for arrival_s in times)
    open_documents: dict[int, tuple[Document, int]] = {}
    for arrival_s, question in merge(chats, _questions(spec), key=itemgetter(0)):
        if arrival_s > spec.duration_s:
            return
        user = users.randrange(spec.users)
        if question is None:
            yield maker.chat(arrival_s, user)
            continue
        opening, left = question
        # A document gets its name at its first question inside the trace.
        if opening not in open_documents:
            document = maker.new_document(spec.document_tokens.draw(sizes))
            open_documents[opening] = (document, left)
        yield maker.question(arrival_s, user, open_documents[opening][0])
        if left == 0:
            del open_documents[opening]


def _questions(spec: ChatBesideDocuments) -> Iterator[tuple[float, tuple[int, int]]]:
    """Make (time, (document opening, number of later questions)), from time 0 on."""
    openings = Random(f"{spec.seed}:arrivals")
    gaps = Random(f"{spec.seed}:gaps")
    opening_rate_per_s = spec.document_rate_per_s / spec.questions
    numbers = count()
    next_opening_s = -_WARM_LIVES * spec.questions * spec.follow_gap_s
    next_opening_s += openings.expovariate(opening_rate_per_s)
    due: list[tuple[float, int, int]] = []
    while True:
        while not due or next_opening_s <= due[0][0]:
            heappush(due, (next_opening_s, next(numbers), spec.questions - 1))
            next_opening_s += openings.expovariate(opening_rate_per_s)
        now_s, opening, left = heappop(due)
        if left:
            heappush(due, (now_s + gaps.expovariate(1 / spec.follow_gap_s), opening, left - 1))
        if now_s >= 0:
            yield round(now_s, 6), (opening, left)
