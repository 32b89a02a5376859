"""The section of the configuration about tenants: their keys, weights, quotas and caches."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator, model_validator

from forebay.proxy.config.sections import Section
from forebay.proxy.core.model import ServiceClass

NAME = r"^[A-Za-z0-9._-]{1,64}$"
UNLISTED: Final = "*"  # stands in `known` for all tenants together that have no entry
Listed = Annotated[str, Field(pattern=rf"{NAME}|^\*$")]


class KnownTenant(Section):
    """One tenant.

    weight: share of prefill time, relative to other tenants that wait.
    tokens_per_s: quota of prompt tokens.
    burst_tokens: the most that may be sent at once; default: the quota of a minute.
    trust_group: tenants of one group share cached prefixes.
    classes: classes that put its requests before or behind all tenants' requests. Any other class
    orders its own requests only.
    models: the models that it may use, by any of their names; empty: all.
    max_concurrency: requests that it may have at once, waiting requests included.
    tokens_per_hour, tokens_per_day: budgets of prompt and output tokens.
    certificates: names in its client certificates (common name, DNS, URI or e-mail); default: the
    tenant's name.
    """

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst_tokens: float | None = Field(None, gt=0, allow_inf_nan=False)
    trust_group: str | None = Field(None, pattern=NAME)
    classes: tuple[Literal["interactive", "batch"], ...] = ()
    models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_concurrency: PositiveInt | None = None
    tokens_per_hour: PositiveInt | None = None
    tokens_per_day: PositiveInt | None = None
    certificates: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def budgeted(self) -> bool:
        """True if its tokens of an hour or a day are bounded."""
        return bool(self.tokens_per_hour or self.tokens_per_day)

    @model_validator(mode="after")
    def _burst_of_a_rate(self) -> Self:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s, the rate at which it comes back")
        return self


class JwtConfig(Section):
    """Signed tokens (JWT) of an identity provider (extra `jwt`).

    jwks: the provider's public keys: a file, or a URL with https. null: no tokens.
    audience: the audience that tokens must be for.
    issuer: the issuer that they must be from; null: any whose keys are in jwks.
    tenant_claim: the claim of a token that names the tenant.
    """

    jwks: str | None = Field(None, min_length=1)
    audience: str | None = Field(None, min_length=1)
    issuer: str | None = Field(None, min_length=1)
    tenant_claim: str = Field("sub", min_length=1)

    @field_validator("jwks")
    @classmethod
    def _safe_source(cls, jwks: str | None) -> str | None:
        if jwks is not None and "://" in jwks:
            try:
                parts = urlsplit(jwks)
                host = parts.hostname
            except ValueError:
                raise ValueError("give a file or a URL with https") from None
            local = host in ("127.0.0.1", "::1", "localhost")
            if not host or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
                raise ValueError("give a file or a URL with https: else anybody could send keys")
            if "@" in parts.netloc:
                raise ValueError("give the URL without user or password")
        return jwks

    @model_validator(mode="after")
    def _for_somebody(self) -> Self:
        if self.jwks is not None and self.audience is None:
            raise ValueError("jwks needs audience: else tokens for other services would count")
        return self


class Tenants(Section):
    """Keys, weights and quotas of tenants, and which of them share caches.

    keys: a file, or env:NAME for an environment variable, with lines `tenant: key`.

    jwt: tokens that name tenants, in addition to keys or in place of them.
    client_ca: PEM file of authorities, whose client certificates name tenants of `known`.
    default_weight: weight of tenants without a weight of their own.
    isolate_cache: keep tenants from hitting each other's cached prefixes; auto: if there are keys,
    tokens or client_ca.
    known: tenants with a weight, quota or trust group of their own. `*` stands for all others
    together, as if they were one tenant; without it each has the default weight.
    """

    keys: str | None = Field(None, min_length=1)
    jwt: JwtConfig = JwtConfig()
    client_ca: Path | None = None
    default_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    isolate_cache: Literal["auto"] | bool = "auto"
    known: dict[Listed, KnownTenant] = Field(default_factory=dict)

    @field_validator("known")
    @classmethod
    def _unlisted_are_apart(cls, entries: dict[str, KnownTenant]) -> dict[str, KnownTenant]:
        unlisted = entries.get(UNLISTED)
        if unlisted is not None and (unlisted.trust_group or unlisted.certificates):
            raise ValueError("known.*: strangers to each other have no trust_group or certificates")
        return entries

    @model_validator(mode="after")
    def _one_tenant_for_a_name(self) -> Self:
        if self.client_ca is None:
            if names := [name for name, tenant in self.known.items() if tenant.certificates]:
                raise ValueError(f"known.{names[0]}.certificates needs client_ca")
            return self
        if not self.known.keys() - {UNLISTED}:
            raise ValueError("client_ca needs known: list the tenants that certificates may name")
        owners: dict[str, str] = {}
        for tenant, entry in self.known.items():
            for name in entry.certificates or (tenant,):
                if owners.setdefault(name, tenant) != tenant:
                    both = f"{owners[name]} and {tenant}"
                    raise ValueError(
                        f"the certificate name {name!r} stands for {both}: give it to one of them"
                    )
        return self

    @property
    def isolates(self) -> bool:
        return self.authenticates if self.isolate_cache == "auto" else self.isolate_cache

    @property
    def authenticates(self) -> bool:
        """Whether clients must say which tenant they are."""
        return bool(self.keys or self.jwt.jwks or self.client_ca)

    def counted_as(self, tenant: str) -> str:
        """Return the name in `known` whose limits and share hold for a tenant, or its own name."""
        if not tenant or tenant in self.known or UNLISTED not in self.known:
            return tenant
        return UNLISTED

    def entry(self, tenant: str) -> KnownTenant | None:
        """Return the entry in `known` that holds for a tenant."""
        return self.known.get(self.counted_as(tenant)) if tenant else None

    def has_quota(self, tenant: str) -> bool:
        entry = self.entry(tenant)
        return entry is not None and entry.tokens_per_s is not None

    def counts_usage(self, tenant: str) -> bool:
        """True if the tokens of this tenant are charged, so that answers must report them."""
        entry = self.entry(tenant)
        return entry is not None and (entry.tokens_per_s is not None or entry.budgeted)

    def class_among_all(self, tenant: str, service_class: ServiceClass) -> ServiceClass:
        """Return the class by which an overloaded proxy sheds a request: never above its grant."""
        entry = self.entry(tenant)
        granted = not tenant or (entry is not None and service_class in entry.classes)
        return service_class if granted or service_class == "batch" else "standard"
