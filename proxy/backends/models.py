"""Which backends serve which model, and by which names clients may ask for it.

A backend reports its models by GET /v1/models (`probes.py`), unless `backends[].models` names them.
While all backends serve the same models, or no models are known, any backend may get a request.
This costs nothing where there is a single model.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

Entries = Mapping[str, Mapping[str, Any]]  # entries of GET /v1/models, by the name of the model


class Wanted(NamedTuple):
    """A model that a client asked for.

    Attributes:
        name: as the backends know it.
        route: `Request.model`: the name, or "" if any backend may take the request.
        may_be_adapter: it is a LoRA adapter, or that is not known.
    """

    name: str
    route: str = ""
    may_be_adapter: bool = False


class LearnedEntry(dict[str, Any]):
    """The entry of a model that a backend has served without naming it."""


class Models:
    """The models of all backends, and other names for them.

    A model that no backend is known to serve is any backend's to reject: an adapter may have been
    loaded a moment ago.

    Attributes:
        aliases: other names, each with the name that backends know.
        differ: backends serve different models.
        told_differ: the same, of those models that backends name themselves.
    """

    def __init__(self) -> None:
        self.aliases: Mapping[str, str] = {}
        self._wanted: dict[str, Wanted] = {}
        self._listed: dict[str, Mapping[str, Any]] = {}
        self.differ = self.told_differ = False

    @property
    def listed(self) -> bool:
        """Whether any backend has told its models."""
        return bool(self._listed)

    def lists(self, name: str) -> bool:
        """True if a backend names this model."""
        return name in self._listed

    @property
    def matter(self) -> bool:
        """Whether the name of the model changes where, or how, a request is sent."""
        return self.differ or bool(self.aliases)

    def update(self, aliases: Mapping[str, str], served: Iterable[Entries | None]) -> None:
        """Store the models that each backend serves now, or None where they are unknown."""
        lists = [entries for entries in served if entries is not None]
        self.aliases, self._listed = aliases, {}
        for entries in lists:
            for name, entry in entries.items():
                self._listed.setdefault(name, entry)
        self.differ = any(entries.keys() != self._listed.keys() for entries in lists)
        reported = [_told(entries) for entries in lists]
        self.told_differ = any(names != reported[0] for names in reported)
        self._wanted = {}
        several = any(len(entries) > 1 for entries in lists)
        for name, entry in self._listed.items():
            everywhere = all(name in entries for entries in lists)
            may_be_adapter = bool(entry.get("parent")) or (several and "parent" not in entry)
            self._wanted[name] = Wanted(name, "" if everywhere else name, may_be_adapter)

    def find(self, name: str) -> Wanted:
        """Return the model that a client means by this name."""
        return self.named(self.aliases.get(name, name))

    def of_body(self, name: str, members: dict[str, str]) -> Wanted:
        """Return the model of a body. The backends' name joins `members` if the body has another.

        Args:
            members: JSON of members of the body, by key.
        """
        model = self.find(name)
        if model.name != name:
            members["model"] = orjson.dumps(model.name).decode()
        return model

    def named(self, name: str) -> Wanted:
        """Return the model that backends know by this name, which may be an alias of another."""
        return self._wanted.get(name) or Wanted(name)

    def names(self) -> list[str]:
        """Return the names of all models and all other names of them."""
        return [*self._listed, *(alias for alias, name in self.aliases.items() if self.lists(name))]

    def page(self, permitted: Collection[str] | None = None) -> bytes:
        """Return the answer to GET /v1/models: all models and all other names of them.

        Args:
            permitted: only these names are listed; None: all.
        """
        entries = dict(self._listed)
        for alias, name in self.aliases.items():
            if name in self._listed:
                entries.setdefault(alias, {**self._listed[name], "id": alias, "root": name})
        data = [entry for name, entry in entries.items() if permitted is None or name in permitted]
        return orjson.dumps({"object": "list", "data": data})


def _told(entries: Entries) -> set[str]:
    """Return the models that a backend names itself."""
    return {name for name, entry in entries.items() if not isinstance(entry, LearnedEntry)}


def listed_models(body: bytes) -> Entries | None:
    """Return the entries of an answer to GET /v1/models by name, or None for another answer."""
    try:
        entries = {entry["id"]: entry for entry in orjson.loads(body)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    sound = all(isinstance(name, str) and isinstance(entries[name], dict) for name in entries)
    return entries if entries and sound else None


def configured_models(names: Iterable[str]) -> Entries | None:
    """Return entries for the models that `backends[].models` names, or None without names."""
    entries = {
        name: {"id": name, "object": "model", "created": 0, "owned_by": "vllm"} for name in names
    }
    return entries or None
