"""The API server of one backend: how long does a text take, and when is it through?

vLLM's API server reads and tokenizes a text before the engine sees it, and decodes the prompt once
before the first token leaves. Both times grow with the whole prompt, cached or not, and one text
waits for another. So they are kept apart from the cost model, whose work is the engine's.

The server tokenizes one text after the other, so a request behind a long text waits for it, even if
the engine is idle. The proxy keeps this queue short (`policy/start.py`): the next request goes out
when the texts before it are nearly done, and then the most urgent request goes first.
"""

from math import exp, log
from typing import Final

from forebay.proxy.core.learn.cost import MOST_OFF
from forebay.proxy.core.model import ENOUGH, INSTANT_S

PRIOR_SERVER_S_PER_TOKEN: Final = 3.8e-6
"""vLLM 0.26 with an H200. Doubled: the first hits of long prompts are predicted twice as late."""
BEFORE_SHARE: Final = 0.65
"""Part of that time in which the next text waits: reading and tokenizing. Doubled (all of it):
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
        """Learn that work predicted to take `predicted_s` in the server took `elapsed_s`."""
        off = max(1.0 / MOST_OFF, min(MOST_OFF, elapsed_s / predicted_s))
        self._observations = min(ENOUGH, self._observations + 1)
        self.token_s *= exp(log(off) / self._observations)


class TimeInServer:
    """The time in the API server during one observation of the engine.

    Attributes:
        before_s: time until the engine got the first text.
        after_s: time from the end of the last step to its answers.
        alone: one prefill found the engine empty and left it so.
    """

    __slots__ = ("_answers", "_model", "after_s", "alone", "before_s")

    def __init__(self, model: ServerModel) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        """Start an observation."""
        self.before_s = self.after_s = 0.0
        self.alone = False
        self._answers = 0

    def answered(
        self, prompt_tokens: int, sent_at: float, reached_at: float, since: float, *, last: bool
    ) -> None:
        """Note an answer in an observation that began at `since`. `last`: no prefill is left."""
        self._answers += 1
        # Answers of one step come together: the event loop decodes the longer prompt first.
        self.after_s = max(self.after_s, self._model.after_s(prompt_tokens))
        if self._answers == 1:  # the engine may have waited for its text
            self.before_s = max(0.0, reached_at - since)
        self.alone = self._answers == 1 and last and since == sent_at

    def learn(self, elapsed_s: float, engine_s: float) -> None:
        """Learn from an observation that was mostly time in the server.

        With other prefills in the engine, its steps and earlier texts take time, too. Such an
        observation is dropped.
        """
        if self.alone:
            self._model.observe(self.before_s + self.after_s, elapsed_s - engine_s)


class ApiServerQueue:
    """The texts that a backend's API server has yet to tokenize, as predicted.

    Attributes:
        model: the seconds that each text takes.
        free_at: when the last of them is through.
    """

    __slots__ = ("free_at", "model")

    def __init__(self) -> None:
        self.model = ServerModel()
        self.free_at = 0.0

    def wait_s(self, now: float) -> float:
        """Return the seconds until the server begins a text that is sent now."""
        left_s = self.free_at - now
        return left_s if left_s > 0.0 else 0.0  # half the time of max, and asked for each backend

    @property
    def room_at(self) -> float:
        """When the next request may be sent, so that the server has it just in time."""
        return self.free_at - INSTANT_S

    def join(self, prompt_tokens: int, now: float) -> float:
        """Add a request that is sent now. Returns the time at which the engine gets it."""
        self.free_at = max(self.free_at, now) + self.model.before_s(prompt_tokens)
        return self.free_at

    def answered(self, reached_at: float, now: float) -> None:
        """Note an answer to a request that was to reach the engine at `reached_at`."""
        if reached_at > now:  # the server is faster, and all texts behind this text come earlier
            self.free_at -= reached_at - now

    def restarted(self) -> None:
        """Forget the texts: the server went away with them."""
        self.free_at = 0.0
