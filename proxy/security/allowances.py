"""Limit what each tenant may use: which models, how many requests at once, tokens by hour and day.

An hour begins with the first token that is charged in it. A request is charged its prompt when it
arrives, and its actual tokens, output included, once it has ended. So a budget may be overdrawn by
the output of the requests that run when it is used up, which `max_concurrency` bounds.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from forebay.proxy.api import rejections
from forebay.proxy.backends.models import Models
from forebay.proxy.config.schema import Config
from forebay.proxy.config.tenants import KnownTenant
from forebay.proxy.http1.errors import ApiError, no_such_model
from forebay.proxy.telemetry.record import RequestRecord

HOUR_S: Final = 3_600.0
DAY_S: Final = 86_400.0


class _Budget:
    """The tokens of an hour or a day."""

    __slots__ = ("ends_at", "spent")

    def __init__(self) -> None:
        self.ends_at = 0.0
        self.spent = 0


class Allowances:
    """Counts the use of each tenant in this process.

    Args:
        clock: the time of the event loop.
        models: the models of the backends.
        rejected: called with the bucket and the code of each rejection.
    """

    def __init__(
        self, clock: Callable[[], float], models: Models, rejected: Callable[[str, str], None]
    ) -> None:
        self._clock = clock
        self._models = models
        self._rejected = rejected
        self._running: Counter[str] = Counter()
        self._windows: dict[tuple[str, float], _Budget] = {}

    def admit(self, config: Config, record: RequestRecord, model: str, tokens: int) -> None:
        """Let a request in, and charge its prompt. Raises ApiError 404 or 429.

        `ended` must follow for each record, admitted or not.

        Args:
            model: the model of the request, by the name that the backends use.
        """
        tenant = config.tenants.known.get(record.tenant)
        if tenant is None:
            return
        permitted = permitted_models(config, record.tenant, self._models)
        if permitted is not None and model not in permitted:
            raise no_such_model(model, tenant.models)
        if config.mode != "observe":
            self._check(tenant, config, record.tenant)
        self._running[record.tenant] += 1
        record.admitted, record.reserved_tokens = True, tokens
        self._charge(record.tenant, tokens)

    def _check(self, entry: KnownTenant, config: Config, tenant: str) -> None:
        """Raise ApiError 429 for a tenant without room for another request."""
        most = entry.max_concurrency
        if most is not None and self._running[tenant] >= most:
            raise self._rejection(rejections.too_many_at_once(most, config.reject_status))
        for seconds, budget in ((HOUR_S, entry.tokens_per_hour), (DAY_S, entry.tokens_per_day)):
            if budget is None:
                self._windows.pop((tenant, seconds), None)
                continue
            window, now = self._windows.setdefault((tenant, seconds), _Budget()), self._clock()
            if now >= window.ends_at:
                window.ends_at, window.spent = now + seconds, 0
            if window.spent >= budget:
                error = rejections.over_budget(
                    budget, "hour" if seconds == HOUR_S else "day", window.ends_at - now,
                    config.reject_status,
                )  # fmt: skip
                raise self._rejection(error)

    def _rejection(self, error: ApiError) -> ApiError:
        self._rejected("", error.code)
        return error

    def ended(self, record: RequestRecord) -> None:
        """Give the place of a request back, and charge its actual tokens."""
        if not record.admitted:
            return
        record.admitted = False
        tenant = record.tenant
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        used = record.prompt_tokens + record.output_tokens
        if not record.prompt_tokens:  # no backend counted it, or no backend got it
            used = record.reserved_tokens if record.written else 0
        self._charge(tenant, used - record.reserved_tokens)

    def _charge(self, tenant: str, tokens: int) -> None:
        for seconds in (HOUR_S, DAY_S):
            window = self._windows.get((tenant, seconds))
            if window is not None:  # it may be a later window than the window at arrival
                window.spent = max(0, window.spent + tokens)


def permitted_models(config: Config, tenant: str, models: Models) -> frozenset[str] | None:
    """Return all names of the models that a tenant may use, or None if it may use any."""
    allowance = config.tenants.known.get(tenant)
    if allowance is None or not allowance.models:
        return None
    names = {models.find(name).name for name in allowance.models}
    aliases = (alias for alias, name in models.aliases.items() if name in names)
    return frozenset((*allowance.models, *names, *aliases))
