"""Values that go into the policy and come out. Times are seconds on the caller's clock."""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal

INSTANT_S: Final = 0.05
"""About one engine step of decoding: what lies less apart happens at once. Prefills that end
within it are measured together, a waiting request is offered to another backend once in it, and the
ratio of two shorter times says nothing. Doubled: stealing and learning react 0.05 s later."""
MAJORITY: Final = 0.5
"""The share of a whole that speaks for all of it. Learning: two prefills of half a prompt's size
prove its prediction, a block in half of the prompts is common to them, and one report of a cache
that keeps less moves the estimate half of the way. Waiting: a request has waited long after half of
the time to its deadline, and no tenant holds half of a queue while another is active. Engines: one
request reserves at most half of the KV pool for its output, and a request that takes half of an
engine leaves another engine to other tenants. Doubled (the whole): nothing is proven by less than
all, shares of buckets never apply, one tenant may fill a queue, and one request an engine."""
SLACK: Final = 0.1
"""The share of a whole that changes nothing. Scores of two backends are equal if they differ by
at most this share of a cold prefill. This share of a prompt's blocks may stay untranslated. More
urgent work that takes less of an engine leaves the order as it is. A prefill that is over its
prediction still counts for this share of it. A resource this far below its limit is calm. Doubled:
load is balanced at the cost of longer waits, and the engine may run empty behind a late prefill."""
FULL: Final = 0.95
"""The share of a resource that can be used. Above it an engine preempts requests or lets them wait
for KV cache, and a request behind more urgent requests would be predicted to wait for ever. It
cannot be doubled. At 0.9 a tenth of the KV pool stays empty."""
HISTORY: Final = 256
"""How many recent answers, prompts, rejections, ratios, tenants or steps of a request a statistic,
report or record covers. Older entries fade or are left out. Doubled: twice the memory and bytes,
and half the speed of following a change."""
REMEMBERED_MOST: Final = 8_192
"""Things that clients can make the policy remember: tenants that no configuration lists, rejected
prompts. Doubled: about 8 MiB more."""
LOOK_AT_MOST: Final = 8
"""The things that one decision looks at one by one, a bound of its CPU time. A fleet of up to this
many backends is priced completely. In a larger fleet at most this many backends that may hold the
prefix are priced. Of more flows that wait, only sums are looked at. At most this many rejected
requests of a bucket are followed. Doubled: an arrival in a fleet of 16 costs twice."""
ENOUGH: Final = 20
"""Observations that make a statistic: an average forgets over this number, and a quantile or share
is used from this number on. Doubled: steadier, and twice as late."""

RejectReason = Literal[
    "queue_full",  # the bucket's queue holds max_queue requests
    "deadline_unattainable",  # the predicted wait is too long, or the deadline passed in the queue
    "no_backend_available",  # every backend of the bucket is down
    "prompt_too_long",  # beyond every bucket
    "tenant_quota",  # the tenant's quota is used up
]

SchedulerName = Literal["vllm", "forebay"]
ServiceClass = Literal["interactive", "standard", "batch"]  # the most urgent first
CLASSES: tuple[ServiceClass, ...] = ("interactive", "standard", "batch")
RANKS: dict[str, int] = {name: rank for rank, name in enumerate(CLASSES)}
STANDARD = RANKS["standard"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A length bucket: requests of up to `up_to` prompt tokens share one bounded queue.

    Attributes:
        up_to: largest prompt, in estimated tokens.
        max_queue: requests that may wait; further requests are rejected.
        max_wait_s: longest wait before dispatch.
        prefills_per_backend: requests that may be in prefill on one backend at once, without hits.
        backends: names of the backends it may use; empty means all.
        target_s: a first token within this time of the arrival is in time; infinite: only the wait
            is limited.
    """

    name: str
    up_to: int
    max_queue: int = 1024
    max_wait_s: float = 30.0
    prefills_per_backend: float = inf
    backends: tuple[str, ...] = ()
    target_s: float = inf

    def __post_init__(self) -> None:
        assert self.up_to > 0
        assert self.max_queue >= 0
        assert self.prefills_per_backend >= 1
        assert self.target_s > 0

    @property
    def patience_s(self) -> float:
        """Longest wait of a request that is in time. Buckets with less patience are more urgent."""
        return min(self.target_s, self.max_wait_s)

    @property
    def deadline_s(self) -> float:
        """When a request should have been sent, for the order of queues.

        A request has waited long after half of that time, which is three quarters of its patience.
        So the share of its bucket helps it before it is late.
        """
        return (1.0 + MAJORITY) * self.patience_s


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A vLLM server.

    Attributes:
        kv_tokens: size of its KV pool; infinite if unknown.
        chunk_tokens: `--long-prefill-token-threshold`: the engine computes at most this many tokens
            of one prompt per step while others wait, so shorter prefills pass longer prefills.
            Infinite: prefills are computed one after the other.
        scheduler: "forebay" for an engine with Forebay's scheduler (`policy/engine_step.py`).
        priority: `--scheduling-policy priority`: the engine begins waiting prefills in the order of
            priority, the lowest first. Off: in the order of arrival.
    """

    name: str
    max_concurrency: int
    kv_tokens: float = inf
    chunk_tokens: float = inf
    priority: bool = False
    scheduler: SchedulerName = "vllm"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: requests that share a weight and a quota.

    Attributes:
        weight: its share of prefill seconds, relative to other tenants with waiting requests.
        tokens_per_s: prompt tokens that it may send per second in the long run.
        burst_tokens: prompt tokens that it may send at once.
        classes: classes that count among the requests of all tenants. Any other class orders the
            tenant's own requests only.
    """

    name: str
    weight: float = 1.0
    tokens_per_s: float = inf
    burst_tokens: float = inf
    classes: tuple[ServiceClass, ...] = ()

    def __post_init__(self) -> None:
        assert self.weight > 0
        assert self.tokens_per_s > 0
        assert self.burst_tokens > 0


class _Value:
    """Base of values that are equal if all their fields are.

    Plain classes, not named tuples: compiled code makes and reads them without the interpreter,
    and a simulation makes two per request.
    """

    def values(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Value)
            and type(self) is type(other)
            and self.values() == other.values()
        )

    def __hash__(self) -> int:
        return hash(self.values())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.values()}>"


class Request(_Value):
    """A request as the policy sees it: lengths and hashes, no text. It never changes.

    Attributes:
        prompt_tokens: estimated.
        output_tokens: the most it may generate, all sequences together (max_tokens for each),
            estimated if not stated.
        blocks: chained hashes of the prompt's full blocks. Prompts with equal leading hashes share
            that prefix.
        block_tokens: estimated tokens in one block.
        timeout_s: the client wants its first token within this time after arrival.
        streams: its first token can be seen, and ends its prefill. Otherwise the prefill ends at
            its predicted end.
        tenant: the tenant that it counts for; "" without tenants.
        service_class: its urgency.
        pure: nothing but its prefill comes before its first token: no fetched image, no grammar.
        sequences: outputs that the engine generates side by side: n for each of its prompts.
        quota_tokens: the charge of a quota until the engine has counted the prompt; 0: the prompt
            tokens are no estimate.
        identity: equal for equal prompts; 0 if unknown.
        home: the backend that keeps the earlier response of the prompt, or "".
        model: only backends that serve it may take the request; "": any may.
        reads_cache: cached blocks of its prompt need no prefill. Its own blocks are cached anyway.
    """

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
        pure: bool = True,
        sequences: int = 1,
        quota_tokens: int = 0,
        identity: int = 0,
        home: str = "",
        model: str = "",
        reads_cache: bool = True,
    ) -> None:
        self.id: Final = id
        self.prompt_tokens: Final = prompt_tokens
        self.output_tokens: Final = output_tokens
        self.blocks: Final = blocks
        self.block_tokens: Final = block_tokens
        self.timeout_s: Final = timeout_s
        self.streams: Final = streams
        self.tenant: Final = tenant
        self.service_class: Final = service_class
        self.pure: Final = pure
        self.sequences: Final = sequences
        self.quota_tokens: Final = quota_tokens
        self.identity: Final = identity
        self.home: Final = home
        self.model: Final = model
        self.reads_cache: Final = reads_cache

    @property
    def charged_tokens(self) -> int:
        """Prompt tokens that a quota is charged when the request is admitted."""
        return max(self.prompt_tokens, self.quota_tokens)

    def with_(self, **changes: Any) -> "Request":
        """Return a copy in which these attributes differ."""
        fields: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "blocks": self.blocks,
            "block_tokens": self.block_tokens,
            "timeout_s": self.timeout_s,
            "streams": self.streams,
            "tenant": self.tenant,
            "service_class": self.service_class,
            "pure": self.pure,
            "sequences": self.sequences,
            "quota_tokens": self.quota_tokens,
            "identity": self.identity,
            "home": self.home,
            "model": self.model,
            "reads_cache": self.reads_cache,
        }
        return Request(**{**fields, **changes})

    def values(self) -> tuple[object, ...]:
        lengths = self.prompt_tokens, self.output_tokens, self.blocks, self.block_tokens
        kind = self.streams, self.tenant, self.service_class, self.sequences
        return self.id, *lengths, self.timeout_s, *kind


class Send(_Value):
    """Send the request to `backend` now. It holds a slot until `finish`.

    `priority` goes to the engine. It is None where the engine does not order by priority.
    """

    def __init__(
        self,
        request: Request,
        backend: str,
        bucket: str,
        queued_s: float,
        predicted_ttft_s: float,
        matched_tokens: int,
        priority: int | None = None,
    ) -> None:
        self.request = request
        self.backend = backend
        self.bucket = bucket
        self.queued_s = queued_s
        self.predicted_ttft_s = predicted_ttft_s
        self.matched_tokens = matched_tokens
        self.priority = priority

    def values(self) -> tuple[object, ...]:
        predicted = self.predicted_ttft_s, self.matched_tokens
        return self.request, self.backend, self.bucket, self.queued_s, *predicted, self.priority


class Reject(_Value):
    """Reject the request at once. Capacity is predicted to be back after `retry_after_s`.

    `hopeless`: even an idle backend would take far longer than the client waits.
    """

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


def serves(models: Container[str] | None, model: str) -> bool:
    """True if a backend of these models may serve `model`. None is unknown, "" is any model."""
    return not model or models is None or model in models


class UpModels:
    """Counts the models of the backends that are up, once for all questions.

    Args:
        served: the models of each backend; None where they are unknown.
    """

    def __init__(self, served: Iterable[frozenset[str] | None]) -> None:
        up = list(served)
        self._count = len(up)
        self._unknown = up.count(None)
        self._serving = Counter(model for models in up for model in models or ())

    def only_its(self, models: frozenset[str] | None, *, up: bool) -> frozenset[str] | None:
        """Return the models of a backend that no other serves. None: all, as far as known.

        Args:
            models: the models of that backend; None if they are unknown.
            up: that backend is up, so it was counted.
        """
        unknown = self._unknown - (up and models is None)
        if models is None or unknown:
            return frozenset() if self._count > up else None
        rest = frozenset(model for model in models if self._serving[model] <= up)
        return None if rest == models else rest
