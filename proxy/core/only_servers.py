"""Tell which models only one of several backends serves."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

NOTHING: Final[frozenset[str]] = frozenset()


class UpModels:
    """What the backends that are up serve, counted once for all that ask.

    Args:
        served: the models of each; None where they are unknown.
    """

    def __init__(self, served: Iterable[frozenset[str] | None]) -> None:
        up = list(served)
        self._count = len(up)
        self._unknown = up.count(None)
        self._serving = Counter(model for models in up for model in models or ())

    def only_its(self, models: frozenset[str] | None, *, up: bool) -> frozenset[str] | None:
        """Return which of its models no other backend serves; None: all, as far as known.

        Args:
            models: of the backend that asks.
            up: it is one of those that were counted.
        """
        unknown = self._unknown - (up and models is None)
        if models is None or unknown:
            return NOTHING if self._count > up else None
        rest = frozenset(one for one in models if self._serving[one] <= up)
        return None if rest == models else rest
