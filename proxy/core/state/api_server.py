"""The API server of one backend: when does the engine get a request that is sent now?

The server tokenizes one text after the other, so a request behind a long text waits for it, even if
the engine is idle. The proxy keeps this queue short (`policy/start.py`): the next request
goes out when the texts before it are nearly done, and then the most urgent request goes first.
"""

from forebay.proxy.core.learn.api_server import ServerModel
from forebay.proxy.core.model import INSTANT_S


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
