"""How many tokens a prompt has, from its bytes: learned from the `usage` of the answers.

A tenant's texts are alike (one language, one template), so each is learned apart, from the common
ratio on: what one tenant sends does not move what another's prompts are taken for.
"""

from collections import OrderedDict

GAIN = 0.05
STEP = 2.0  # one answer counts as at most this factor away from what was known
LEAST, MOST = 1.0, 16.0  # bytes a token: beyond these the answer is not about this text
MAX_TENANTS = 1024  # the least recently seen is forgotten
MAX_PROMPT_TOKENS = 1 << 30


class TokenEstimate:
    """A smoothed ratio of prompt bytes to prompt tokens, for each tenant and for all."""

    def __init__(self, bytes_per_token: float) -> None:
        self.bytes_per_token = bytes_per_token
        self._tenants: OrderedDict[str, float] = OrderedDict()

    def tokens(self, prompt_bytes: int, tenant: str = "") -> int:
        """Estimated tokens of a prompt of so many bytes, at least 1."""
        return max(1, round(prompt_bytes / self._ratio(tenant)))

    def learn(self, prompt_bytes: int, prompt_tokens: int, tenant: str = "") -> None:
        """A backend counted `prompt_tokens` in a prompt of `prompt_bytes`.

        Counts that no prompt can have are ignored; the others are clamped.
        """
        if type(prompt_tokens) is not int or not 0 < prompt_tokens <= MAX_PROMPT_TOKENS:
            return
        if prompt_bytes < 256:  # below, the chat template dominates
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
