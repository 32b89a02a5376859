"""Apply the backends' reports of their models to names, routes and the log."""

import asyncio
from collections.abc import Mapping

from forebay.proxy.backends.models import Models
from forebay.proxy.backends.upstream import Upstream, any_up
from forebay.proxy.core.health import Health
from forebay.proxy.driver import Driver
from forebay.proxy.telemetry.log_events import LogEvent, Say
from forebay.traces.command_line.messages import shortlist

NEW_S = 600.0  # a backend that was never up in this time is not waited for


class ServedModels(Models):
    """The models of these backends, which change as backends come, go and are asked.

    Args:
        upstreams: the backends by name, all of them known to the policy.
        health: judges each backend by other backends of its models.

    Attributes:
        moved: set for a moment whenever a backend has come up, or serves other models.
    """

    def __init__(
        self, upstreams: Mapping[str, Upstream], health: Health, driver: Driver, say: Say
    ) -> None:
        super().__init__()
        self.moved = asyncio.Event()
        self._upstreams = upstreams
        self._health = health
        self._driver = driver
        self._say = say

    def apply(self, aliases: Mapping[str, str]) -> None:
        """Take the models that each backend serves now, and their other names."""
        self.update(aliases, [upstream.models for upstream in self._upstreams.values()])
        for upstream in self._upstreams.values():
            self._health.set_models(upstream.name, _names(upstream))
            self._tell_policy(upstream)
        self.pulse()

    def keep_only(self, name: str, only: frozenset[str] | None) -> None:
        """Let a backend take requests for these models only, or None for all that it serves."""
        upstream = self._upstreams[name]
        if only != upstream.only:
            upstream.only = only
            self._tell_policy(upstream)

    def pulse(self) -> None:
        """Wake everything that waits for a backend."""
        self.moved.set()
        self.moved.clear()

    def changed(self, upstream: Upstream) -> None:
        """Take the answer of a backend that serves other models than before."""
        differed = self.differ
        self.apply(self.aliases)
        if not self.differ:
            return
        for server in [upstream] if differed else self._upstreams.values():
            line = f"backend {server.name} serves {shortlist(server.models or ['unknown models'])}"
            self._say(LogEvent.BACKEND_MODELS, line, server.name)

    def nobody_has(self, name: str) -> bool:
        """True if no backend serves the model which backends know by this name.

        Where all backends name the same models, any of them may have an adapter that it does not
        name. So may a backend that has not listed its models yet.
        """
        if not name or not self.told_differ or self.lists(name):
            return False
        up = [upstream for upstream in self._upstreams.values() if upstream.up]
        return bool(up) and all(upstream.models is not None for upstream in up)

    def unserved_names(self) -> dict[str, str]:
        """Return the other names that stand for a model which no backend serves, with that model.

        Empty while a backend is down or has not told its models.
        """
        if not all(
            upstream.up and upstream.models is not None for upstream in self._upstreams.values()
        ):
            return {}
        return {alias: name for alias, name in self.aliases.items() if not self.lists(name)}

    def told(self) -> list[Upstream]:
        """Return the backends that are up and have told their models."""
        return [u for u in self._upstreams.values() if u.up and u.models is not None]

    def learn(self, upstream: Upstream, name: str) -> None:
        """Note that a backend serves a model which another backend has not."""
        if name and not self.lists(name):
            upstream.learn_model(name)
            self.apply(self.aliases)

    def forget(self, upstream: Upstream, name: str) -> None:
        """Note that a backend has said that it does not have this model."""
        if upstream.forget_model(name):
            self.apply(self.aliases)

    def may_be_served(self, name: str) -> bool:
        """True if a backend is up that may serve the model which backends know by this name.

        If no backend that is up names it, a backend that has not listed its models may come up.
        """
        model = self.named(name)
        if model.route or self.lists(model.name):
            return any_up(self._upstreams, model.route)
        up = [upstream for upstream in self._upstreams.values() if upstream.up]
        if any(upstream.serves(model.name) for upstream in up):
            return True
        return bool(up) and not any(map(self._may_tell, self._upstreams.values()))

    def _may_tell(self, upstream: Upstream) -> bool:
        """True if a backend that has not listed its models yet may still come up."""
        new = self._driver.clock() < upstream.added_at + NEW_S
        return new and upstream.models is None and not upstream.up and upstream.name in self._health

    def _tell_policy(self, upstream: Upstream) -> None:
        name, strict = upstream.name, upstream.only is not None
        models = upstream.only if strict else _names(upstream)
        family = next(iter(upstream.models or ()), "")  # servers list their main model first
        self._driver.change(
            lambda core, now: core.changes.set_models(
                name, models, now, strict=strict, family=family
            )
        )


def _names(upstream: Upstream) -> frozenset[str] | None:
    """Return the models that a backend serves, or None while they are unknown."""
    return None if upstream.models is None else frozenset(upstream.models)
