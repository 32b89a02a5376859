"""`forebay traces synth KIND`: parse the options and write the trace."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from forebay.traces.cli.output import Totals, check_output, report, write_whole
from forebay.traces.command_line.help_text import PlainTyper
from forebay.traces.command_line.options import (
    Arrivals,
    AsJson,
    Force,
    Output,
    Rate,
    Seed,
    a_time,
    takes_options,
)
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.lengths import settings_of
from forebay.traces.whole_file import meta_path

app = PlainTyper(
    help="Make a trace in which users share documents.\n\n"
    "example:  forebay traces synth shared-document --users 50 -o shared.jsonl",
)

MostRequests = Annotated[int | None, typer.Option("--requests", help="most requests of the trace")]
Users = Annotated[int, typer.Option("--users", help="number of users")]
Instruction = Annotated[
    int, typer.Option("--instruction-tokens", help="length of a prefix that all prompts share")
]
LENGTH = "tokens, as N, uniform:MIN,MAX or lognormal:MEDIAN,SIGMA,MIN,MAX"
DocumentTokens = Annotated[str, typer.Option("--document-tokens", help=LENGTH)]
QuestionTokens = Annotated[str, typer.Option("--question-tokens", help=LENGTH)]
OutputTokens = Annotated[str, typer.Option("--output-tokens", help=LENGTH)]
ChatTokens = Annotated[str, typer.Option("--chat-tokens", help=LENGTH)]
ChatOutputTokens = Annotated[str, typer.Option("--chat-output-tokens", help=LENGTH)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTrace:
    """The options of each command here: where the trace goes, and how chance is drawn."""

    output: Output
    seed: Seed = 0
    force: Force = False
    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsArguments(WrittenTrace):
    """The options of `traces synth documents` as they are typed."""

    users: Users = 50
    documents: Annotated[int, typer.Option("--documents", help="documents they share")] = 20
    zipf_s: Annotated[
        float, typer.Option("--zipf", help="exponent of the documents' popularity; 0 is even")
    ] = 0.8
    document_tokens: DocumentTokens = "lognormal:12000,0.7,4096,100000"
    question_tokens: QuestionTokens = "64"
    output_tokens: OutputTokens = "128"
    chat_share: Annotated[
        float, typer.Option("--chat-share", help="share of requests that are chat, 0 to 1")
    ] = 0.0
    chat_tokens: ChatTokens = "azure-conv-input"
    chat_output_tokens: ChatOutputTokens = "azure-conv-output"
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
    tenants: Annotated[
        int, typer.Option("--tenants", help="tenants that divide users and documents")
    ] = 1


@app.command()
@takes_options
def documents(arguments: DocumentsArguments) -> None:
    """Users ask about documents of Zipf popularity.

    example:  forebay traces synth documents --users 200 --documents 50 --rate 4 -o rag.jsonl
    """
    from forebay.traces.synth.documents import Workload, workload

    settings = settings_of(arguments, Workload)
    if arguments.duration_s is None and arguments.requests is None:
        settings["duration_s"] = 600.0
    spec = Workload(**settings)
    _write(arguments, workload(spec), "documents", asdict(spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDocumentArguments(WrittenTrace):
    """The options of `traces synth shared-document`, under the names of its settings."""

    users: Users = 50
    document_tokens: Annotated[
        int, typer.Option("--document-tokens", help="tokens of the document")
    ] = 32_000
    question_tokens: Annotated[
        int, typer.Option("--question-tokens", help="tokens of each question")
    ] = 64
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="tokens of each answer")] = (
        128
    )
    arrivals: Annotated[
        str, typer.Option("--arrivals", help="burst (all at once), poisson or constant")
    ] = "burst"
    rate_per_s: Rate = 2.0
    instruction_tokens: Instruction = 0


@app.command("shared-document")
@takes_options
def one_document(arguments: SharedDocumentArguments) -> None:
    """Every user asks one question about the same document.

    example:  forebay traces synth shared-document --users 50 --document-tokens 100000 -o one.jsonl
    """
    from forebay.traces.synth.documents import shared_document

    settings = {
        name: value
        for name, value in asdict(arguments).items()
        if name not in ("output", "force", "as_json")
    }
    _write(arguments, shared_document(**settings), "shared-document", settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBesideDocumentsArguments(WrittenTrace):
    """The options of `traces synth chat-beside-documents` as they are typed."""

    chat_rate_per_s: Annotated[
        float, typer.Option("--chat-rate", help="chat requests a second")
    ] = 4.0
    document_rate_per_s: Annotated[
        float, typer.Option("--document-rate", help="requests about documents a second")
    ] = 0.2
    questions: Annotated[int, typer.Option("--questions", help="questions about each document")] = 5
    follow_gap_s: Annotated[
        float,
        typer.Option("--follow-gap", help="mean seconds between questions about a document"),
    ] = 20.0
    document_tokens: DocumentTokens = "120000"
    question_tokens: QuestionTokens = "64"
    output_tokens: OutputTokens = "128"
    chat_tokens: ChatTokens = "azure-conv-input"
    chat_output_tokens: ChatOutputTokens = "azure-conv-output"
    users: Users = 50
    duration_s: Annotated[float, a_time("length of the trace", "--duration")] = 180.0
    instruction_tokens: Instruction = 0


@app.command("chat-beside-documents")
@takes_options
def chat_and_documents(arguments: ChatBesideDocumentsArguments) -> None:
    """Chat with prompt lengths of Azure's trace, and long documents with several questions each.

    example:  forebay traces synth chat-beside-documents --chat-rate 8 --duration 300 -o mix.jsonl
    """
    from forebay.traces.synth.chat_beside_documents import (
        ChatBesideDocuments,
        chat_beside_documents,
    )

    spec = ChatBesideDocuments(**settings_of(arguments, ChatBesideDocuments))
    _write(arguments, chat_beside_documents(spec), "chat-beside-documents", asdict(spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSessionsArguments(WrittenTrace):
    """The options of `traces synth agent-sessions` as they are typed."""

    session_rate_per_s: Annotated[
        float, typer.Option("--session-rate", help="sessions that begin a second")
    ] = 0.01
    task_tokens: Annotated[
        str, typer.Option("--task-tokens", help=f"what a session begins with: {LENGTH}")
    ] = "lognormal:96000,0.5,1024,180000"
    tool_tokens: Annotated[
        str, typer.Option("--tool-tokens", help=f"new input of each turn: {LENGTH}")
    ] = "lognormal:1700,1,32,30000"
    output_tokens: OutputTokens = "lognormal:444,0.8,8,8000"
    subagent_share: Annotated[
        float, typer.Option("--subagent-share", help="share of sessions with sub-agents, 0 to 1")
    ] = 0.44
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", help="a longer context is compacted")
    ] = 262_144
    summary_tokens: Annotated[
        int, typer.Option("--summary-tokens", help="what is left of a compacted context")
    ] = 49_152
    instruction_tokens: Instruction = 13_312
    duration_s: Annotated[float, a_time("length of the trace", "--duration")] = 1_800.0


@app.command("agent-sessions")
@takes_options
def sessions_of_agents(arguments: AgentSessionsArguments) -> None:
    """Sessions of coding agents, as in vLLM's AgentX: 43 turns, 142k input tokens, sub-agents.

    example:  forebay traces synth agent-sessions --duration 3600 -o agents.jsonl
    """
    from forebay.traces.synth.agents import AgentSessions, agent_sessions

    spec = AgentSessions(**settings_of(arguments, AgentSessions))
    _write(arguments, agent_sessions(spec), "agent-sessions", asdict(spec))


def _write(
    to: WrittenTrace, requests: Iterator[TraceRequest], kind: str, parameters: dict[str, Any]
) -> None:
    output, as_json = to.output, to.as_json
    check_output(output, meta_path(output), force=to.force, as_json=as_json)
    totals = Totals(requests, if_none="--duration: no request arrives in it; raise it or the rate")
    facts = {"command": "synth", "kind": kind, "parameters": parameters}
    report(write_whole(output, totals, lambda: facts), output, as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedArguments(WrittenTrace):
    """The options of `traces synth model`."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="file of forebay traces fit")]
    speed: Annotated[float, typer.Option("--speed", help="factor of the rate of new sessions")] = (
        1.0
    )
    duration: Annotated[
        float | None, a_time("length of the trace; default: as the fitted one", "--duration")
    ] = None
    requests: MostRequests = None


@app.command("model")
@takes_options
def fitted(arguments: FittedArguments) -> None:
    """Make more traffic like a trace that was fitted.

    example:  forebay traces synth model model.json --speed 2 -o twice.jsonl
    """
    from forebay.traces.synth.from_model import Made, synthesise
    from forebay.traces.synth.model import read_model

    speed, seed = arguments.speed, arguments.seed
    if not 0 < speed < float("inf"):
        raise InputError(f"--speed {speed:g}: give more than 0")
    totals = Made(read_model(arguments.model), speed)
    limits: dict[str, Any] = {"duration_s": arguments.duration, "requests": arguments.requests}
    rows = synthesise(totals.model, **limits, speed=speed, seed=seed, totals=totals)
    settings = {"model": arguments.model, "speed": speed, **limits, "seed": seed}
    _write(arguments, rows, "model", settings)
    for line in totals.differences():
        print(f"warning: {line}", file=sys.stderr)
