"""Compare two configurations: which keys changed, and which of them need a restart."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sections import Tls

# Sections or single keys. Other keys of the sections in IN_PLACE change while the proxy runs.
NEEDS_RESTART = frozenset(
    {
        *("capture", "listen", "metrics", "share", "tokens", "tracing", "upstream_tls", "usage"),
        *("limits.header", "logs.format"),
    }
)
# In one capture file all blocks of text stand for the same number of tokens.
NEEDS_RESTART_IN_CAPTURE = frozenset({"affinity.block_bytes"})
IN_PLACE = frozenset(
    {
        *("backends", "buckets", "affinity", "admission", "timeouts", "limits", "health", "logs"),
        *("retries", "routing", "routes", "reject_status", "debug_headers", "upstream_api_key"),
        *("cors_origins", "tenants", "tls", "models", "mode", "observe", "hold"),
        "backends_file",
    }
)


Backends = tuple[BackendConfig, ...]
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """The way from one configuration to another.

    Attributes:
        config: the new configuration, with the old values of the keys in `restart`.
        keys: the keys that change in place, such as `timeouts.idle`.
        restart: the changed keys that need a restart.
        added, moved, resized: backends that are new, have another URL, or have other limits or
            KV events at the same URL.
        removed: names of the backends to remove.
    """

    config: Config
    keys: tuple[str, ...]
    restart: tuple[str, ...]
    added: Backends
    moved: Backends
    resized: Backends
    removed: Names


def changes(old: Config, new: Config) -> Changes:
    """Compare two configurations. A key that is not listed above needs a restart."""
    keys: list[str] = []
    restart: list[str] = []
    unchanged: dict[str, Any] = {}
    needs_restart = NEEDS_RESTART
    if old.capture.path is not None:  # a new capture.path is not used before a restart
        needs_restart |= NEEDS_RESTART_IN_CAPTURE
    # A key that needs a restart keeps its old value in the new configuration.
    for section in Config.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        if before == after:
            continue
        if section not in IN_PLACE or _switches_tls(before, after):
            restart.append(section)
            unchanged[section] = before
        elif not isinstance(after, BaseModel):
            keys.append(section)
        else:
            changed = [f"{section}.{name}" for name in _changed_fields(before, after)]
            keys += [key for key in changed if key not in needs_restart]
            if held_back := [key for key in changed if key in needs_restart]:
                restart += held_back
                names = [key.removeprefix(f"{section}.") for key in held_back]
                unchanged[section] = after.model_copy(
                    update={name: getattr(before, name) for name in names}
                )
    # Backends are compared by name. Any of their keys may change while the proxy runs.
    backends = _backend_changes(old.backends, new.backends)
    return Changes(new.model_copy(update=unchanged), tuple(keys), tuple(restart), *backends)


def _changed_fields(before: BaseModel, after: BaseModel) -> list[str]:
    names = type(after).model_fields
    return [name for name in names if getattr(before, name) != getattr(after, name)]


def _backend_changes(old: Backends, new: Backends) -> tuple[Backends, Backends, Backends, Names]:
    """Return the backends that are added, moved and resized, and the names of the removed."""
    had = {backend.name: backend for backend in old}
    have = {backend.name: backend for backend in new}
    both = [(had[name], have[name]) for name in have if name in had]
    return (
        tuple(backend for name, backend in have.items() if name not in had),
        tuple(now for was, now in both if was.url != now.url),
        tuple(now for was, now in both if was.url == now.url and was != now),
        tuple(name for name in had if name not in have),
    )


def _switches_tls(before: object, after: object) -> bool:
    """True if TLS is switched on or off. Another certificate is no such change."""
    return (
        isinstance(before, Tls)
        and isinstance(after, Tls)
        and bool(before.files) != bool(after.files)
    )
