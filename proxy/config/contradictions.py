"""Find keys that are valid alone but cannot work together: names or limits that match nothing.

Each is a warning, and not an error: a reload may add the other half a moment later.
"""

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Final

from forebay.proxy.config.schema import Config
from forebay.proxy.config.tenants import UNLISTED
from forebay.traces.ground.command_line.quantities import bytes_text, seconds_text

LEAST_FIRST_TOKEN_S: Final = 1.0  # no server answers all prompts sooner
Contradiction = tuple[str, str]
"""A setting that cannot work, and the remedy."""


def contradictions(config: Config, tenants: Collection[str] | None) -> Iterator[Contradiction]:
    """Yield each contradiction of a valid configuration.

    Args:
        tenants: names that have a key; None: any name may occur.
    """
    if tenants is not None:
        yield from _tenants(config, tenants)
    yield from _names_of_models(config)
    yield from _limits(config)
    yield from _targets(config)
    if config.mode == "observe" and config.hold.max_requests:
        yield (
            "hold: mode observe sends each request at once, but hold keeps requests back",
            "leave hold out until you set mode: shape",
        )


def _tenants(config: Config, tenants: Collection[str]) -> Iterator[Contradiction]:
    configured = config.tenants.known
    if configured and not tenants:
        text = "tenants.known: without keys nobody is a tenant, so no quota or weight is in force"
        yield text, "set tenants.keys"
        return
    for name in configured:
        if name not in tenants and name != UNLISTED:
            text = f"tenants.known: {name} has no key, so nothing of it is in force"
            yield text, f"give it a key, or correct the name{_close(name, tenants)}"


def _names_of_models(config: Config) -> Iterator[Contradiction]:
    if not all(backend.models for backend in config.backends):
        return  # a backend that is asked may serve it
    served = sorted({name for backend in config.backends for name in backend.models})
    for alias, name in config.models.items():
        if served and name not in served:
            text = f"models: {alias} stands for {name}, which no backends[].models names"
            yield text, f"correct the name{_close(name, served)}"


def _limits(config: Config) -> Iterator[Contradiction]:
    longest = max(bucket.up_to for bucket in config.buckets)
    needed = int(longest * config.tokens.bytes_per_token)
    if config.limits.body < needed:
        yield (
            f"limits.body: {bytes_text(config.limits.body)} holds no prompt of {longest:,} tokens, "
            "which the last bucket takes",
            f"raise limits.body to {bytes_text(needed)}, or lower up_to of the last bucket",
        )
    for key in ("first_token", "answer"):
        limit_s = getattr(config.timeouts, key)
        if limit_s is not None and limit_s < LEAST_FIRST_TOKEN_S:
            yield (
                f"timeouts.{key}: {seconds_text(limit_s)} ends nearly every request",
                f"give at least {seconds_text(LEAST_FIRST_TOKEN_S)}",
            )


def _targets(config: Config) -> Iterator[Contradiction]:
    for bucket in config.buckets:
        at, target, wait = f"buckets.{bucket.name}", bucket.target_s, bucket.max_wait
        if target > wait:
            yield (
                f"{at}: no request waits for its target of {seconds_text(target)}, as max_wait is "
                f"{seconds_text(wait)}",
                f"raise max_wait to {seconds_text(target)}, or lower target",
            )


def _close(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return f": did you mean {close[0]}?" if close else ""
