"""Define the trace record: one request, the same for readers, writers, replayer and simulator."""

from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 512
"""Default number of tokens of a block id (Mooncake's block size)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    The prompt is `text`, or the chat `messages`, or `blocks`: ids of runs of `block_tokens` tokens.
    Ids are prefix-chained: two prompts share exactly the tokens of their equal leading ids. The
    last block has the remaining tokens of `input_tokens`. Without all three, only the lengths are
    known and the prompt shares nothing. A prompt is always whole: a later turn holds its history.

    A request with `parent` or `waits_for` is due `think_s` after the last of their answers. If
    `think_s` is None, it is due at `arrival_s`, but not before these answers. `arrival_s` is always
    the time in the original traffic, so that a reader without sessions can use it alone.

    Attributes:
        id: unique within a trace.
        arrival_s: seconds from the start of the trace, ascending.
        input_tokens: prompt length in tokens.
        output_tokens: tokens to generate.
        blocks: block ids, or None when the prompt is text or unknown.
        block_tokens: tokens in a full block.
        text: the prompt itself, or None.
        session: conversation the request belongs to.
        tenant: customer the request is billed to.
        document: document the prompt is about.
        service_class: how urgent it is: interactive, standard (also when None) or batch.
        parent: id of the turn before, which is earlier in the trace. This prompt extends its prompt
            and answer.
        waits_for: ids of other earlier requests whose answers come first. A turn waits for the
            last requests of its sub-agents. The first request of a sub-agent waits for the turn
            that started it.
        think_s: seconds from the last answer it waits for to this request: time of a user or tool.
        messages: the messages of the chat API, as the client sent them.
        tools: the tools in the same request.
        model: the model that the client named.
        stream: False if the client wanted the answer in one piece.
        parameters: other fields of the request body: `stop`, `temperature`, `response_format`, ...
        deadline_s: seconds after arrival when the client gave up, or would have.
        status: HTTP status of the original answer, or None if it is not known.
        observed: the times of the original answer in seconds after arrival, as far as they are
            known: `sent_s` to a server, `ttft_s`, `e2e_s`, with `backend` and `cached_tokens`.
    """

    id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None
    block_tokens: int = BLOCK_TOKENS
    text: str | None = None
    session: str | None = None
    tenant: str | None = None
    document: str | None = None
    service_class: str | None = None
    parent: str | None = None
    waits_for: tuple[str, ...] = ()
    think_s: float | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    model: str | None = None
    stream: bool = True
    parameters: dict[str, Any] | None = None
    deadline_s: float | None = None
    status: int | None = None
    observed: dict[str, Any] | None = None
