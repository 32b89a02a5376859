"""What is different between two configurations, and what of it can change while it runs."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from forebay.proxy.config.schema import BackendConfig, Config, Tls

# Whole sections or single keys; everything else changes in place.
NEEDS_RESTART = frozenset(
    {
        *("capture", "listen", "metrics", "share", "tokens", "tracing", "upstream_tls"),
        *("limits.header", "logs.format"),
    }
)
# All blocks of text in one file of a capture stand for equally many tokens.
NEEDS_RESTART_IN_CAPTURE = frozenset({"affinity.block_bytes"})
IN_PLACE = frozenset(
    {
        *("backends", "buckets", "affinity", "admission", "timeouts", "limits", "health", "logs"),
        *("routing", "routes", "reject_status", "debug_headers", "upstream_api_key"),
        *("cors_origins", "tenants", "tls"),
    }
)


@dataclass(frozen=True, slots=True)
class Changes:
    """The way from one configuration to another.

    Attributes:
        config: what is in force afterwards: the new one, with the old values of `restart`.
        keys: what changes in place, such as `timeouts.idle`.
        restart: what differs and cannot change in place.
        added, moved, resized: backends that are new, have another URL, or other limits or
            KV events at the same one.
        removed: names of those that are to go.
    """

    config: Config
    keys: tuple[str, ...]
    restart: tuple[str, ...]
    added: tuple[BackendConfig, ...]
    moved: tuple[BackendConfig, ...]
    resized: tuple[BackendConfig, ...]
    removed: tuple[str, ...]


def changes(old: Config, new: Config) -> Changes:
    """What leads from `old` to `new`. A key that nobody has thought about needs a restart."""
    needs_restart = NEEDS_RESTART
    if old.capture.path is not None:  # the new one's would not be used before a restart
        needs_restart |= NEEDS_RESTART_IN_CAPTURE
    keys: list[str] = []
    restart: list[str] = []
    kept: dict[str, Any] = {}
    for section in Config.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        if before == after:
            continue
        if section not in IN_PLACE or _switched(before, after):
            restart.append(section)
            kept[section] = before
        elif not isinstance(after, BaseModel):
            keys.append(section)
        else:
            kept_here: dict[str, Any] = {}
            for name in type(after).model_fields:
                if getattr(before, name) != getattr(after, name):
                    if (key := f"{section}.{name}") in needs_restart:
                        restart.append(key)
                        kept_here[name] = getattr(before, name)
                    else:
                        keys.append(key)
            if kept_here:
                kept[section] = after.model_copy(update=kept_here)
    had = {backend.name: backend for backend in old.backends}
    have = {backend.name: backend for backend in new.backends}
    both = [(had[name], have[name]) for name in have if name in had]
    return Changes(
        config=new.model_copy(update=kept),
        keys=tuple(keys),
        restart=tuple(restart),
        added=tuple(backend for name, backend in have.items() if name not in had),
        moved=tuple(now for was, now in both if was.url != now.url),
        resized=tuple(now for was, now in both if was.url == now.url and was != now),
        removed=tuple(name for name in had if name not in have),
    )


def _switched(before: object, after: object) -> bool:
    """A port speaks TLS or does not; another certificate is no such change."""
    return (
        isinstance(before, Tls)
        and isinstance(after, Tls)
        and bool(before.files) != bool(after.files)
    )
