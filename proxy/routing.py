"""The types of a routing policy, and the fallback while the policy of a plug-in fails.

A policy is a pure function of a `Request`, the `Engine`s it may go to and the time.
"""

from collections.abc import Sequence

from forebay.proxy.config.routes import CheckedRoute
from forebay.proxy.config.schema import Config, ShaperOptions
from forebay.proxy.core.model import Request
from forebay.proxy.core.policy.routing import Affinity, Option, warm_or_least_work
from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.traces.ground.errors import InputError

__all__ = ["Engine", "GuardedRoute", "Request", "live_options"]

Engine = Option


class GuardedRoute:
    """A policy of a plug-in, with the default policy in its place for requests where it fails.

    Args:
        say: logs a failure, at most once a minute.
    """

    def __init__(self, route: CheckedRoute, say: Say) -> None:
        self._route = route
        self._say = say
        self._lines = SparseLines()

    def __call__(
        self, request: Request, options: Sequence[Option], affinity: Affinity, now: float
    ) -> Option:
        try:
            return self._route(request, options, affinity, now)
        except InputError as error:
            self._failed(str(error), now)
        return warm_or_least_work(request, options, affinity, now)

    def _failed(self, what: str, now: float) -> None:
        if (more := self._lines.more("", now)) is not None:
            self._say(LogEvent.ROUTING_FAILED, f"routing {what}; the default policy decides{more}")


def live_options(config: Config, say: Say) -> ShaperOptions:
    """Return the options of a shaper that serves."""
    options = config.shaper_options()
    route = options["route"]
    if isinstance(route, CheckedRoute):
        options["route"] = GuardedRoute(route, say)
    return options
