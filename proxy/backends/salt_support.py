"""Learn from a backend's OpenAPI document on which paths it drops a tenant's cache salt.

vLLM's request classes ignore unknown members without a word. In older versions `/v1/messages` has
no `cache_salt`, so all tenants share one prefix cache there.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import orjson

from forebay.proxy.config.advice import NO_ISOLATION, NO_ISOLATION_REMEDY, unknown_isolation
from forebay.proxy.config.paths import ENGINE, FORMS, MESSAGES, SHAPED
from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.command_line.messages import shortlist

OPENAPI: Final = "/openapi.json"
FIELD: Final = "cache_salt"
SALTED: Final = (*SHAPED, *(path for path in ENGINE if path not in FORMS))
"""Paths whose bodies get a salt."""
SURELY_OLD: Final = (0, 21)
"""Versions before this one are older than the change that gave `/v1/messages` the salt."""
SURELY_NEW: Final = (0, 32)
"""This version has the change."""
_REFERENCE = "#/components/schemas/"


class Salting(NamedTuple):
    """The paths on which a backend ignores salts, as far as it tells.

    Attributes:
        drops: paths on which it drops them; None if it tells nothing.
        unknown: paths on which it may drop them.
    """

    drops: frozenset[str] | None = None
    unknown: frozenset[str] = frozenset([MESSAGES])


UNASKED: Final = Salting(None, frozenset())


def paths_without_salt(document: bytes) -> Salting | None:
    """Return the paths that drop the salt, or None if the document does not show them.

    A path that the backend does not have is not among them. A shaped path whose body has no class
    that shows its members is unknown.
    """
    try:
        fields = orjson.loads(document)
        paths, schemas = fields["paths"], fields.get("components", {}).get("schemas", {})
        drops = {path: _drops(paths.get(path), schemas) for path in SALTED}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return Salting(
        frozenset(path for path, drop in drops.items() if drop),
        frozenset(path for path, drop in drops.items() if drop is None and path in SHAPED),
    )


def paths_of_version(answer: bytes) -> Salting | None:
    """Return the paths that drop the salt by an answer to /version, or None if unknown.

    It is asked where there is no document (`--disable-fastapi-docs`).
    """
    try:
        major, minor = orjson.loads(answer)["version"].split(".")[:2]
        number = int(major), int(minor)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        return None
    if SURELY_OLD <= number < SURELY_NEW:
        return None
    return Salting(frozenset([MESSAGES] if number < SURELY_OLD else []), frozenset())


def _drops(path: Any, schemas: Mapping[str, Any]) -> bool | None:
    """True if a path drops the salt, None if its schema does not show it."""
    if path is None or "post" not in path:
        return False
    content = path["post"].get("requestBody", {}).get("content", {})
    kinds = _kinds(content.get("application/json", {}).get("schema", {}), schemas)
    if any("properties" in kind and FIELD not in kind["properties"] for kind in kinds):
        return True
    return False if all("properties" in kind for kind in kinds) else None


def _kinds(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the classes that a body may have."""
    either = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [schemas[part["$ref"].removeprefix(_REFERENCE)] if "$ref" in part else part
            for part in either]  # fmt: skip


class Ignoring(Protocol):
    """A backend, as far as salts are concerned."""

    name: str
    salting: Salting


class SaltSupport:
    """Says on which paths tenants share a cache, though they should not.

    Args:
        links: the backends by name.

    Attributes:
        ignored: paths on which every backend that has told drops the salt.
    """

    def __init__(self, links: Mapping[str, Ignoring], say: Say) -> None:
        self.ignored: frozenset[str] = frozenset()
        self._links = links
        self._say = say

    def known(self, link: Ignoring) -> None:
        """Note that a backend has told on which paths it drops salts."""
        paths_of = [u.salting.drops for u in self._links.values() if u.salting.drops is not None]
        self.ignored = frozenset.intersection(*paths_of) if paths_of else frozenset()
        if link.salting.drops:
            paths = shortlist(sorted(link.salting.drops))
            line = f"backend {link.name} {NO_ISOLATION}: {paths}; {NO_ISOLATION_REMEDY}"
            self._say(LogEvent.CACHE_SHARED, line, link.name)
        if link.salting.unknown:
            line = f"{unknown_isolation(link.name, link.salting.unknown)}; {NO_ISOLATION_REMEDY}"
            self._say(LogEvent.CACHE_UNKNOWN, line, link.name)
