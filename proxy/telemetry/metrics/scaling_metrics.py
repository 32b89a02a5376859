"""Metrics for autoscalers: the used share of a model's backends, and the number it needs.

Use is counted in backends. It is the larger of two sums: seconds of prefill that arrive per second,
and shares of slots or KV cache that are held. Rejected requests count in the first sum, because a
larger fleet would take their work. A request that comes back when told counts once. Embeddings and
other requests that pass no queue count by their slots only.

`ModelUse` decides, and reads no clock. `ScalingMetrics` shows it.
"""

from collections.abc import Callable, Iterable
from math import exp
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from forebay.proxy.core.learn.decay import DecayedSum
from forebay.proxy.core.model import REMEMBERED_MOST
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend

WINDOW_S: Final = 60.0
"""Time constant of both sums. Doubled: steadier, and a rise of the load is answered later."""
LEAST_SEEN_S: Final = 15.0  # a shorter time says nothing about a rate
PLANNED_SHARE: Final = 0.7
"""Share of a backend that is planned to be used: the rest is for bursts, and for the minutes until
another backend is up. Halved: twice the backends."""


class FamilyNeed(NamedTuple):
    """The need of one family: backends with the same main model.

    Attributes:
        saturation: the share of its backends that are up which is used; 1.0 is full. Above 1.0 more
            work arrives than they can take.
        backends: backends that would be used to PLANNED_SHARE, with fractions. So the figures of
            several proxies can be added before they are rounded up.
    """

    saturation: float
    backends: float


class ModelUse:
    """Adds up the use of each family (`Backend.family`)."""

    def __init__(self) -> None:
        self._work: dict[str, DecayedSum] = {}
        self._began_at: dict[str, float] = {}  # first arrival by family
        self._held: dict[str, float] = {}
        self._looked_at = 0.0

    def arrived(self, family: str, prefill_s: float, now: float) -> None:
        """Note a new request with this predicted prefill, whether or not it is admitted."""
        work = self._work.get(family)
        if work is None:
            if len(self._work) >= REMEMBERED_MOST:
                return
            work = self._work[family] = DecayedSum(WINDOW_S)
            self._began_at[family] = now
        work.add(prefill_s, now)

    def look(self, backends: Iterable[Backend], now: float) -> None:
        """Average slots and KV cache over time. Call it every few seconds."""
        shares: dict[str, float] = {}
        for backend in backends:
            shares[backend.family] = shares.get(backend.family, 0.0) + held_share(backend)
        newer = 1.0 - exp((self._looked_at - now) / WINDOW_S)
        before, self._looked_at, self._held = self._held, now, {}
        for family, share in shares.items():
            average = before.get(family, share)
            self._held[family] = average + newer * (share - average)
        for family in self._work.keys() - shares.keys():
            del self._work[family], self._began_at[family]

    def needs(self, backends: Iterable[Backend], now: float) -> dict[str, FamilyNeed]:
        """Return the need of each family."""
        up: dict[str, int] = {}
        for backend in backends:
            up[backend.family] = up.get(backend.family, 0) + backend.up
        return {family: self._need(family, number, now) for family, number in up.items()}

    def _need(self, family: str, up: int, now: float) -> FamilyNeed:
        rate = 0.0
        if (work := self._work.get(family)) is not None:
            seen_s = max(LEAST_SEEN_S, now - self._began_at[family])
            # The sum began at 0, so its rate is too low until the window is full.
            rate = work.rate(now) / (1.0 - exp(-seen_s / WINDOW_S))
        use = max(rate, self._held.get(family, 0.0))
        return FamilyNeed(use / max(1, up), use / PLANNED_SHARE)


def held_share(backend: Backend) -> float:
    """Return the larger share of a backend's slots and KV cache that this proxy holds."""
    slots = (backend.sequences + backend.passing) / backend.spec.max_concurrency
    kv = backend.kv.held / backend.kv_tokens if backend.kv_tokens else 0.0
    return min(1.0, max(slots, kv))


class ScalingMetrics:
    """A collector. Its label is the main model of backends, "" while that is unknown.

    Args:
        clock: the clock of the shaper.

    Attributes:
        use: the use of each model so far.
    """

    def __init__(self, shaper: Shaper, clock: Callable[[], float]) -> None:
        self._shaper = shaper
        self._clock = clock
        self.use = ModelUse()
        shaper.report_demand(self.use.arrived)

    def look(self, now: float) -> None:
        """Average slots and KV cache over time. Call it every few seconds."""
        self.use.look(self._shaper.backends.values(), now)

    def collect(self) -> Iterable[Metric]:
        saturation = GaugeMetricFamily(
            "forebay_saturation",
            "Share of a model's backends that is used; above 1: more work arrives than they take",
            labels=["model"],
        )
        backends = GaugeMetricFamily(
            "forebay_backends_wanted",
            "Backends that a model wants, with fractions: add up processes, then round up",
            labels=["model"],
        )
        needs = self.use.needs(self._shaper.backends.values(), self._clock())
        for model, need in needs.items():
            saturation.add_metric([model], need.saturation)
            backends.add_metric([model], need.backends)
        yield from (saturation, backends)
