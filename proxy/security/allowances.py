"""Limit what each tenant may use: which models, how many requests at once, tokens by hour and day.

An hour begins with the first token that is charged in it. A request is charged its prompt when it
arrives, and its actual tokens, output included, once it has ended. So a budget may be overdrawn by
the output of the requests that run when it is used up, which `max_concurrency` bounds. Other
proxies that share the load count, too (`spending.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from forebay.proxy.api import rejections
from forebay.proxy.backends.models import Models
from forebay.proxy.config.schema import Config
from forebay.proxy.config.tenants import KnownTenant
from forebay.proxy.http1.errors import ApiError, no_such_model
from forebay.proxy.security.spending import DAY_S, HOUR_S, Spending
from forebay.proxy.telemetry.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Allowances:
    """Decides which requests of tenants with limits are let in.

    Attributes:
        clock: the time of the event loop.
        spending: counts their use.
        models: the models of the backends.
        rejected: called with the bucket and the code of each rejection.
    """

    clock: Callable[[], float]
    spending: Spending
    models: Models
    rejected: Callable[[str, str], None]

    def admit(self, config: Config, record: RequestRecord, model: str, tokens: int) -> None:
        """Let a request in, and charge its prompt. Raises ApiError 404 or 429.

        `ended` must follow for each record, admitted or not.

        Args:
            model: the model of the request, by the name that the backends use.
        """
        tenant = config.tenants.entry(record.tenant)
        if tenant is None:
            return
        permitted = permitted_models(config, record.tenant, self.models)
        if permitted is not None and model not in permitted:
            raise no_such_model(model, tenant.models)
        if config.mode != "observe":
            self._check(tenant, config, record.counts_as)
        self.spending.began(record.counts_as)
        record.admitted, record.reserved_tokens = True, tokens
        self.spending.charge(record.counts_as, tokens, self.clock())

    def _check(self, entry: KnownTenant, config: Config, tenant: str) -> None:
        """Raise ApiError 429 for a tenant without room for another request."""
        most = entry.max_concurrency
        if most is not None and self.spending.running(tenant) >= most:
            raise self._rejection(rejections.too_many_at_once(most, config.reject_status))
        for seconds, budget in ((HOUR_S, entry.tokens_per_hour), (DAY_S, entry.tokens_per_day)):
            if budget is None:
                self.spending.forget(tenant, seconds)
                continue
            now = self.clock()
            window = self.spending.window(tenant, seconds, now)
            if window.tokens >= budget:
                error = rejections.over_budget(
                    budget, "hour" if seconds == HOUR_S else "day", window.ends_at - now,
                    config.reject_status,
                )  # fmt: skip
                raise self._rejection(error)

    def _rejection(self, error: ApiError) -> ApiError:
        self.rejected("", error.code)
        return error

    def ended(self, record: RequestRecord) -> None:
        """Give the place of a request back, and charge its actual tokens."""
        if not record.admitted:
            return
        record.admitted = False
        self.spending.ended(record.counts_as)
        used = record.prompt_tokens + record.output_tokens
        if not record.prompt_tokens:  # no backend counted it, or no backend got it
            used = record.reserved_tokens if record.written else 0
        more = used - record.reserved_tokens
        self.spending.charge(record.counts_as, more, self.clock())


def permitted_models(config: Config, tenant: str, models: Models) -> frozenset[str] | None:
    """Return all names of the models that a tenant may use, or None if it may use any."""
    allowance = config.tenants.entry(tenant)
    if allowance is None or not allowance.models:
        return None
    names = {models.find(name).name for name in allowance.models}
    aliases = (alias for alias, name in models.aliases.items() if name in names)
    return frozenset((*allowance.models, *names, *aliases))
