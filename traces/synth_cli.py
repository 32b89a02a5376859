"""`forebay traces synth KIND`: parse the words and write the trace."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from forebay.traces.cli_output import Totals, report
from forebay.traces.errors import InputError
from forebay.traces.lengths import parse_length
from forebay.traces.output import meta_path, refuse_existing
from forebay.traces.schema import TraceRequest

app = typer.Typer(
    help="Make traffic in which users share documents.\n\n"
    "example:  forebay traces synth shared-document --users 50 -o shared.jsonl",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Output = Annotated[str, typer.Option("--output", "-o", help="the trace to write; - is stdout")]
Force = Annotated[bool, typer.Option("--force", help="overwrite what is there")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Seed = Annotated[int, typer.Option("--seed", help="equal seeds make equal traces")]
Users = Annotated[int, typer.Option("--users", help="users who ask")]
Rate = Annotated[float, typer.Option("--rate", help="requests a second")]
Instruction = Annotated[
    int, typer.Option("--instruction-tokens", help="a root every prompt starts with")
]
LENGTH = "tokens: N, uniform:MIN,MAX or lognormal:MEDIAN,SIGMA,MIN,MAX"
DocumentTokens = Annotated[str, typer.Option("--document-tokens", help=LENGTH)]
QuestionTokens = Annotated[str, typer.Option("--question-tokens", help=LENGTH)]
OutputTokens = Annotated[str, typer.Option("--output-tokens", help=LENGTH)]
ChatTokens = Annotated[str, typer.Option("--chat-tokens", help=LENGTH)]
ChatOutputTokens = Annotated[str, typer.Option("--chat-output-tokens", help=LENGTH)]


@app.command()
def documents(
    output: Output,
    users: Users = 50,
    count: Annotated[int, typer.Option("--documents", help="documents they share")] = 20,
    zipf: Annotated[float, typer.Option("--zipf", help="popularity exponent; 0 is even")] = 0.8,
    document_tokens: DocumentTokens = "lognormal:12000,0.7,4096,100000",
    question_tokens: QuestionTokens = "64",
    output_tokens: OutputTokens = "128",
    chat_share: Annotated[float, typer.Option("--chat-share", help="share that is chat")] = 0.0,
    chat_tokens: ChatTokens = "azure-conv-input",
    chat_output_tokens: ChatOutputTokens = "azure-conv-output",
    arrivals: Annotated[
        str, typer.Option("--arrivals", help="poisson, constant or burst")
    ] = "poisson",
    rate: Rate = 2.0,
    think: Annotated[
        float | None, typer.Option("--think", help="mean seconds between a user's requests")
    ] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="seconds")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="at most so many")] = None,
    instruction_tokens: Instruction = 0,
    tenants: Annotated[int, typer.Option("--tenants", help="share out users, documents")] = 1,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Users who ask about documents of Zipf popularity; 600 s unless told otherwise.

    example:  forebay traces synth documents --users 200 --documents 50 --rate 4 -o rag.jsonl
    """
    from forebay.traces.synth import Workload, workload

    spec = Workload(
        users=users,
        documents=count,
        zipf_s=zipf,
        document_tokens=parse_length(document_tokens, "--document-tokens"),
        question_tokens=parse_length(question_tokens, "--question-tokens"),
        output_tokens=parse_length(output_tokens, "--output-tokens"),
        chat_share=chat_share,
        chat_tokens=parse_length(chat_tokens, "--chat-tokens"),
        chat_output_tokens=parse_length(chat_output_tokens, "--chat-output-tokens"),
        arrivals=arrivals,
        rate_per_s=rate,
        think_s=think,
        duration_s=600.0 if duration is None and requests is None else duration,
        requests=requests,
        instruction_tokens=instruction_tokens,
        tenants=tenants,
        seed=seed,
    )
    _write(output, force, as_json, workload(spec), {"kind": "documents", **asdict(spec)})


@app.command("shared-document")
def one_document(
    output: Output,
    users: Users = 50,
    document_tokens: Annotated[int, typer.Option("--document-tokens")] = 32_000,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 64,
    output_tokens: Annotated[int, typer.Option("--output-tokens")] = 128,
    arrivals: Annotated[
        str, typer.Option("--arrivals", help="burst (all at once), poisson or constant")
    ] = "burst",
    rate: Rate = 2.0,
    instruction_tokens: Instruction = 0,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Every user asks one question about the same document.

    example:  forebay traces synth shared-document --users 50 --document-tokens 100000 -o one.jsonl
    """
    from forebay.traces.synth import shared_document

    settings: dict[str, Any] = {
        "users": users,
        "document_tokens": document_tokens,
        "question_tokens": question_tokens,
        "output_tokens": output_tokens,
        "arrivals": arrivals,
        "rate_per_s": rate,
        "instruction_tokens": instruction_tokens,
        "seed": seed,
    }
    facts = {"kind": "shared-document", **settings}
    _write(output, force, as_json, shared_document(**settings), facts)


@app.command("chat-beside-documents")
def chat_and_documents(
    output: Output,
    chat_rate: Annotated[float, typer.Option("--chat-rate", help="chat requests a second")] = 4.0,
    document_rate: Annotated[
        float, typer.Option("--document-rate", help="requests about documents a second")
    ] = 0.2,
    questions: Annotated[int, typer.Option("--questions", help="questions a document")] = 5,
    follow_gap: Annotated[
        float, typer.Option("--follow-gap", help="mean seconds between them")
    ] = 20.0,
    document_tokens: DocumentTokens = "120000",
    question_tokens: QuestionTokens = "64",
    output_tokens: OutputTokens = "128",
    chat_tokens: ChatTokens = "azure-conv-input",
    chat_output_tokens: ChatOutputTokens = "azure-conv-output",
    users: Users = 50,
    duration: Annotated[float, typer.Option("--duration", help="seconds")] = 180.0,
    instruction_tokens: Instruction = 0,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Chat of Azure's lengths beside long documents that several users ask about.

    example:  forebay traces synth chat-beside-documents --chat-rate 8 --duration 300 -o mix.jsonl
    """
    from forebay.traces.synth_mix import ChatBesideDocuments, chat_beside_documents

    spec = ChatBesideDocuments(
        chat_rate_per_s=chat_rate,
        document_rate_per_s=document_rate,
        questions=questions,
        follow_gap_s=follow_gap,
        document_tokens=parse_length(document_tokens, "--document-tokens"),
        question_tokens=parse_length(question_tokens, "--question-tokens"),
        output_tokens=parse_length(output_tokens, "--output-tokens"),
        chat_tokens=parse_length(chat_tokens, "--chat-tokens"),
        chat_output_tokens=parse_length(chat_output_tokens, "--chat-output-tokens"),
        users=users,
        duration_s=duration,
        instruction_tokens=instruction_tokens,
        seed=seed,
    )
    facts = {"kind": "chat-beside-documents", **asdict(spec)}
    _write(output, force, as_json, chat_beside_documents(spec), facts)


def _write(
    output: str,
    force: bool,
    as_json: bool,
    requests: Iterator[TraceRequest],
    facts: dict[str, Any],
) -> None:
    from forebay.traces.jsonl import write_trace

    refuse_existing([output, meta_path(output)], force=force)
    totals = Totals(_not_empty(requests))
    write_trace(output, totals)
    report(totals, output, {"command": "synth", **facts}, as_json)


def _not_empty(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    empty = True
    for request in requests:
        empty = False
        yield request
    if empty:
        raise InputError("--duration: no request falls in it; make it longer or the rate higher")
