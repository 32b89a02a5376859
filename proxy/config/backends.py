"""The keys of one backend, and the lanes that a server with several ranks becomes."""

from math import inf
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from forebay.proxy.config.checks import check_rank_ports, check_zmq_endpoint, checked_base_url
from forebay.proxy.config.sections import Section
from forebay.proxy.core.model import SchedulerName

MAX_CONCURRENCY = 640
"""Default bound of running requests on a backend. The real limit is the KV cache, which the policy
models. At 512, 98.3 % of Azure's conversations are in time at 1.24 times the capacity, at 640 or
1,024 99.8 %. At twice the capacity 0.8, 1.3 and 3.6 % of those admitted are late (six seeds)."""
BOUNDED_TOKENS: Final = 2048
"""Forebay's scheduler is forecast as an engine that chunks prompts by this many tokens. From 1,024
to 8,192 chats' p99 on two engines differs by 9 % at 80 % load. Documents' p99 is best here."""
MOST_RANKS: Final = 64  # data-parallel ranks of one server
RANK_HEADER: Final = "x-data-parallel-rank"  # vLLM then takes this rank, not the least busy one
ModelName = Annotated[str, Field(min_length=1)]


class BackendConfig(Section):
    """One vLLM server.

    name: its name in logs, metrics and `buckets[].backends`; default: gpu0, gpu1, ... in order.
    url: base URL of the server, without /v1. It may have a path, as in https://host/team-a.
    max_concurrency: requests that may run there at once.
    long_prefill_token_threshold: the server's flag of that name, if it is set (recommended: 2048).
    Shorter prefills then overtake longer ones.
    scheduler: forebay if the server runs with Forebay's scheduler (--scheduler-cls). It lets short
    prompts pass and needs no such flag.
    priority: the server runs with --scheduling-policy priority. Requests then carry a `priority`
    that keeps Forebay's order of classes and tenants in the server's own queue.
    kv_events: endpoint of the server's --kv-events-config, as seen from here. An endpoint with `*`
    is bound here, for a vLLM that connects to it.
    kv_replay: replay_endpoint of the same.
    models: names of the models that it serves; empty: it is asked by GET /v1/models.
    data_parallel: number of the server's data-parallel ranks (--data-parallel-size behind one
    URL). With more than one, each rank is a backend of its own, such as gpu0-rank0.
    dns: the host in `url` is a name of several servers, such as a headless service of Kubernetes.
    Each of its addresses is a backend.
    max_addresses: most addresses of such a name that are used.
    """

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    url: str
    max_concurrency: int = Field(MAX_CONCURRENCY, ge=1)
    long_prefill_token_threshold: int | None = Field(None, ge=1)
    scheduler: SchedulerName = "vllm"
    priority: bool = False
    kv_events: str | None = None
    kv_replay: str | None = None
    models: tuple[ModelName, ...] = ()
    data_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    dns: bool = False
    max_addresses: int = Field(256, ge=1, le=10_000)

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            check_zmq_endpoint(endpoint)
        return endpoint

    @property
    def chunk_tokens(self) -> float:
        """Most tokens of one prompt in a step while others wait, for `BackendSpec`."""
        bounded = BOUNDED_TOKENS if self.scheduler == "forebay" else inf
        return min(self.long_prefill_token_threshold or inf, bounded)

    @model_validator(mode="after")
    def _replay_of_something(self) -> Self:
        if self.kv_replay and not self.kv_events:
            raise ValueError("kv_replay replays what kv_events missed: give kv_events too")
        return self

    @model_validator(mode="after")
    def _endpoints_of_ranks(self) -> Self:
        for endpoint in (self.kv_events, self.kv_replay):
            if endpoint is not None and self.data_parallel > 1:
                check_rank_ports(endpoint, self.data_parallel)
        return self

    @model_validator(mode="after")
    def _name_of_servers(self) -> Self:
        if self.dns and self.url.startswith("https:"):
            raise ValueError("dns needs http: certificates are for the name, not its addresses")
        if self.dns and self.kv_events:
            raise ValueError("kv_events has one endpoint, but with dns there are several servers")
        return self

    @field_validator("url")
    @classmethod
    def _base_url(cls, url: str) -> str:
        return checked_base_url(url)


class LaneConfig(BackendConfig):
    """One rank of a server. Only `lanes` makes it.

    rank: its number, from 0.
    """

    rank: int


def lanes(backend: BackendConfig) -> list[BackendConfig]:
    """Return a backend for each rank of the server, or the backend itself if it has one rank."""
    if backend.data_parallel == 1:
        return [backend]
    keys = {name: getattr(backend, name) for name in BackendConfig.model_fields}
    return [
        LaneConfig.model_construct(
            **{
                **keys,
                "name": f"{backend.name}-rank{rank}",
                "kv_events": _endpoint_of(backend.kv_events, rank),
                "kv_replay": _endpoint_of(backend.kv_replay, rank),
                "rank": rank,
            }
        )
        for rank in range(backend.data_parallel)
    ]


def rank_of(backend: BackendConfig) -> int | None:
    """Return the number of the rank, or None for a server without lanes."""
    return backend.rank if isinstance(backend, LaneConfig) else None


def rank_header(backend: BackendConfig) -> dict[str, str]:
    """Return the header by which vLLM chooses the rank, or no header without lanes."""
    rank = rank_of(backend)
    return {} if rank is None else {RANK_HEADER: str(rank)}


def _endpoint_of(endpoint: str | None, rank: int) -> str | None:
    """Return the endpoint of a rank: vLLM adds the rank to the port."""
    if endpoint is None:
        return None
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
