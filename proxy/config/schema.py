"""The configuration of the proxy: what keys there are, and what makes a value right.

Where values come from, and who wins, is `config_sources.py`.
"""

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from forebay.proxy.config.quantities import seconds, size_bytes
from forebay.proxy.core.model import BackendSpec, Tenant
from forebay.proxy.core.model import Bucket as CoreBucket
from forebay.proxy.core.policy.routes import ROUTES
from forebay.proxy.core.policy.routing import Affinity, Route
from forebay.proxy.share.redis_link import check_url

Seconds = Annotated[float, BeforeValidator(seconds), Field(gt=0)]
NoOrSeconds = Annotated[float, BeforeValidator(seconds), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(size_bytes), Field(gt=0)]
ROUTED = (
    "/v1/models", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize", "/version",
)  # fmt: skip


NAME = r"^[A-Za-z0-9._-]{1,64}$"
MAX_CONCURRENCY = 256
"""Requests that run on a backend, unless stated. KV cache is the limit that counts, and it is
reckoned with; short chats fill a GPU's batch only by the hundred."""
ANSWER_FIRST_TOKENS = 5  # so long a whole answer may take, in units of timeouts.first_token
BURST_S = 60.0  # a tenant's burst, unless stated: what its rate brings in this time


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Listen(_Section):
    """Where to listen; port 0 takes any free one. reuse_port: a second proxy may start beside.

    admin_host: where operators ask, without keys or TLS; null: as host. Keep it private.
    """

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    admin_host: str | None = Field(None, min_length=1)
    admin_port: int = Field(9090, ge=0, le=65535)
    reuse_port: bool = False

    @property
    def asked_at(self) -> str:
        """The host of the admin port, of one process as of many."""
        return self.admin_host or self.host


class BackendConfig(_Section):
    """One vLLM server.

    long_prefill_token_threshold: its flag of that name, if it has one: shorter prefills then pass
    longer ones, and no server need be kept clear of these.
    prefill_piece: it caches prefixes, and prompts whose prefill takes longer go there in pieces of
    about so long while shorter ones come in, which so get in between.
    kv_events, kv_replay: its --kv-events-config's endpoint, as seen from here, and its
    replay_endpoint. With `*` in it the endpoint is bound here, for a vLLM that connects.
    """

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    url: str
    max_concurrency: int = Field(MAX_CONCURRENCY, ge=1)
    long_prefill_token_threshold: int | None = Field(None, ge=1)
    prefill_piece: Seconds | None = None
    kv_events: str | None = None
    kv_replay: str | None = None

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"tcp://[^/]+:\d+|ipc://.+", endpoint):
            raise ValueError("give a ZeroMQ endpoint such as tcp://127.0.0.1:5557")
        return endpoint

    @model_validator(mode="after")
    def _replay_of_something(self) -> Self:
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay replays what kv_events missed: give kv_events too")
        return self

    @field_validator("url")
    @classmethod
    def _base_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            host = parts.hostname
            known = parts.scheme in ("http", "https") and parts.port != 0
        except ValueError:
            known, host = False, None
        if not (known and host):
            raise ValueError("give a URL such as http://127.0.0.1:8001")
        if "@" in parts.netloc:  # even with an empty name, and no key would be sent by it
            raise ValueError(
                "give the server only, such as http://127.0.0.1:8001, without user or password; "
                "a key for the backends is upstream_api_key"
            )
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("give the server only, such as http://127.0.0.1:8001, with no path")
        try:
            host.encode("idna")  # as it is looked up
            named = parts.netloc.isascii()  # as it goes into the Host header
        except UnicodeError:
            named = False
        if not named:
            raise ValueError(
                "no name of a host: give it in ASCII, 1 to 63 characters from dot to dot"
            )
        return f"{parts.scheme}://{parts.netloc}"


class BucketConfig(_Section):
    """A length bucket: requests of up to `up_to` estimated prompt tokens share its queue."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    up_to: int = Field(ge=1)
    max_queue: int = Field(256, ge=0)
    max_wait: Seconds = 30.0
    prefills_per_backend: int | None = Field(None, ge=1)
    backends: tuple[str, ...] = ()


class AffinityConfig(_Section):
    """What a cached prefix is worth. kv_tokens: the KV pool of each backend; auto asks it."""

    block_bytes: int = Field(2048, ge=256, le=65536)
    min_match: float = Field(0.25, ge=0, le=1)
    max_imbalance: float = Field(1.25, ge=1)
    kv_tokens: Literal["auto"] | PositiveInt = "auto"


class Admission(_Section):
    """dispatch_ahead: a backend is sent more while less than this is left for it to prefill.

    itl_slo: fewer requests run on a backend while their tokens come further apart than this.
    """

    dispatch_ahead: Seconds = 0.3
    itl_slo: Seconds | None = None


class Timeouts(_Section):
    """first_token: until the first event of a stream, and for a whole answer of another path.

    answer: for a whole chat or completion that is no stream: its first byte comes with its last
    token, so it gets more; null: five times first_token, so that a shorter one counts here too.
    lame_duck: when told to stop, still take work so long, while /health says no already.
    """

    connect: Seconds = 2.0
    first_token: Seconds = 120.0
    answer: Seconds | None = None
    idle: Seconds = 60.0
    client_headers: Seconds = 10.0
    client_body: Seconds = 30.0
    client_write: Seconds = 30.0
    lame_duck: NoOrSeconds = 0.0
    drain: Seconds = 30.0

    @property
    def whole_answer(self) -> float:
        """`answer`, or what stands for it."""
        return self.answer or ANSWER_FIRST_TOKENS * self.first_token


class Limits(_Section):
    """header: of all fields together. connections: auto is half of the process's descriptors.

    memory: auto is the cgroup's. loop_lag: at a p99 above it the event loop has too much to do
    for batch, at a median above it for standard, too.
    """

    body: Bytes = 16 << 20
    header: Bytes = 16 << 10
    connections: Literal["auto"] | PositiveInt = "auto"
    queue_bytes: Bytes = 256 << 20
    memory: Literal["auto"] | Bytes = "auto"
    loop_lag: Seconds = 0.05
    answer: Bytes = 64 << 20


class HealthConfig(_Section):
    interval: Seconds = 1.0
    timeout: Seconds = 1.0


class Tokens(_Section):
    """bytes_per_token: of prompt text; a start, corrected by the answers' usage."""

    bytes_per_token: float = Field(4.0, gt=0, le=64)


class MetricsConfig(_Section):
    """hlog: a file for the TTFT of each bucket, once a second.

    receipts: how many requests that have ended are remembered for `forebay explain`.
    """

    hlog: Path | None = None
    receipts: int = Field(2_000, ge=0, le=1_000_000)


class Logs(_Section):
    """sample: share of the finished requests that get a line; level debug gives every one its."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"
    sample: float = Field(0.0, ge=0, le=1)


class Tracing(_Section):
    """OpenTelemetry spans (extra `otel`); endpoint takes OTLP over HTTP."""

    enabled: bool = False
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample: float = Field(1.0, ge=0, le=1)
    service_name: str = "forebay"


class KnownTenant(_Section):
    """What one tenant gets; rates are prompt tokens. Tenants of one trust group share caches."""

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst_tokens: float | None = Field(None, gt=0, allow_inf_nan=False)
    trust_group: str | None = Field(None, pattern=NAME)

    @model_validator(mode="after")
    def _burst_of_a_rate(self) -> Self:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s, the rate at which it comes back")
        return self


class Tenants(_Section):
    """keys: a file, or env:NAME for an environment variable; what stands in it, see keys.py.

    isolate_cache: auto is on when there are keys.
    """

    keys: str | None = Field(None, min_length=1)
    default_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    isolate_cache: Literal["auto"] | bool = "auto"
    known: dict[Annotated[str, Field(pattern=NAME)], KnownTenant] = {}

    @property
    def isolates(self) -> bool:
        return self.keys is not None if self.isolate_cache == "auto" else self.isolate_cache


class Tls(_Section):
    """The public port's certificate chain and private key, PEM files; without them, plain HTTP."""

    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("give both cert and key")
        return self

    @property
    def files(self) -> tuple[Path, Path] | tuple[()]:
        return (self.cert, self.key) if self.cert and self.key else ()


class UpstreamTls(_Section):
    """How https backends are checked. ca: PEM file of authorities instead of the system's."""

    ca: Path | None = None
    verify: bool = True


class CaptureConfig(_Section):
    """Traffic written down as a trace. salt: env is FOREBAY_CAPTURE_SALT, which keys its hashes."""

    path: Path | None = None
    salt: Literal["env"] = "env"
    max_size: Bytes = 1 << 30


class ShaperOptions(TypedDict):
    """Keyword arguments of `Shaper` and `Shaper.reconfigure`."""

    route: Route
    affinity: Affinity
    dispatch_ahead_s: float
    tenants: Sequence[Tenant]
    default_weight: float
    itl_slo_s: float


class Config(_Section):
    """Everything."""

    listen: Listen = Listen()
    backends: tuple[BackendConfig, ...] = ()
    buckets: tuple[BucketConfig, ...] = (
        BucketConfig(name="chat", up_to=5_000, max_wait=2.0),
        BucketConfig(
            name="document", up_to=131_072, max_queue=256, max_wait=30.0, prefills_per_backend=1
        ),
    )
    affinity: AffinityConfig = AffinityConfig()
    admission: Admission = Admission()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    health: HealthConfig = HealthConfig()
    tokens: Tokens = Tokens()
    metrics: MetricsConfig = MetricsConfig()
    logs: Logs = Logs()
    tracing: Tracing = Tracing()
    tenants: Tenants = Tenants()
    capture: CaptureConfig = CaptureConfig()
    tls: Tls = Tls()
    upstream_tls: UpstreamTls = UpstreamTls()
    routing: str = "warm_or_least_work"
    routes: tuple[str, ...] = ROUTED
    reject_status: Literal[429, 503] = 429
    debug_headers: bool = False
    cors_origins: tuple[str, ...] = ()
    upstream_api_key: SecretStr | None = None
    share: SecretStr | None = None  # a URL, and it may hold a password

    @field_validator("backends")
    @classmethod
    def _named(cls, backends: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        named = tuple(
            b if b.name else b.model_copy(update={"name": f"gpu{i}"})
            for i, b in enumerate(backends)
        )
        for key in ("name", "url"):
            _unique([getattr(b, key) for b in named], key)
        return named

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[BucketConfig, ...]) -> tuple[BucketConfig, ...]:
        if not buckets:
            raise ValueError("give at least one bucket")
        _unique([b.name for b in buckets], "name")
        limits = [b.up_to for b in buckets]
        if limits != sorted(set(limits)):
            raise ValueError(f"up_to must grow from one bucket to the next, not {limits}")
        return buckets

    @field_validator("routing")
    @classmethod
    def _known(cls, routing: str) -> str:
        if routing not in ROUTES:
            raise ValueError(f"one of {', '.join(ROUTES)}")
        return routing

    @field_validator("share")
    @classmethod
    def _share_url(cls, share: SecretStr | None) -> SecretStr | None:
        if share is not None:
            check_url(share.get_secret_value())
        return share

    @field_validator("routes")
    @classmethod
    def _raw_paths(cls, routes: tuple[str, ...]) -> tuple[str, ...]:
        for path in routes:
            if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", path):
                raise ValueError(f"{path!r} is not a plain path such as /v1/models")
        return routes

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin):
                raise ValueError(f"{origin!r} is not an origin such as https://chat.example.com")
        return origins

    @model_validator(mode="after")
    def _backends_exist(self) -> Self:
        known = {b.name for b in self.backends}
        for bucket in self.buckets:
            if unknown := [name for name in bucket.backends if name not in known]:
                raise ValueError(
                    f"buckets.{bucket.name}.backends: {unknown[0]!r} is no backend; "
                    f"there are {', '.join(sorted(known)) or 'none'}"
                )
        return self

    def core_buckets(self) -> list[CoreBucket]:
        return [
            CoreBucket(
                b.name, b.up_to, b.max_queue, b.max_wait, b.prefills_per_backend or inf, b.backends
            )
            for b in self.buckets
        ]

    def core_backends(self) -> list[BackendSpec]:
        kv_tokens = self.affinity.kv_tokens
        size = inf if kv_tokens == "auto" else float(kv_tokens)
        return [
            BackendSpec(
                b.name,
                b.max_concurrency,
                size,
                b.long_prefill_token_threshold or inf,
                b.prefill_piece or inf,
            )
            for b in self.backends
        ]

    def core_tenants(self) -> list[Tenant]:
        """The tenants with something of their own; others have `tenants.default_weight`."""
        return [
            Tenant(
                name,
                one.weight or self.tenants.default_weight,
                one.tokens_per_s or inf,
                one.burst_tokens or (one.tokens_per_s or inf) * BURST_S,
            )
            for name, one in self.tenants.known.items()
        ]

    def shaper_options(self) -> ShaperOptions:
        """What `Shaper` and its `reconfigure` take beside backends and buckets."""
        return {
            "route": ROUTES[self.routing],
            "affinity": self.core_affinity(),
            "dispatch_ahead_s": self.admission.dispatch_ahead,
            "tenants": self.core_tenants(),
            "default_weight": self.tenants.default_weight,
            "itl_slo_s": self.admission.itl_slo or inf,
        }

    def core_affinity(self) -> Affinity:
        return Affinity(self.affinity.min_match, self.affinity.max_imbalance)

    def max_connections(self) -> float:
        """Client connections at once."""
        if self.limits.connections != "auto":
            return self.limits.connections
        try:
            import resource
        except ImportError:  # Windows: no such limit
            return inf
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 2


def _unique(values: list[Any], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"the {what} {value!r} is there twice")
