"""The table where names in the configuration meet policies."""

from forebay.proxy.core.policy.routing import Route, fewest_tokens, least_work, warm_or_least_work

ROUTES: dict[str, Route] = {
    "warm_or_least_work": warm_or_least_work,
    "least_work": least_work,
    "fewest_tokens": fewest_tokens,
}
