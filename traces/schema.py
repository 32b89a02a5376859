"""Define the trace record: one request, the same for readers, writers, replayer and simulator."""

from dataclasses import dataclass

BLOCK_TOKENS = 512
"""Default number of tokens of a block id (Mooncake's block size)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    The prompt is `text`, or `blocks`: ids of runs of `block_tokens` tokens. Ids are prefix-chained:
    two prompts share exactly the tokens of their equal leading ids. The last block has the
    remaining tokens of `input_tokens`. With neither, only the lengths are known and the prompt
    shares nothing.

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
