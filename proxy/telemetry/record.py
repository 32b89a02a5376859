"""The record of one request, for the access log, the metrics, the trace and the capture.

Nothing in it comes from a prompt, a query or an Authorization header.
"""

from dataclasses import dataclass, field
from typing import Protocol

from forebay.proxy.core.model import Request, Send

CLIENT_GONE = 499  # the status in logs if the client has left, as in nginx
CUT = "upstream_stream_error"  # the reason of a response that ended too early


class RequestSpan(Protocol):
    """The trace span of one request (`tracing.py`)."""

    def headers(self) -> dict[str, str]: ...
    def sent(self, backend: str, queued_s: float) -> None: ...
    def first_token(self) -> None: ...
    def finished(self, record: "RequestRecord", status: int) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are on the event loop's clock, None if the request did not get so far.

    Attributes:
        upstream_id: the id for the backends; other than `id` while an equal id is served.
        written: the head of the request was written to a backend.
        operation: OpenTelemetry's name: chat or text_completion; "" for a path that is not shaped.
        path: path of the API, for a request whose work is charged; "" for others.
        estimated_tokens: estimate for a request that is not shaped, until a backend counts.
        model: as the backends know it.
        request: the request as the policy sees it, once the body is parsed.
        held_s: waited before it entered the queue from which it was sent (`hold`).
        token_ids: the prompt came as token ids.
        reason: code of the error that was returned.
        rejected: it was counted among the rejections.
        continued_after: output tokens that the client had when another backend went on.
        cached_tokens: prompt tokens found in the backend's cache.
        counts_as: the name in `tenants.known` whose limits and share hold for its tenant.
        admitted: it counts among its tenant's requests, with `reserved_tokens` of its budgets.
        cors: headers of each of its responses, for a page of another origin.
    """

    id: str
    arrived_at: float
    upstream_id: str = ""
    written: bool = False
    operation: str = ""
    path: str = ""
    estimated_tokens: int = 0
    bucket: str = "none"
    tenant: str = ""
    service_class: str = ""
    model: str = ""
    backend: str = ""
    queued_s: float | None = None
    held_s: float = 0.0
    predicted_ttft_s: float | None = None
    sent_at: float | None = None
    first_token_at: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    continued_after: int = 0
    reason: str = ""
    rejected: bool = False
    request: Request | None = None
    token_ids: bool = False
    counts_as: str = ""
    admitted: bool = False
    reserved_tokens: int = 0
    cors: dict[str, str] = field(default_factory=dict)
    span: "RequestSpan | None" = None

    def sent(self, send: Send, now: float) -> None:
        """The request has been sent to a backend, perhaps again after a failure."""
        self.bucket, self.backend = send.bucket, send.backend
        self.queued_s, self.sent_at = self.held_s + send.queued_s, now
        self.predicted_ttft_s = send.predicted_ttft_s
        if self.span is not None:
            self.span.sent(send.backend, send.queued_s)

    def wrote(self) -> None:
        self.written = True

    def first_token(self, now: float) -> None:
        self.first_token_at = now
        if self.span is not None:
            self.span.first_token()

    def used(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Store the usage that the backend reported."""
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens

    def decision_headers(self, *, debug: bool) -> dict[str, str]:
        """Return response headers about the decisions on the request, as far as it got.

        Args:
            debug: also where it was sent, and the predicted wait.
        """
        headers = {}
        if self.bucket != "none":
            headers["x-forebay-bucket"] = self.bucket
        if self.queued_s is not None:
            headers["x-forebay-queue-ms"] = f"{self.queued_s * 1e3:.1f}"
        if debug and self.predicted_ttft_s is not None:
            headers["x-forebay-backend"] = self.backend
            headers["x-forebay-predicted-ms"] = f"{self.predicted_ttft_s * 1e3:.1f}"
        return headers

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    def time_per_output_token_s(self, now: float) -> float | None:
        """Return the TPOT of a stream that ends now, or None with fewer than two tokens."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (now - self.first_token_at) / (self.output_tokens - 1)
