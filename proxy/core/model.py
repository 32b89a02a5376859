"""What the shaper is told and what it answers. Times are seconds on the caller's clock."""

from dataclasses import dataclass
from math import inf
from typing import Literal

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
    """A vLLM server.

    Attributes:
        kv_tokens: the size of its KV pool; infinite when unknown.
        chunk_tokens: of one prompt it computes at most so many in a step while there are others
            (`--long-prefill-token-threshold`), so that shorter prefills pass longer ones;
            infinite: they are computed one after the other.
        piece_s: it caches prefixes, and long prompts go there in pieces of about so many seconds
            of prefill (`pieces.py`); infinite: whole.
    """

    name: str
    max_concurrency: int
    kv_tokens: float = inf
    chunk_tokens: float = inf
    piece_s: float = inf


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


class _Told:
    """What the shaper is told or answers: equal when all values are.

    Plain classes, not named tuples: compiled, these are made and read without the interpreter,
    and a simulation makes two a request.
    """

    __slots__ = ()

    def values(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Told)
            and type(self) is type(other)
            and self.values() == other.values()
        )

    def __hash__(self) -> int:
        return hash(self.values())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.values()}>"


class Request(_Told):
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
        whole: its prompt cannot be sent in pieces.
    """

    __slots__ = (
        "block_tokens",
        "blocks",
        "id",
        "output_tokens",
        "prompt_tokens",
        "service_class",
        "streams",
        "tenant",
        "timeout_s",
        "whole",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_tokens: int = 0,
        blocks: tuple[int, ...] = (),
        block_tokens: float = 512.0,
        timeout_s: float = inf,
        streams: bool = True,
        tenant: str = "",
        service_class: ServiceClass = "standard",
        whole: bool = False,
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.timeout_s = timeout_s
        self.streams = streams
        self.tenant = tenant
        self.service_class = service_class
        self.whole = whole

    def values(self) -> tuple[object, ...]:
        lengths = self.prompt_tokens, self.output_tokens, self.blocks, self.block_tokens
        return self.id, *lengths, self.timeout_s, self.streams, self.tenant, self.service_class


class Send(_Told):
    """Send the request to `backend` now; its slot is taken until `finish`.

    `piece_blocks`: only so many leading blocks of its prompt, for one token that nobody sees, until
    `computed`; 0: the request itself.
    """

    __slots__ = (
        "backend",
        "bucket",
        "matched_tokens",
        "piece_blocks",
        "predicted_ttft_s",
        "queued_s",
        "request",
    )

    def __init__(
        self,
        request: Request,
        backend: str,
        bucket: str,
        queued_s: float,
        predicted_ttft_s: float,
        matched_tokens: int,
        piece_blocks: int = 0,
    ) -> None:
        self.request = request
        self.backend = backend
        self.bucket = bucket
        self.queued_s = queued_s
        self.predicted_ttft_s = predicted_ttft_s
        self.matched_tokens = matched_tokens
        self.piece_blocks = piece_blocks

    def values(self) -> tuple[object, ...]:
        predicted = self.predicted_ttft_s, self.matched_tokens, self.piece_blocks
        return self.request, self.backend, self.bucket, self.queued_s, *predicted


class Reject(_Told):
    """Answer the request at once; `retry_after_s` is when capacity is predicted to be back.

    `hopeless`: with nothing else to do, no backend would answer it in the client's time either.
    """

    __slots__ = ("bucket", "hopeless", "queued_s", "reason", "request", "retry_after_s")

    def __init__(
        self,
        request: Request,
        reason: RejectReason,
        bucket: str,
        queued_s: float,
        retry_after_s: float,
        hopeless: bool = False,
    ) -> None:
        self.request = request
        self.reason = reason
        self.bucket = bucket
        self.queued_s = queued_s
        self.retry_after_s = retry_after_s
        self.hopeless = hopeless

    def values(self) -> tuple[object, ...]:
        when = self.queued_s, self.retry_after_s, self.hopeless
        return self.request, self.reason, self.bucket, *when


Action = Send | Reject
