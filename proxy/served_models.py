"""Let what the backends say of their models take effect on names, routes and the log."""

from collections.abc import Mapping

from forebay.proxy.driver import Driver
from forebay.proxy.models import Models
from forebay.proxy.probes import Upstream
from forebay.proxy.telemetry.events import LogEvent, Say


class ServedModels(Models):
    """The models of these backends, which change as backends come, go and are asked.

    Args:
        upstreams: by name; all of them are known to the policy.
    """

    def __init__(self, upstreams: Mapping[str, Upstream], driver: Driver, say: Say) -> None:
        super().__init__()
        self._upstreams = upstreams
        self._driver = driver
        self._say = say

    def apply(self, aliases: Mapping[str, str]) -> None:
        """Take what each backend serves now, and the other names of models."""
        self.update(aliases, [upstream.models for upstream in self._upstreams.values()])
        for upstream in self._upstreams.values():
            models = None if upstream.models is None else frozenset(upstream.models)
            self._set(upstream.name, models)

    def changed(self, upstream: Upstream) -> None:
        """Take the answer of a backend that serves other models than before."""
        differed = self.differ
        self.apply(self.aliases)
        if not self.differ:
            return
        for one in [upstream] if differed else self._upstreams.values():
            line = f"backend {one.name} serves {', '.join(one.models or ['unknown models'])}"
            self._say(LogEvent.BACKEND_MODELS, line, one.name)

    def _set(self, name: str, models: frozenset[str] | None) -> None:
        self._driver.change(lambda core, now: core.changes.set_models(name, models, now))


def others(upstreams: Mapping[str, Upstream], upstream: Upstream) -> list[Upstream]:
    """Return the other backends that may take requests of this one."""
    return [
        other
        for other in upstreams.values()
        if other is not upstream and upstream.shares_models(other)
    ]
