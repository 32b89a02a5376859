"""Sections of the configuration about the proxy as a server: addresses, limits, telemetry, TLS."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveInt,
    SerializationInfo,
    field_validator,
    model_validator,
)

from forebay.proxy.config.checks import check_plain_path
from forebay.traces.ground.command_line.quantities import (
    bytes_text,
    seconds,
    seconds_text,
    size_bytes,
)
from forebay.traces.ground.sse import MAX_EVENT_BYTES

UNITS: Final = "units"
"""In the context of a dump: print 2s and 16MiB, as people write them."""


def _shown_seconds(value: float, info: SerializationInfo) -> float | str:
    return seconds_text(value) if info.context == UNITS else value


def _shown_bytes(value: int, info: SerializationInfo) -> int | str:
    return bytes_text(value) if info.context == UNITS else value


_TIME = BeforeValidator(seconds, json_schema_input_type=float | str)
MOST_S: Final = 366 * 24 * 3600.0  # a year: event loops take no time that is far beyond
Seconds = Annotated[float, _TIME, PlainSerializer(_shown_seconds), Field(gt=0, le=MOST_S)]
NoOrSeconds = Annotated[float, _TIME, PlainSerializer(_shown_seconds), Field(ge=0, le=MOST_S)]
Bytes = Annotated[
    int,
    BeforeValidator(size_bytes, json_schema_input_type=int | str),
    PlainSerializer(_shown_bytes),
    Field(gt=0, le=1 << 50),
]
ANSWER_FIRST_TOKENS = 5  # default of timeouts.answer, in units of timeouts.first_token


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Listen(Section):
    """Addresses to listen on. Port 0 stands for any free port.

    host: address of the public port; 0.0.0.0 accepts connections from other machines.
    port: the public port.
    admin_port: port for operators: /healthz, /readyz, /metrics, /status, /drain and /reload.
    admin_host: address of the admin port, which has neither keys nor TLS: keep it private. null: as
    host.
    path_prefix: beginning of all paths of the public port, such as /llm behind a gateway that keeps
    it.
    reuse_port: let a second proxy listen on the same ports, for an upgrade without a gap.
    """

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    admin_host: str | None = Field(None, min_length=1)
    admin_port: int = Field(9090, ge=0, le=65535)
    path_prefix: str = Field("", pattern=r"^((/[A-Za-z0-9_-][A-Za-z0-9._-]*)+)?$")
    reuse_port: bool = False

    @property
    def effective_admin_host(self) -> str:
        return self.admin_host or self.host

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port and self.port == self.admin_port and self.effective_admin_host == self.host:
            raise ValueError(f"port and admin_port are both {self.port}; give two")
        return self


class Timeouts(Section):
    """Time limits.

    connect: time to connect to a backend, TLS included.
    first_token: time until the first event of a stream, or until a response of an unshaped path.
    answer: time until a chat or completion that is not a stream. null: five times first_token.
    idle: time without a byte within a response, from a backend that fails its health checks. A
    healthy one, which may hold a tool call back, has ten times as long.
    keep_alive: time without a byte after which a client of a stream gets a heartbeat, with status
    200 if it still waits for the first token. 0: never.
    client_headers: time to receive the head of a request.
    client_body: time to receive a body.
    client_write: time in which a client must take 16 KiB of a response, or its rest.
    lame_duck: time in which a proxy that stops still takes requests, while its /health is 503.
    drain: time for running requests to end after that.
    """

    connect: Seconds = 2.0
    first_token: Seconds = 120.0
    answer: Seconds | None = None
    idle: Seconds = 60.0
    keep_alive: NoOrSeconds = 15.0
    client_headers: Seconds = 10.0
    client_body: Seconds = 30.0
    client_write: Seconds = 30.0
    lame_duck: NoOrSeconds = 0.0
    drain: Seconds = 30.0

    @property
    def whole_answer(self) -> float:
        """`answer`, or its default."""
        return self.answer or ANSWER_FIRST_TOKENS * self.first_token


class Retries(Section):
    """When another backend is asked.

    continue_streams: if a backend stops in the middle of a stream, another backend goes on.
    """

    continue_streams: bool = True


class Limits(Section):
    """Sizes that protect the proxy.

    body: size of a request's body.
    header: all header fields of a request together.
    connections: open connections of clients; auto is half of the process's file descriptors.
    queue_bytes: memory for all bodies, and for answers that are no streams; auto is a quarter of
    `memory`, at most 192 MiB. One tenant, or address without keys, never gets all.
    memory: memory of the process; auto is the limit of its cgroup.
    loop_lag: lag of the event loop. A p99 above it sheds class batch, a median above it class
    standard too.
    answer: size of a response that is not a stream.
    event: size of one event of a stream. vLLM may send all ids of a prompt in a single event.
    """

    body: Bytes = 16 << 20
    header: Bytes = 16 << 10
    connections: Literal["auto"] | PositiveInt = "auto"
    queue_bytes: Literal["auto"] | Bytes = "auto"
    memory: Literal["auto"] | Bytes = "auto"
    loop_lag: Seconds = 0.05
    answer: Bytes = 64 << 20
    event: Bytes = MAX_EVENT_BYTES


class HealthConfig(Section):
    """How each backend is probed.

    interval: time between two probes.
    timeout: time limit of one probe.
    path: the path of a probe, such as /v1/health/ready. Any 2xx is healthy.
    """

    interval: Seconds = 1.0
    timeout: Seconds = 1.0
    path: str = "/health"

    @field_validator("path")
    @classmethod
    def _plain_path(cls, path: str) -> str:
        check_plain_path(path)
        return path


class Tokens(Section):
    """How prompt lengths are estimated.

    bytes_per_token: initial estimate for each tenant's prompts; responses' usage corrects it.
    """

    bytes_per_token: float = Field(4.0, gt=0, le=64)


class MetricsConfig(Section):
    """Records about past requests.

    hlog: a file for the TTFT of each bucket, written once a second.

    receipts: number of ended requests that are kept for `forebay explain`.
    """

    hlog: Path | None = None
    receipts: int = Field(2_000, ge=0, le=1_000_000)


class Logs(Section):
    """The log on standard output.

    format: console is for people, json for machines.
    level: the least severe events that are logged.
    sample: share of the finished requests that are logged; level debug logs all of them.
    """

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"
    sample: float = Field(0.0, ge=0, le=1)


class Tracing(Section):
    """OpenTelemetry spans (extra `otel`).

    enabled: send spans.
    endpoint: URL of a collector, OTLP over HTTP.
    sample: share of the requests without a sampled parent that get a span.
    service_name: resource attribute service.name of the spans.
    """

    enabled: bool = False
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    sample: float = Field(1.0, ge=0, le=1)
    service_name: str = "forebay"


class Tls(Section):
    """TLS of the public port, which is plain HTTP without it.

    cert: certificate chain, a PEM file.
    key: private key, a PEM file.
    """

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


class UpstreamTls(Section):
    """How https backends are checked.

    ca: PEM file of authorities in place of the system's.
    verify: false accepts any certificate: for tests only.
    """

    ca: Path | None = None
    verify: bool = True


class UsageConfig(Section):
    """A ledger of the tokens of each request.

    path: the file, to which a JSON line is added for each request that was served; null: no ledger.
    """

    path: Path | None = None


class CaptureConfig(Section):
    """Capture of traffic as a trace.

    path: the file; null: no capture.
    salt: env is FOREBAY_CAPTURE_SALT, the key of the hashes in it.
    max_size: the capture stops there.
    """

    path: Path | None = None
    salt: Literal["env"] = "env"
    max_size: Bytes = 1 << 30
