"""Describe the APIs whose requests are shaped: what differs in their fields and events.

Chats and completions are OpenAI's, `/v1/responses` is its newer API, `/v1/messages` is Anthropic's;
vLLM serves all four.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API of vLLM.

    Attributes:
        path: on the public port, and of vLLM.
        messages: the field with the messages; "": there is a `prompt` instead.
        limits: fields for the most tokens of an answer; the first one given counts.
        classic: it knows `n`, `stream_options` and `logprobs`, and its streams end with `[DONE]`.
        opens: types of events that come before the first token.
        ends: types of the last event of a stream.
        heartbeat: what tells a client that its stream is alive, and says nothing.
    """

    path: str
    messages: str
    limits: tuple[str, ...]
    classic: bool = True
    opens: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    heartbeat: bytes = b": keep-alive\n\n"

    @property
    def operation(self) -> str:
        """The name of the API in traces (OpenTelemetry's `gen_ai.operation.name`)."""
        return "chat" if self.messages else "text_completion"


CHAT: Final = Dialect("/v1/chat/completions", "messages", ("max_completion_tokens", "max_tokens"))
# vLLM's completions know no max_completion_tokens: the client may mean it, the engine does not.
COMPLETIONS: Final = Dialect("/v1/completions", "", ("max_tokens",))
RESPONSES: Final = Dialect(
    "/v1/responses",
    "input",
    ("max_output_tokens",),
    classic=False,
    opens=frozenset(("response.created", "response.queued", "response.in_progress")),
    ends=frozenset(("response.completed", "response.incomplete", "response.failed")),
)
MESSAGES: Final = Dialect(
    "/v1/messages",
    "messages",
    ("max_tokens",),
    classic=False,
    opens=frozenset(("ping",)),
    ends=frozenset(("message_stop",)),
    heartbeat=b'event: ping\ndata: {"type": "ping"}\n\n',  # also before message_start
)
DIALECTS: Final = {one.path: one for one in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
