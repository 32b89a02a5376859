"""Estimate the tokens of a prompt from its bytes, learned from the `usage` of responses.

The texts of a tenant are similar (one language, one template), so each tenant has a ratio of its
own, which starts at the common one. One tenant's prompts do not change another's estimates.
"""

from collections import OrderedDict

GAIN = 0.05
STEP = 2.0  # one response counts as at most this factor away from the known ratio
LEAST, MOST = 1.0, 16.0  # bytes per token: beyond these the count does not concern this text
MAX_TENANTS = 1024  # the least recent one is forgotten
MAX_PROMPT_TOKENS = 1 << 30


class TokenEstimate:
    """Smoothed ratios of prompt bytes to prompt tokens, of each tenant and of all."""

    def __init__(self, bytes_per_token: float) -> None:
        self.bytes_per_token = bytes_per_token
        self._tenants: OrderedDict[str, float] = OrderedDict()

    def tokens(self, prompt_bytes: int, tenant: str = "") -> int:
        """Return the estimated tokens of a prompt, at least 1."""
        return max(1, round(prompt_bytes / self._ratio(tenant)))

    def learn(self, prompt_bytes: int, prompt_tokens: int, tenant: str = "") -> None:
        """Learn from the count of a backend; an impossible count is ignored."""
        if type(prompt_tokens) is not int or not 0 < prompt_tokens <= MAX_PROMPT_TOKENS:
            return
        if prompt_bytes < 256:  # in shorter prompts the chat template dominates
            return
        ratio = min(MOST, max(LEAST, prompt_bytes / prompt_tokens))
        if tenant:
            self._tenants[tenant] = _nearer(self._ratio(tenant), ratio)
            self._tenants.move_to_end(tenant)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self.bytes_per_token = _nearer(self.bytes_per_token, ratio)

    def _ratio(self, tenant: str) -> float:
        return self._tenants.get(tenant, self.bytes_per_token)


def _nearer(known: float, seen: float) -> float:
    seen = min(known * STEP, max(known / STEP, seen))
    return known + GAIN * (seen - known)
