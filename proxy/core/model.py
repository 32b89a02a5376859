"""What the shaper is told and what it answers. Times are seconds on the caller's clock."""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

RejectReason = Literal[
    "queue_full",  # the bucket's queue holds max_queue already
    "deadline_unattainable",  # the predicted wait is too long, or the deadline passed in the queue
    "no_backend_available",  # every backend of the bucket is down
    "prompt_too_long",  # beyond every bucket
    "tenant_quota",  # the tenant's token bucket is empty
]

ServiceClass = Literal["interactive", "standard", "batch"]  # the most urgent first
CLASSES: tuple[ServiceClass, ...] = ("interactive", "standard", "batch")
RANKS: dict[str, int] = {name: rank for rank, name in enumerate(CLASSES)}
STANDARD = RANKS["standard"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A length bucket: requests of up to `up_to` prompt tokens share one bounded queue.

    Attributes:
        up_to: largest prompt, in estimated tokens.
        max_queue: requests that may wait; one more is refused.
        max_wait_s: longest wait before dispatch.
        prefills_per_backend: how many of the bucket may be in prefill at once on one backend.
        backends: names it may use; empty means all.
    """

    name: str
    up_to: int
    max_queue: int = 256
    max_wait_s: float = 30.0
    prefills_per_backend: float = inf
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.up_to > 0
        assert self.max_queue >= 0
        assert self.prefills_per_backend >= 1


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A vLLM server. `kv_tokens` is the size of its KV pool in tokens, infinite when unknown."""

    name: str
    max_concurrency: int
    kv_tokens: float = inf


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who shares the backends with whom.

    Attributes:
        weight: its share of prefill seconds, relative to other tenants that have work waiting.
        tokens_per_s: prompt tokens it may send a second in the long run.
        burst_tokens: prompt tokens it may send at once.
    """

    name: str
    weight: float = 1.0
    tokens_per_s: float = inf
    burst_tokens: float = inf

    def __post_init__(self) -> None:
        assert self.weight > 0
        assert self.tokens_per_s > 0
        assert self.burst_tokens > 0


class Request(NamedTuple):
    """A request as the policy sees it: lengths and hashes, never text.

    Attributes:
        prompt_tokens: estimated.
        output_tokens: the most it may generate (max_tokens), estimated when not stated.
        blocks: chained hashes of the prompt's full blocks; equal leading hashes, equal prefix.
        block_tokens: estimated tokens in one of those blocks.
        timeout_s: the client wants its first token within this time of arrival.
        streams: the first token can be seen; otherwise only the end of the answer can.
        tenant: who pays for it; "" when tenants are not told apart.
        service_class: how urgent it is to its sender.
    """

    id: str
    prompt_tokens: int
    output_tokens: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: float = 512.0
    timeout_s: float = inf
    streams: bool = True
    tenant: str = ""
    service_class: ServiceClass = "standard"


class Send(NamedTuple):
    """Send the request to `backend` now; its slot is taken until `finish`."""

    request: Request
    backend: str
    bucket: str
    queued_s: float
    predicted_ttft_s: float
    matched_tokens: int


class Reject(NamedTuple):
    """Answer the request at once; `retry_after_s` is when capacity is predicted to be back."""

    request: Request
    reason: RejectReason
    bucket: str
    queued_s: float
    retry_after_s: float


Action = Send | Reject
