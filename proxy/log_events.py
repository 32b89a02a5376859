"""The events that the log knows, each with its level: the names are part of the interface.

`error` means that clients get no service, or that a part of the proxy has failed. `warning` means
that something is broken or degraded while clients are still served. All else is `info`.
"""

import logging
from enum import Enum
from math import inf
from typing import Protocol

SAID_S = 60.0  # between two lines of one kind, so that what always fails fills no disk
INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR


class LogEvent(Enum):
    """An event: its name in JSON lines, its level, and a description."""

    REQUEST = "request", INFO, "a request has ended (`debug` for requests outside the sample)"
    LISTENING = "listening", INFO, "the proxy accepts connections"
    DRAINING = "draining", INFO, "the proxy stops: no new requests, running requests finish"
    REQUESTS_CUT = "requests_cut", WARNING, "requests were still running when the drain ended"
    BACKEND_UP = "backend_up", INFO, "the backend takes work again, or for the first time"
    BACKEND_DOWN = (
        *("backend_down", WARNING),
        "the backend refuses connections, fails /health or sleeps",
    )
    BACKEND_EJECTED = "backend_ejected", WARNING, "the backend fails requests or is far too slow"
    BACKEND_HALF_OPEN = (
        *("backend_half_open", WARNING),
        "an ejected backend is sent one request at a time, as a trial",
    )
    BACKEND_DRAINING = "backend_draining", INFO, "an operator takes the backend out of use, or back"
    BACKEND_UNREACHABLE = "backend_unreachable", WARNING, "a configured backend is not up yet"
    BACKEND_UNPROBED = "backend_unprobed", WARNING, "this proxy cannot probe the backend"
    BACKEND_MALFORMED = "backend_malformed", WARNING, "an answer of the backend is not sound HTTP"
    LIMIT_REACHED = "limit_reached", WARNING, "a limit of this proxy ended a response"
    ADDRESSES_CUT = "addresses_cut", WARNING, "a name has more addresses than are used"
    BACKEND_KV_CACHE = "backend_kv_cache", INFO, "the backend has reported its KV cache size"
    BACKEND_MODELS = "backend_models", INFO, "the backends serve different models; one of them says"
    BACKEND_RESTARTED = "backend_restarted", INFO, "KV events show that the backend has restarted"
    BACKEND_REMOVED = "backend_removed", INFO, "a backend that left the configuration is empty"
    CACHE_SHARED = "cache_shared", WARNING, "the backend drops cache salts: tenants share its cache"
    CACHE_UNKNOWN = (
        *("cache_unknown", WARNING),
        "the backend does not tell whether it drops cache salts",
    )
    CONFIG_CONTRADICTS = "config_contradicts", WARNING, "a key of the configuration cannot work"
    LONG_PROMPTS_BLOCK = (
        *("long_prompts_block", WARNING),
        "short prompts wait for long prompts on this backend: a flag of vLLM is missing",
    )
    ROUTING_FAILED = "routing_failed", WARNING, "a plug-in failed to route: the default policy does"
    NO_BACKEND = "no_backend", ERROR, "the last backend went down: requests get 503"
    RELOAD_APPLIED = "reload_applied", INFO, "the new configuration is in force"
    RELOAD_PARTLY = "reload_partly", WARNING, "some changed keys need a restart"
    RELOAD_UNCHANGED = "reload_unchanged", INFO, "a reload found nothing new"
    RELOAD_FAILED = "reload_failed", WARNING, "the running configuration stays in force"
    RELOAD_BROKEN = "reload_broken", ERROR, "an internal error interrupted a reload: restart"
    WORKERS_RELOADING = "workers_reloading", INFO, "every worker was told to reload"
    WORKER_HANGS = "worker_hangs", WARNING, "a worker does not respond; after a while it is killed"
    WORKER_RESPONDS = "worker_responds", INFO, "a worker that hung responds again"
    WORKER_DIED = "worker_died", WARNING, "a worker process ended and is restarted"
    PARENT_ENDED = "parent_ended", WARNING, "the parent of --workers has ended: a worker ends, too"
    REJECTIONS_BEGAN = (
        *("rejections_began", WARNING),
        "the first requests are rejected, after none for a while",
    )
    REJECTIONS_GO_ON = (
        *("rejections_go_on", WARNING),
        "once a minute: how many requests are rejected, and why",
    )
    FINDING = "finding", WARNING, "`forebay doctor` finds a fault that it did not find before"
    FINDING_OVER = "finding_over", INFO, "for two minutes `forebay doctor` has not found the fault"
    REJECTIONS_OVER = "rejections_over", INFO, "no request was rejected for half a minute"
    PLAIN_HTTP = "plain_http", WARNING, "clients speak plain HTTP to the TLS port"
    BAD_CERTIFICATE = "bad_certificate", WARNING, "client certificates are refused, and why"
    OVERLOADED = "overloaded", WARNING, "the proxy sheds service classes to protect itself"
    OVERLOAD_OVER = "overload_over", INFO, "all service classes are accepted again"
    JWKS_UNREACHABLE = "jwks_unreachable", WARNING, "the provider's keys for tokens cannot be read"
    KEYS_LOADED = "keys_loaded", INFO, "API keys or certificates were read"
    KEYS_SHORT = "keys_short", WARNING, "some API keys can be guessed"
    KEYS_REFUSED = "keys_refused", WARNING, "new keys or certificates are bad: the old ones stay"
    SHARE_CONNECTED = "share_connected", INFO, "the proxy exchanges its load with others again"
    SHARE_LOST = "share_lost", WARNING, "the proxy decides alone"
    SHARE_UNSIGNED = (
        *("share_unsigned", WARNING),
        "messages between proxies are not signed, or not with the same FOREBAY_CACHE_SECRET",
    )
    KV_EVENTS_LOST = "kv_events_lost", WARNING, "KV events were missed: the prefix index is rebuilt"
    PREFIX_ESTIMATED = "prefix_estimated", WARNING, "cached prefixes are estimated, not exact"
    CAPTURE_STARTED = "capture_started", INFO, "traffic is captured in a file"
    CAPTURE_DROPS = "capture_drops", WARNING, "the disk is too slow: rows are dropped"
    CAPTURE_STOPPED = "capture_stopped", WARNING, "the capture has ended early"
    USAGE_FAILED = "usage_failed", WARNING, "the usage ledger is not written, or has half a line"
    USAGE_DROPS = "usage_drops", ERROR, "the usage ledger loses lines: it could not be written"
    HLOG_FAILED = "hlog_failed", WARNING, "the histogram log cannot be written"
    INTERNAL_ERROR = "internal_error", ERROR, "a fault of the proxy itself: please report it"

    def __init__(self, label: str, level: int, meaning: str) -> None:
        self.label = label
        self.level = level
        self.meaning = meaning


class Say(Protocol):
    """A function that logs one event in one line."""

    def __call__(
        self, event: LogEvent, message: str, backend: str = "", reason: str = "", /
    ) -> None: ...


class SparseLines:
    """Lets one log line of each kind pass in `SAID_S`, and counts the others.

    The callers bound the number of kinds.
    """

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def more(self, kind: str, now: float) -> str | None:
        """Return the end of the line: how many were left out before. None leaves it out, too."""
        if now - self._said_at.get(kind, -inf) < SAID_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._said_at[kind] = now
        left_out = self._left_out.pop(kind, 0)
        return f" ({left_out} more since the last such line)" if left_out else ""


def reference() -> str:
    """Return all events by level, the most severe first, as lists in Markdown."""
    parts = []
    for level in (ERROR, WARNING, INFO):
        parts.append(f"### {logging.getLevelName(level).capitalize()}")
        parts.append("\n".join(f"- `{e.label}`: {e.meaning}" for e in LogEvent if e.level == level))
    return "\n\n".join(parts)
