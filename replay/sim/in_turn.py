"""Model clients without a proxy: requests go directly to the engines in turn."""

from math import inf

from forebay.proxy.core.model import Action, Request, Send


class InTurn:
    """Round-robin over the engines; no request is queued or rejected."""

    wants_usage = False

    def __init__(self) -> None:
        self._names: list[str] = []
        self._next = 0

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        self._names.append(name)
        return []

    def arrive(self, request: Request, now: float) -> list[Action]:
        name = self._names[self._next % len(self._names)]
        self._next += 1
        return [Send(request, name, "", 0.0, 0.0, 0)]

    def first_token(self, request_id: str, now: float) -> list[Action]:
        return []

    def used(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        pass

    def finish(self, request_id: str, now: float) -> list[Action]:
        return []

    def wake_at(self) -> float:
        return inf

    def wake(self, now: float) -> list[Action]:
        return []
