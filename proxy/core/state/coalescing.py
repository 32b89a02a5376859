"""A set of prompts that wait, or of which a piece runs, by request: `begun.py`, `leaders.py`."""

from collections.abc import Iterator

from forebay.proxy.core.state.queue import Waiting


class Prompts:
    def __init__(self) -> None:
        self._prompts: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting.request.id in self._prompts

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._prompts.values())

    def add(self, waiting: Waiting) -> None:
        self._prompts[waiting.request.id] = waiting

    def drop(self, request_id: str) -> bool:
        """It belongs here no longer; whether it did."""
        return self._prompts.pop(request_id, None) is not None
