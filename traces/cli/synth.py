"""`forebay traces synth KIND`: parse the options and write the trace."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from forebay.traces.cli.output import Totals, check_output, report, write_whole
from forebay.traces.ground.command_line.help_text import PlainTyper
from forebay.traces.ground.command_line.options import (
    AsJson,
    Force,
    Output,
    Seed,
    a_time,
    takes_options,
)
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import meta_path
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import (
    MostRequests,
    SharedDocument,
    Workload,
    shared_document,
    workload,
)

app = PlainTyper(
    help="Make a trace in which users share documents.\n\n"
    "example:  forebay traces synth shared-document --users 50 -o shared.jsonl",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTrace:
    """The options of each command here: where the trace goes, and how chance is drawn."""

    output: Output
    seed: Seed = 0
    force: Force = False
    as_json: AsJson = False


@app.command()
@takes_options
def documents(spec: Workload, to: WrittenTrace) -> None:
    """Users ask about documents of Zipf popularity.

    example:  forebay traces synth documents --users 200 --documents 50 --rate 4 -o rag.jsonl
    """
    _write(to, workload(spec), "documents", asdict(spec))


@app.command("shared-document")
@takes_options
def one_document(spec: SharedDocument, to: WrittenTrace) -> None:
    """Every user asks one question about the same document.

    example:  forebay traces synth shared-document --users 50 --document-tokens 100000 -o one.jsonl
    """
    _write(to, shared_document(spec), "shared-document", asdict(spec))


@app.command("chat-beside-documents")
@takes_options
def chat_and_documents(spec: ChatBesideDocuments, to: WrittenTrace) -> None:
    """Chat with prompt lengths of Azure's trace, and long documents with several questions each.

    example:  forebay traces synth chat-beside-documents --chat-rate 8 --duration 300 -o mix.jsonl
    """
    _write(to, chat_beside_documents(spec), "chat-beside-documents", asdict(spec))


@app.command("agent-sessions")
@takes_options
def sessions_of_agents(spec: AgentSessions, to: WrittenTrace) -> None:
    """Sessions of coding agents, as in vLLM's AgentX: 43 turns, 142k input tokens, sub-agents.

    example:  forebay traces synth agent-sessions --duration 3600 -o agents.jsonl
    """
    _write(to, agent_sessions(spec), "agent-sessions", asdict(spec))


@app.command("model")
@takes_options
def fitted(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="file of forebay traces fit")],
    speed: Annotated[float, typer.Option(help="factor of the rate of new sessions")] = 1.0,
    duration: Annotated[
        float | None, a_time("length of the trace; default: as the fitted one", "--duration")
    ] = None,
    requests: MostRequests = None,
    to: WrittenTrace,
) -> None:
    """Make more traffic like a trace that was fitted.

    example:  forebay traces synth model model.json --speed 2 -o twice.jsonl
    """
    from forebay.traces.synth.from_model import synthesise
    from forebay.traces.synth.model import read_model

    if not 0 < speed < float("inf"):
        raise InputError(f"--speed {speed:g}: give more than 0")
    limits: dict[str, Any] = {"duration_s": duration, "requests": requests}
    rows = synthesise(read_model(model), **limits, speed=speed, seed=to.seed)
    _write(to, rows, "model", {"model": model, "speed": speed, **limits, "seed": to.seed})


def _write(
    to: WrittenTrace, requests: Iterator[TraceRequest], kind: str, parameters: dict[str, Any]
) -> None:
    output, as_json = to.output, to.as_json
    check_output(output, meta_path(output), force=to.force, as_json=as_json)
    totals = Totals(requests, if_none="--duration: no request arrives in it; raise it or the rate")
    facts = {"command": "synth", "kind": kind, "parameters": parameters}
    report(write_whole(output, totals, lambda: facts), output, as_json)
