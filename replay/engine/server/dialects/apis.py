"""The four APIs that generate text: how each reads a body, and names and writes an answer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from forebay.replay.engine.server.answers import Chunks, WholeAnswer, whole_answer
from forebay.replay.engine.server.api_errors import EngineApiError
from forebay.replay.engine.server.dialects.messages import (
    MessageChunks,
    message_error,
    read_messages,
    whole_message,
)
from forebay.replay.engine.server.dialects.responses import (
    ResponseChunks,
    read_responses,
    whole_response,
)
from forebay.replay.engine.server.protocol import Call, read_call


@dataclass(frozen=True, slots=True)
class Api:
    """One generation endpoint: how a body is read, and how answers are named and written.

    Attributes:
        takes_rank: a header of the request may name the data-parallel rank.
    """

    kind: str
    read: Callable[..., Call]
    chunks: type[Chunks] = Chunks
    whole: Callable[[WholeAnswer], bytes] = whole_answer
    error: Callable[[EngineApiError], bytes] = EngineApiError.body
    takes_rank: bool = True


APIS = {
    "/v1/chat/completions": Api("chatcmpl", partial(read_call, chat=True)),
    "/v1/completions": Api("cmpl", partial(read_call, chat=False)),
    "/v1/messages": Api("chatcmpl", read_messages, MessageChunks, whole_message, message_error),
    "/v1/responses": Api("resp", read_responses, ResponseChunks, whole_response, takes_rank=False),
}
