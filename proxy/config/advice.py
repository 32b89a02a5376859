"""Name keys that cannot work, and backends that lack a flag of vLLM or a newer version."""

from collections.abc import Collection, Iterable
from typing import Final

from forebay.proxy.config.contradictions import contradictions
from forebay.proxy.config.schema import Config
from forebay.proxy.core.policy.long_prefills import blocks_short_prompts
from forebay.proxy.log_events import LogEvent, Say

THRESHOLD_REMEDY: Final = (
    "start vLLM with --long-prefill-token-threshold 2048 and set long_prefill_token_threshold: 2048"
)
COMPUTED_WHOLE: Final = (
    "long prompts are computed whole, so every chat behind one waits for it (9 s behind 120,000 "
    "tokens of an 8B model on an H200)"
)

NO_ISOLATION: Final = (
    "drops cache_salt on these paths, so tenants can tell there from the timing what others have "
    "sent"
)
NO_ISOLATION_REMEDY: Final = (
    "upgrade vLLM, give each tenant servers of its own, or set `tenants: {isolate_cache: false}`"
)


def unknown_isolation(backend: str, paths: Iterable[str]) -> str:
    """Return the text about a backend that does not tell whether it drops salts."""
    where = ", ".join(sorted(paths))
    return f"it is not known whether {backend} keeps caches apart on {where}"


def advise(config: Config, say: Say, tenants: Collection[str] | None = None) -> None:
    """Log each contradiction, and each backend on which short prompts wait for long ones.

    Args:
        tenants: those with a key; None: not known.
    """
    for text, remedy in contradictions(config, tenants):
        say(LogEvent.CONFIG_CONTRADICTS, f"{text}: {remedy}")
    buckets = config.core_buckets()
    for spec in config.core_backends():
        if blocks_short_prompts(spec, buckets):
            line = f"{spec.name}: {COMPUTED_WHOLE}: {THRESHOLD_REMEDY}"
            say(LogEvent.LONG_PROMPTS_BLOCK, line, spec.name)
