"""Estimate the tokens of a prompt from its bytes, learned from the `usage` of responses.

    tokens = template + tokens_per_byte * bytes

The chat template dominates a short prompt and hardly matters in a long prompt. So short prompts
teach the first term only, and longer prompts the second, each by its bytes. The texts of a tenant
are similar (one language, one template), so each tenant has an estimate of its own. It starts at
the configured ratio: no tenant changes the estimate of another.

An estimate orders work and rejects no prompt. Only a prompt that is too long at any ratio is
rejected (`fewest_tokens`). The engine, which counts tokens, decides about all others.
"""

from collections import OrderedDict
from statistics import median

SHORT_BYTES = 512  # in a shorter prompt the template dominates
TEMPLATE_GAIN = 0.05
MOST_TEMPLATE = 512  # tokens
STEP = 2.0  # a single response counts as at most this factor away from the learned ratio
LEAST, MOST = 1, 16
"""Bytes per token. A count beyond these bounds does not concern this text. With cl100k, emoji have
1.5, base64 1.4, Chinese 2.5, English 4.5, indented JSON 9, and a table padded with blanks 15."""
KNOWN_BYTES = 128 << 10  # weight of the learned ratio
MOST_BYTES = 32 << 10  # weight of a longer prompt, which moves the ratio by a fifth
MAX_TENANTS = 1024  # beyond this number the least recent tenant is forgotten
MAX_PROMPT_TOKENS = 1 << 30


class TokenEstimate:
    """The estimates of all tenants."""

    def __init__(self, bytes_per_token: float) -> None:
        self._first = _Ratio(1.0 / bytes_per_token)
        self._tenants: OrderedDict[str, _Ratio] = OrderedDict()

    @property
    def bytes_per_token(self) -> float:
        """The median over the tenants, without their templates, for reports."""
        ratios = self._tenants.values() or [self._first]
        return 1.0 / median(ratio.tokens_per_byte for ratio in ratios)

    def tokens(self, prompt_bytes: int, tenant: str = "") -> int:
        """Return the estimated tokens of a prompt, at least 1."""
        ratio = self._tenants.get(tenant, self._first)
        return max(1, round(ratio.template_tokens + ratio.tokens_per_byte * prompt_bytes))

    def untaught_tokens(self, prompt_bytes: int) -> int:
        """Return the tokens at the configured ratio, which no answer has changed, for quotas."""
        return round(self._first.tokens_per_byte * prompt_bytes)

    def learn(self, prompt_bytes: int, prompt_tokens: int, tenant: str = "") -> None:
        """Learn from the count of a backend. An impossible count is ignored."""
        if type(prompt_tokens) is not int or not 0 < prompt_tokens <= MAX_PROMPT_TOKENS:
            return
        if not prompt_bytes:
            return
        ratio = self._tenants.get(tenant)
        if ratio is None:
            ratio = self._tenants[tenant] = _Ratio(self._first.tokens_per_byte)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        ratio.learn(prompt_bytes, prompt_tokens)


class _Ratio:
    """Tokens of a template and per byte of text, as one tenant's answers show them."""

    __slots__ = ("template_tokens", "tokens_per_byte")

    def __init__(self, tokens_per_byte: float) -> None:
        self.tokens_per_byte = tokens_per_byte
        self.template_tokens = 0.0

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        ratio = self.tokens_per_byte
        if prompt_bytes < SHORT_BYTES:
            template = min(MOST_TEMPLATE, max(0.0, prompt_tokens - ratio * prompt_bytes))
            self.template_tokens += TEMPLATE_GAIN * (template - self.template_tokens)
            return
        counted = max(0.0, prompt_tokens - self.template_tokens) / prompt_bytes
        counted = min(ratio * STEP, max(ratio / STEP, min(1 / LEAST, max(1 / MOST, counted))))
        weight = min(prompt_bytes, MOST_BYTES)
        self.tokens_per_byte += weight / (KNOWN_BYTES + weight) * (counted - ratio)


def fewest_tokens(prompt_bytes: int) -> int:
    """Return the least number of tokens of a text of this length."""
    return prompt_bytes // MOST
