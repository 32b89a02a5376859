"""Check single values of the configuration: each function raises ValueError with a right value."""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

# vLLM 0.32 has these without any key, most of them with VLLM_SERVER_DEV_MODE only.
OPERATOR_PATHS = frozenset(
    f"/{name}"
    for name in (
        "abort_requests", "collective_rpc", "finish_weight_update", "init_weight_transfer_engine",
        "pause", "release_kv_cache_memory", "reset_encoder_cache", "reset_mm_cache",
        "reset_prefix_cache", "resume", "scale_elastic_ep", "server_info",
        "shutdown_weight_transfer_engine", "sleep", "start_draft_weight_update", "start_profile",
        "start_weight_update", "stop_profile", "update_weight_version", "update_weights",
        "v1/load_lora_adapter", "v1/unload_lora_adapter", "wake_up", "weight_checker",
    )
)  # fmt: skip
_PLAIN_PATH = r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+"
MOST_PORT = 65_535
SHARE_SCHEMES = ("redis", "rediss", "unix")


def check_zmq_endpoint(endpoint: str) -> None:
    if not re.fullmatch(r"tcp://[^/]+:\d+|ipc://.+", endpoint):
        raise ValueError("give a ZeroMQ endpoint such as tcp://127.0.0.1:5557")


def check_rank_ports(endpoint: str, ranks: int) -> None:
    """Check an endpoint that stands for one of each rank: vLLM adds the rank to its port."""
    port = int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp:") else 0
    if not 0 < port <= MOST_PORT + 1 - ranks:
        raise ValueError(
            f"{endpoint}: with data_parallel give rank 0's endpoint, such as tcp://127.0.0.1:5557; "
            f"the other ranks have the next {ranks - 1} ports"
        )


def checked_base_url(url: str) -> str:
    """Return the URL of a server without a trailing slash. It may have a path of a gateway."""
    # Split it, and reject parts that a server cannot have.
    try:
        parts = urlsplit(url)
        host = parts.hostname
        valid = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        valid, host = False, None
    if not (valid and host):
        raise ValueError("give a URL such as http://127.0.0.1:8001")
    if "@" in parts.netloc:  # even an empty user name; and no key would be sent by it
        raise ValueError(
            "give the server only, such as http://127.0.0.1:8001, without user or password; "
            "a key for the backends is upstream_api_key"
        )
    path = parts.path.rstrip("/")
    if path.endswith("/v1") or parts.query or parts.fragment:
        raise ValueError(
            "give the server only, such as http://127.0.0.1:8001, with no path of vLLM (/v1)"
        )
    check_prefix(path)
    # Its host name must be valid for look-ups and headers.
    try:
        host.encode("idna")  # the form in which it is looked up
        named = parts.netloc.isascii()  # the form in the Host header
    except UnicodeError:
        named = False
    if not named:
        raise ValueError("not a host name: give it in ASCII, with 1 to 63 characters between dots")
    return f"{parts.scheme}://{parts.netloc}{path}"


def check_prefix(path: str) -> None:
    """Check a path in front of all paths, or "" without such a path."""
    if path and not re.fullmatch(_PLAIN_PATH, path):
        raise ValueError(f"{path!r} is not a plain path such as /team-a")


def check_share_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in SHARE_SCHEMES and parts.port != 0
        valid = valid and bool(parts.hostname or parts.path)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("give a URL such as redis://host:6379/0?prefix=forebay")


def check_plain_path(path: str) -> None:
    if not re.fullmatch(_PLAIN_PATH, path):
        raise ValueError(f"{path!r} is not a plain path such as /v1/models")


def check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        check_plain_path(path)
        if path in OPERATOR_PATHS:
            raise ValueError(f"{path!r} lets any client change or stop a server; leave it out")


def check_origins(origins: Iterable[str]) -> None:
    for origin in origins:
        if not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin):
            raise ValueError(f"{origin!r} is not an origin such as https://chat.example.com")


def check_unique(values: list[str], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"the {what} {value!r} is given twice")
