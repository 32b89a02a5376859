"""What is known of one request when it ends: for the log, the metrics and the trace.

Nothing in it comes from a prompt, a query or an Authorization header.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.proxy.core.model import Request, Send

if TYPE_CHECKING:
    from forebay.proxy.telemetry.tracing import RequestSpan

CLIENT_GONE = 499  # the status logs give to a request whose client left first, as nginx does


@dataclass(slots=True)
class RequestRecord:
    """Times are of the event loop's clock; None: it did not get so far.

    Attributes:
        operation: as OpenTelemetry names it: chat or text_completion; "" if it is not shaped.
        request: as the policy sees it, once the body is understood; `token_ids` says that the
            prompt came as these.
        reason: the code of the error it was answered with.
        cached_tokens: of its prompt, found in the backend's cache before any of it was computed.
        computed_tokens: of its prompt, what pieces of it had computed there, as the backend counts.
    """

    id: str
    arrived_at: float
    operation: str = ""
    bucket: str = "none"
    tenant: str = ""
    service_class: str = ""
    backend: str = ""
    queued_s: float | None = None
    predicted_ttft_s: float | None = None
    sent_at: float | None = None
    first_token_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    reason: str = ""
    request: Request | None = None
    token_ids: bool = False
    span: "RequestSpan | None" = None

    def sent(self, send: Send, now: float) -> None:
        """It has a slot on a backend: the first, or another after a failure."""
        if send.backend != self.backend:
            self.computed_tokens = 0  # elsewhere
        self.bucket, self.backend = send.bucket, send.backend
        self.queued_s, self.sent_at = send.queued_s, now
        self.predicted_ttft_s = send.predicted_ttft_s
        if self.span is not None:
            self.span.sent(self)

    def first_token(self, now: float) -> None:
        self.first_token_at = now
        if self.span is not None:
            self.span.first_token()

    def piece(self, cached_tokens: int | None, prompt_tokens: int) -> None:
        """A piece of its prompt is computed; None: the backend did not say what was cached."""
        if cached_tokens is not None:
            self.computed_tokens += prompt_tokens - cached_tokens

    def used(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """As the backend counted."""
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = max(0, cached_tokens - self.computed_tokens)
        self.output_tokens = output_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    def time_per_output_token_s(self, now: float) -> float | None:
        """Of a streamed answer that ends now; None with fewer than two tokens."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (now - self.first_token_at) / (self.output_tokens - 1)
