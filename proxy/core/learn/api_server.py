"""Learn how long requests pass through a backend's API server: seconds by the whole prompt.

vLLM's API server reads and tokenizes a text before the engine sees it, and decodes the prompt once
before the first token leaves. Both times grow with the whole prompt, cached or not, and one text
waits for another. So they are kept apart from the cost model, whose work is the engine's.
"""

from math import exp, inf, log
from typing import Final

from forebay.proxy.core.learn.cost import MOST_OFF, UNPROVEN
from forebay.proxy.core.model import ENOUGH

PRIOR_SERVER_S_PER_TOKEN: Final = 3.8e-6
"""vLLM 0.26 beside an H200. Doubled: the first hits of long prompts are predicted twice as late."""
BEFORE_SHARE: Final = 0.65
"""Of that time, the part in which the next text waits: reading and tokenizing. Doubled (all of it):
hits of one long document are sent half as fast again as the server takes them."""


class ServerModel:
    """Predicts the seconds of one API server.

    Attributes:
        token_s: seconds of each prompt token, before and after the engine.
    """

    __slots__ = ("_observations", "token_s")

    def __init__(self) -> None:
        self.token_s = PRIOR_SERVER_S_PER_TOKEN
        self._observations = 0

    def before_s(self, prompt_tokens: float) -> float:
        """Return the seconds until the engine gets a prompt, with an idle server."""
        return BEFORE_SHARE * self.token_s * prompt_tokens

    def after_s(self, prompt_tokens: float) -> float:
        """Return the seconds from the end of a prefill to its first token."""
        return (1.0 - BEFORE_SHARE) * self.token_s * prompt_tokens

    def observe(self, predicted_s: float, elapsed_s: float) -> None:
        """Learn that what was predicted to take `predicted_s` in the server took `elapsed_s`."""
        off = max(1.0 / MOST_OFF, min(MOST_OFF, elapsed_s / predicted_s))
        self._observations = min(ENOUGH, self._observations + 1)
        self.token_s *= exp(log(off) / self._observations)


class TimeInServer:
    """The time in the API server during one observation of the engine.

    Attributes:
        before_s: until the engine got the first text.
        after_s: from the end of the last step to its answers.
    """

    __slots__ = ("_alone", "_model", "_text_s", "_text_since", "after_s", "before_s")

    def __init__(self, model: ServerModel) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Start an observation."""
        self.before_s = self.after_s = 0.0
        self._alone = False  # one prefill found the engine empty and left it so
        # Of one prefill among others: its seconds in an idle server, and their earliest begin.
        self._text_s = self._text_since = 0.0

    def answered(
        self, prompt_tokens: int, sent_at: float, reached_at: float, since: float, *, last: bool
    ) -> None:
        """Note an answer in an observation that began at `since`; `last`: no prefill is left."""
        after_s = self._model.after_s(prompt_tokens)
        if self._text_s > 0.0:  # more of the same step: the loop decodes the longer prompt first
            self._alone, self._text_s = False, inf
            self.after_s = max(self.after_s, after_s)
            return
        self.before_s = max(0.0, reached_at - since)  # the engine may have waited for its text
        self.after_s = after_s
        self._alone = last and since == sent_at
        self._text_s = max(1e-9, self._model.before_s(prompt_tokens) + after_s)
        self._text_since = max(since, sent_at)

    def learn(self, elapsed_s: float, engine_s: float, since: float) -> None:
        """Learn from an observation that was mostly time in the server."""
        text_took_s = since + elapsed_s - self._text_since - engine_s
        if self._alone:
            self._model.observe(self.before_s + self.after_s, elapsed_s - engine_s)
        elif text_took_s > (1.0 + UNPROVEN) * self._text_s:
            # It took at least so long. While texts queue in a slow server, none is alone.
            self._model.observe(self._text_s, text_took_s)
