"""The configuration of the proxy: its keys, defaults and allowed values.

Sections that do not concern the policy are in `sections.py`. Values come from files, the
environment and flags (`sources.py`).
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Literal, Self, TypedDict

from pydantic import Field, PositiveInt, SecretStr, field_validator, model_validator

from forebay.proxy.config.backends import BackendConfig, ModelName, lanes
from forebay.proxy.config.checks import check_origins, check_paths, check_share_url, check_unique
from forebay.proxy.config.paths import ROUTED
from forebay.proxy.config.routes import find_route, route_names
from forebay.proxy.config.sections import (
    CaptureConfig,
    HealthConfig,
    Limits,
    Listen,
    Logs,
    MetricsConfig,
    Retries,
    Seconds,
    Section,
    Timeouts,
    Tls,
    Tokens,
    Tracing,
    UpstreamTls,
    UsageConfig,
)
from forebay.proxy.config.tenants import Tenants
from forebay.proxy.core.model import BackendSpec, Tenant
from forebay.proxy.core.model import Bucket as CoreBucket
from forebay.proxy.core.policy.routing import ROUTES, Affinity, Route
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError

CHAT, DOCUMENT = DEFAULT_BUCKETS
BURST_S = 60.0  # a tenant's default burst: the tokens its rate brings in this time


class BucketConfig(Section):
    """A length bucket: requests of up to `up_to` estimated prompt tokens share a queue.

    name: its name in metrics, logs and the header x-forebay-bucket.
    up_to: the longest prompt of this bucket, in estimated tokens.
    max_queue: waiting requests of each model; the next request is rejected.
    max_wait: no request waits longer.
    target: a first token within this time of the arrival is in time; null: max_wait, at most 15s. A
    request that is expected to be late is rejected, unless what delays it is no overload.
    prefills_per_backend: prefills of this bucket that may run at once on one backend.
    backends: names of the backends that it may use; empty: all.
    """

    name: str = Field(pattern=r"^[a-z0-9_-]{1,32}$")
    up_to: int = Field(ge=1)
    max_queue: int = Field(1024, ge=0)
    max_wait: Seconds = 30.0
    target: Seconds | None = None
    prefills_per_backend: int | None = Field(None, ge=1)
    backends: tuple[str, ...] = ()

    @property
    def target_s(self) -> float:
        return min(DOCUMENT.target_s, self.max_wait) if self.target is None else self.target


class AffinityConfig(Section):
    """Routing to cached prefixes.

    block_bytes: prompt bytes in one block of the prefix index.
    min_match: share of the prompt that must be cached for the cache to count in routing.
    max_imbalance: has no effect any more; accepted so that existing files load.
    kv_tokens: size of each backend's KV cache in tokens; auto asks the backend.
    """

    block_bytes: int = Field(512, ge=256, le=65536)
    min_match: float = Field(0.25, ge=0, le=1)
    max_imbalance: float = Field(1.25, ge=1)
    kv_tokens: Literal["auto"] | PositiveInt = "auto"


class Observe(Section):
    """Settings of `mode: observe`.

    routing: the rule by which it picks a server.
    """

    routing: Literal["least_connections", "fewest_tokens", "least_work", "warm_or_least_work"] = (
        "least_connections"
    )


class HoldConfig(Section):
    """Requests that are kept while no backend of their model is up.

    max_requests: most held requests, each for at most its bucket's max_wait; 0: 503 at once.
    """

    max_requests: int = Field(0, ge=0)


class Admission(Section):
    """When requests are sent.

    dispatch_ahead: a backend is sent more work while it has less than this left to prefill; a
    quarter of it while several tenants are active.
    sdk_timeout: the timeout that OpenAI's Python client sends counts as the client's deadline.
    """

    dispatch_ahead: Seconds = 0.3
    sdk_timeout: bool = True


class ShaperOptions(TypedDict):
    """Keyword arguments of `Shaper` and `Shaper.reconfigure`."""

    route: Route
    affinity: Affinity
    dispatch_ahead_s: float
    tenants: Sequence[Tenant]
    default_weight: float
    observed: Route | None


class Config(Section):
    """The whole configuration.

    routing: the rule that picks a backend: warm_or_least_work, least_work, fewest_tokens, the name
    of a plug-in, or FILE.py:FUNCTION.
    routes: paths that any backend may answer; all other paths are 404.
    reject_status: status of a rejection for load: 429 or 503.
    debug_headers: name the backend and the prediction in each response.
    cors_origins: web pages of these origins may call the proxy from a browser.
    upstream_api_key: bearer token for the backends; better in FOREBAY_UPSTREAM_API_KEY.
    share: redis:// URL through which several proxies exchange their load.
    models: other names for models, such as `gpt-4o-mini: llama-3-8b`: requests for the first name
    go to backends that serve the second.
    backends_file: a file with a list of more backends, which another program may write.
    mode: observe sends each request at once, and only counts what would have been decided.
    """

    listen: Listen = Listen()
    backends: tuple[BackendConfig, ...] = ()
    buckets: tuple[BucketConfig, ...] = (
        BucketConfig(name=CHAT.name, up_to=CHAT.up_to, target=CHAT.target_s),
        BucketConfig(
            name=DOCUMENT.name,
            up_to=DOCUMENT.up_to,
            target=DOCUMENT.target_s,
            prefills_per_backend=1,
        ),
    )
    affinity: AffinityConfig = AffinityConfig()
    admission: Admission = Admission()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
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
    share: SecretStr | None = None  # secret, because the URL may hold a password
    backends_file: Path | None = None
    models: dict[ModelName, ModelName] = Field(default_factory=dict)
    mode: Literal["shape", "observe"] = "shape"
    observe: Observe = Observe()
    hold: HoldConfig = HoldConfig()
    usage: UsageConfig = UsageConfig()

    @field_validator("backends")
    @classmethod
    def _named(cls, backends: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        named = tuple(
            b if b.name else b.model_copy(update={"name": f"gpu{i}"})
            for i, b in enumerate(backends)
        )
        check_unique([lane.name for b in named for lane in lanes(b)], "name")
        check_unique([b.url for b in named], "url")
        return named

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[BucketConfig, ...]) -> tuple[BucketConfig, ...]:
        if not buckets:
            raise ValueError("give at least one bucket")
        check_unique([b.name for b in buckets], "name")
        limits = [b.up_to for b in buckets]
        if limits != sorted(set(limits)):
            raise ValueError(f"up_to must grow from one bucket to the next, not {limits}")
        return buckets

    @field_validator("routing")
    @classmethod
    def _known(cls, routing: str) -> str:
        try:
            route = find_route(routing)
        except InputError as error:
            raise ValueError(str(error)) from error
        if route is None:
            raise ValueError(
                f"one of {', '.join(route_names())}, or a function in a file: FILE.py:NAME"
            )
        return routing

    @field_validator("share")
    @classmethod
    def _share_url(cls, share: SecretStr | None) -> SecretStr | None:
        if share is not None:
            check_share_url(share.get_secret_value())
        return share

    @field_validator("routes")
    @classmethod
    def _raw_paths(cls, routes: tuple[str, ...]) -> tuple[str, ...]:
        check_paths(routes)
        return routes

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        check_origins(origins)
        return origins

    @model_validator(mode="after")
    def _backends_exist(self) -> Self:
        names = {b.name for b in self.backends}
        for bucket in self.buckets:
            if unknown := [name for name in bucket.backends if name not in names]:
                raise ValueError(
                    f"buckets.{bucket.name}.backends: {unknown[0]!r} is no backend; "
                    f"there are {', '.join(sorted(names)) or 'none'}"
                )
        return self

    def key_header(self) -> dict[str, str]:
        """The header with the proxy's own key for the backends, empty without a key."""
        key = self.upstream_api_key
        return {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}

    def core_buckets(self) -> list[CoreBucket]:
        return [
            CoreBucket(
                b.name,
                b.up_to,
                b.max_queue,
                b.max_wait,
                b.prefills_per_backend or inf,
                b.backends,
                b.target_s,
            )
            for b in self.buckets
        ]

    def core_backends(self) -> list[BackendSpec]:
        kv_tokens = self.affinity.kv_tokens
        size = inf if kv_tokens == "auto" else float(kv_tokens)
        return [
            BackendSpec(b.name, b.max_concurrency, size, b.chunk_tokens, b.priority, b.scheduler)
            for b in self.backends
        ]

    def core_tenants(self) -> list[Tenant]:
        """The configured tenants. All others have `tenants.default_weight`."""
        return [
            Tenant(
                name,
                tenant.weight or self.tenants.default_weight,
                tenant.tokens_per_s or inf,
                tenant.burst_tokens or (tenant.tokens_per_s or inf) * BURST_S,
                tenant.classes,
            )
            for name, tenant in self.tenants.known.items()
        ]

    def shaper_options(self) -> ShaperOptions:
        """Options of `Shaper` and `Shaper.reconfigure`, besides backends and buckets."""
        route = find_route(self.routing)
        assert route is not None  # checked when the configuration was read
        return {
            "route": route,
            "affinity": Affinity(self.affinity.min_match),
            "dispatch_ahead_s": self.admission.dispatch_ahead,
            "tenants": self.core_tenants(),
            "default_weight": self.tenants.default_weight,
            "observed": ROUTES[self.observe.routing] if self.mode == "observe" else None,
        }

    def max_connections(self) -> float:
        """The most client connections at once."""
        if self.limits.connections != "auto":
            return self.limits.connections
        try:
            import resource
        except ImportError:  # Windows: no such limit
            return inf
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 2
