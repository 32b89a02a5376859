"""What prefills took on one engine: which of them the time that passed is attributed to.

An observation begins when the engine begins to prefill and ends when it has answered: prefills that
are computed in one step answer together and are measured together. Work that others had there in
the meantime counts, too (`others.py`).
"""

from typing import Final

from forebay.proxy.core.learn.cost import CostModel, features
from forebay.proxy.core.state.chunks import LEARN_FROM
from forebay.proxy.core.state.elsewhere import NOTHING, Elsewhere
from forebay.proxy.core.state.in_flight import Flight
from forebay.proxy.core.state.prefill_queue import Line

OBSERVE_AFTER_S: Final = 0.05  # prefills batched in one step answer together: measure them together
# While other proxies have prefills there too, whose end we hear of up to 0.1 s late.
OBSERVE_SHARED_S: Final = 0.5


class Observation:
    """Tells `cost` what prefills took.

    Attributes:
        work: terms of all prefills done while there were others (cost.features), for them to know.
    """

    def __init__(self, cost: CostModel) -> None:
        self.work = NOTHING
        self._cost = cost
        self._terms = NOTHING
        self._since = 0.0
        self._others_before = NOTHING  # their work done when it began

    def begin(self, now: float, others: Elsewhere | None) -> None:
        """Anew: what was measured so far is learned, or means nothing."""
        self._terms = NOTHING
        self._since = now
        if others is not None:
            self._others_before = others.work

    def answered(self, flight: Flight, line: Line, now: float, others: Elsewhere | None) -> None:
        """A prefill is over and has left the line."""
        fixed, linear, pairs = features(flight.uncached_tokens, flight.request.prompt_tokens)
        a, b, c = self._terms
        self._terms = a + fixed, b + linear, c + pairs
        if others is not None:
            a, b, c = self.work
            self.work = a + fixed, b + linear, c + pairs
        elapsed_s = now - self._since
        if others is not None and self._others_worked(others):
            if not line.prefills or elapsed_s >= OBSERVE_SHARED_S:
                self._learn_shared(others, elapsed_s)
                self.begin(now, others)
        elif not line.prefills or (elapsed_s >= OBSERVE_AFTER_S and self._mostly_ended(line)):
            if elapsed_s > 0:
                self._cost.observe(self._terms, elapsed_s)
            self.begin(now, others)

    def _mostly_ended(self, line: Line) -> bool:
        """Whether the time since it began went to prefills that have ended."""
        return not line.mixed or (self._cost.total_s(self._terms) >= LEARN_FROM * line.total_s)

    def _others_worked(self, others: Elsewhere) -> bool:
        """Whether the engine did others' prefills too since it began."""
        return others.work != self._others_before or others.busy_since(self._since)

    def _learn_shared(self, others: Elsewhere, elapsed_s: float) -> None:
        """The engine did others' prefills as well as ours; too short a look tells nothing."""
        if elapsed_s < OBSERVE_SHARED_S:
            return
        (a, b, c), (d, e, f), (x, y, z) = self._terms, others.work, self._others_before
        self._cost.observe((a + d - x, b + e - y, c + f - z), elapsed_s)
