"""The section of the configuration about tenants: their keys, weights, quotas and caches."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forebay.proxy.config.sections import Section
from forebay.proxy.core.model import ServiceClass

NAME = r"^[A-Za-z0-9._-]{1,64}$"


class KnownTenant(Section):
    """One tenant.

    weight: share of prefill time, relative to other tenants that wait.
    tokens_per_s: quota of prompt tokens.
    burst_tokens: the most that may be sent at once; default: the quota of a minute.
    trust_group: tenants of one group share cached prefixes.
    classes: classes that put its requests before or behind those of all tenants. Any other class
    orders its own requests only.
    """

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst_tokens: float | None = Field(None, gt=0, allow_inf_nan=False)
    trust_group: str | None = Field(None, pattern=NAME)
    classes: tuple[Literal["interactive", "batch"], ...] = ()

    @model_validator(mode="after")
    def _burst_of_a_rate(self) -> Self:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s, the rate at which it comes back")
        return self


class Tenants(Section):
    """Keys, weights and quotas of tenants, and which of them share caches.

    keys: a file, or env:NAME for an environment variable (format: security/keys.py).

    default_weight: weight of tenants that have none of their own.
    isolate_cache: keep tenants from hitting each other's cached prefixes; auto: if there are keys.
    known: tenants with a weight, quota or trust group of their own.
    """

    keys: str | None = Field(None, min_length=1)
    default_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    isolate_cache: Literal["auto"] | bool = "auto"
    known: dict[Annotated[str, Field(pattern=NAME)], KnownTenant] = Field(default_factory=dict)

    @property
    def isolates(self) -> bool:
        return self.keys is not None if self.isolate_cache == "auto" else self.isolate_cache

    def has_quota(self, tenant: str) -> bool:
        entry = self.known.get(tenant)
        return entry is not None and entry.tokens_per_s is not None

    def class_among_all(self, tenant: str, service_class: ServiceClass) -> ServiceClass:
        """Return the class by which an overloaded proxy sheds a request: never above its grant."""
        entry = self.known.get(tenant)
        granted = not tenant or (entry is not None and service_class in entry.classes)
        return service_class if granted or service_class == "batch" else "standard"
