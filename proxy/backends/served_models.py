"""Apply the backends' reports of their models to names, routes and the log."""

import asyncio
from collections.abc import Mapping

from forebay.proxy.backends.link import BackendLink, any_up
from forebay.proxy.backends.models import Models
from forebay.proxy.core.health import Health
from forebay.proxy.driver import Driver
from forebay.proxy.log_events import LogEvent, Say
from forebay.traces.ground.command_line.messages import shortlist

NEW_S = 600.0  # a backend that was never up in this time is not waited for


class ServedModels(Models):
    """The models of these backends, which change as backends come, go and are asked.

    Args:
        links: the backends by name, all of them known to the policy.
        health: judges each backend by other backends of its models.

    Attributes:
        moved: set for a moment whenever a backend has come up, or serves other models.
    """

    def __init__(
        self, links: Mapping[str, BackendLink], health: Health, driver: Driver, say: Say
    ) -> None:
        super().__init__()
        self.moved = asyncio.Event()
        self._links = links
        self._health = health
        self._driver = driver
        self._say = say

    def apply(self, aliases: Mapping[str, str]) -> None:
        """Apply the models that each backend serves now, and their other names."""
        self.update(aliases, [link.models for link in self._links.values()])
        for link in self._links.values():
            self._health.set_models(link.name, _names(link))
            self._tell_policy(link)
        self.pulse()

    def keep_only(self, name: str, only: frozenset[str] | None) -> None:
        """Let a backend take requests for these models only, or None for all that it serves."""
        link = self._links[name]
        if only != link.only:
            link.only = only
            self._tell_policy(link)

    def pulse(self) -> None:
        """Wake everything that waits for a backend."""
        self.moved.set()
        self.moved.clear()

    def changed(self, link: BackendLink) -> None:
        """Apply the answer of a backend that serves other models than before, and log it."""
        differed = self.differ
        self.apply(self.aliases)
        if not self.differ:
            return
        for server in [link] if differed else self._links.values():
            line = f"backend {server.name} serves {shortlist(server.models or ['unknown models'])}"
            self._say(LogEvent.BACKEND_MODELS, line, server.name)

    def nobody_has(self, name: str) -> bool:
        """True if no backend serves the model which backends know by this name.

        Where all backends name the same models, any of them may have an adapter that it does not
        name. So may a backend that has not listed its models yet.
        """
        if not name or not self.told_differ or self.lists(name):
            return False
        up = [link for link in self._links.values() if link.up]
        return bool(up) and all(link.models is not None for link in up)

    def unserved_names(self) -> dict[str, str]:
        """Return the other names that stand for a model which no backend serves, with that model.

        Empty while a backend is down or has not told its models.
        """
        if not all(link.up and link.models is not None for link in self._links.values()):
            return {}
        return {alias: name for alias, name in self.aliases.items() if not self.lists(name)}

    def told(self) -> list[BackendLink]:
        """Return the backends that are up and have told their models."""
        return [u for u in self._links.values() if u.up and u.models is not None]

    def learn(self, link: BackendLink, name: str) -> None:
        """Note that a backend serves a model which another backend has not."""
        if name and not self.lists(name):
            link.learn_model(name)
            self.apply(self.aliases)

    def forget(self, link: BackendLink, name: str) -> None:
        """Note that a backend has said that it does not have this model."""
        if link.forget_model(name):
            self.apply(self.aliases)

    def may_be_served(self, name: str) -> bool:
        """True if a backend is up that may serve the model which backends know by this name.

        If no backend that is up names it, a backend that has not listed its models may come up.
        """
        model = self.named(name)
        if model.route or self.lists(model.name):
            return any_up(self._links, model.route)
        up = [link for link in self._links.values() if link.up]
        if any(link.serves(model.name) for link in up):
            return True
        return bool(up) and not any(map(self._may_tell, self._links.values()))

    def _may_tell(self, link: BackendLink) -> bool:
        """True if a backend that has not listed its models yet may still come up."""
        new = self._driver.clock() < link.added_at + NEW_S
        return new and link.models is None and not link.up and link.name in self._health

    def _tell_policy(self, link: BackendLink) -> None:
        name, strict = link.name, link.only is not None
        models = link.only if strict else _names(link)
        family = next(iter(link.models or ()), "")  # servers list their main model first
        backend = self._driver.shaper.backends.get(name)
        if backend and (backend.models, backend.strict, backend.family) == (models, strict, family):
            return  # else the first answers of n backends would cost n * n changes
        self._driver.change(
            lambda core, now: core.changes.set_models(
                name, models, now, strict=strict, family=family
            )
        )


def _names(link: BackendLink) -> frozenset[str] | None:
    """Return the models that a backend serves, or None while they are unknown."""
    return None if link.models is None else frozenset(link.models)
