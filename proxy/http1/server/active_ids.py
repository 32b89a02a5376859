"""Keep the ids of requests unique at the servers: vLLM up to 0.11 mixes up requests of one id."""

from itertools import count


class ActiveIds:
    """The ids of requests that are being served, as the servers know them."""

    def __init__(self) -> None:
        self._active: set[str] = set()
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._active)

    def take(self, id_: str) -> str:
        """Return the id, or a longer id while another request has it. Free it afterwards."""
        while id_ in self._active:
            id_ = f"{id_[:64]}-{next(self._numbers)}"
        self._active.add(id_)
        return id_

    def free(self, id_: str) -> None:
        """Let other requests have the id that `take` returned."""
        self._active.discard(id_)
