"""How many tokens a prompt has, from its bytes: learned from the `usage` of the answers."""

GAIN = 0.05
LEAST, MOST = 1.0, 16.0  # bytes a token: beyond these the answer is not about this text


class TokenEstimate:
    """A smoothed ratio of prompt bytes to prompt tokens."""

    def __init__(self, bytes_per_token: float) -> None:
        self.bytes_per_token = bytes_per_token

    def tokens(self, prompt_bytes: int) -> int:
        """Estimated tokens of a prompt of so many bytes, at least 1."""
        return max(1, round(prompt_bytes / self.bytes_per_token))

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """A backend counted `prompt_tokens` in a prompt of `prompt_bytes`."""
        if prompt_bytes >= 256 and prompt_tokens > 0:  # below, the chat template dominates
            ratio = min(MOST, max(LEAST, prompt_bytes / prompt_tokens))
            self.bytes_per_token += GAIN * (ratio - self.bytes_per_token)
