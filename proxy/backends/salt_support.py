"""Learn from a backend's OpenAPI document on which paths it drops a tenant's cache salt.

vLLM's request classes ignore unknown members without a word. In older versions `/v1/messages` has
no `cache_salt`, so all tenants share one prefix cache there.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import orjson

from forebay.proxy.config.advice import NO_ISOLATION, NO_ISOLATION_REMEDY
from forebay.proxy.config.paths import ENGINE, FORMS, MESSAGES, SHAPED
from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.command_line.messages import shortlist

OPENAPI: Final = "/openapi.json"
FIELD: Final = "cache_salt"
SALTED: Final = (*SHAPED, *(path for path in ENGINE if path not in FORMS))
"""Paths whose bodies get a salt."""
SURELY_OLD: Final = (0, 21)
"""Versions before this one are older than the change that gave `/v1/messages` the salt."""
_REFERENCE = "#/components/schemas/"


def paths_without_salt(document: bytes) -> frozenset[str] | None:
    """Return the paths that drop the salt, or None if the document does not show them.

    A path that the backend does not have, or whose body has no schema, is not among them.
    """
    try:
        fields = orjson.loads(document)
        paths, schemas = fields["paths"], fields.get("components", {}).get("schemas", {})
        return frozenset(path for path in SALTED if _drops(paths.get(path), schemas))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None


def paths_of_version(answer: bytes) -> frozenset[str] | None:
    """Return the paths that drop the salt by an answer to /version, or None if unknown.

    It is asked where there is no document (`--disable-fastapi-docs`).
    """
    try:
        major, minor = orjson.loads(answer)["version"].split(".")[:2]
        old = (int(major), int(minor)) < SURELY_OLD
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
        return None
    return frozenset([MESSAGES]) if old else None


def _drops(path: Any, schemas: Mapping[str, Any]) -> bool:
    if path is None or "post" not in path:
        return False
    content = path["post"].get("requestBody", {}).get("content", {})
    kinds = _kinds(content.get("application/json", {}).get("schema", {}), schemas)
    return any("properties" in kind and FIELD not in kind["properties"] for kind in kinds)


def _kinds(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the classes that a body may have."""
    either = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [schemas[part["$ref"].removeprefix(_REFERENCE)] if "$ref" in part else part
            for part in either]  # fmt: skip


class Ignoring(Protocol):
    """A backend, as far as salts are concerned."""

    name: str
    ignores_salt: frozenset[str] | None


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
        paths_of = [u.ignores_salt for u in self._links.values() if u.ignores_salt is not None]
        self.ignored = frozenset.intersection(*paths_of) if paths_of else frozenset()
        if link.ignores_salt:
            paths = shortlist(sorted(link.ignores_salt))
            line = f"backend {link.name} {NO_ISOLATION}: {paths}; {NO_ISOLATION_REMEDY}"
            self._say(LogEvent.CACHE_SHARED, line, link.name)
