"""Which service classes does a proxy shed when it is short of resources itself?

A proxy that runs out of event loop, memory or file descriptors fails every request. Before that it
rejects the least urgent class: first batch, then standard, at last every class. At each look it
goes one step up if a reading is above the limit of its step, and one step down once every reading
is well below, so that it does not flap. A loop that is late now and then sheds batch. Standard is
shed only where the loop is late as a rule.
"""

from dataclasses import dataclass

from forebay.proxy.core.model import CLASSES, SLACK, ServiceClass

ORDER = tuple(reversed(CLASSES))  # shed in this order
SHARE_MOST = (0.8, 0.9, 0.95)  # the limit for each class of ORDER


@dataclass(frozen=True, slots=True)
class Reading:
    """Resources that the process uses, or 0 where unknown.

    Attributes:
        lag: recent lateness of the event loop, 99th percentile, as a multiple of the limit.
        usual_lag: the same at the median.
        memory: resident memory, as a share of its limit.
        descriptors: file descriptors, as a share of their limit.
    """

    lag: float = 0.0
    usual_lag: float = 0.0
    memory: float = 0.0
    descriptors: float = 0.0

    def over(self, step: int, share: float = 1.0) -> tuple[str, ...]:
        """Return the readings above `share` of the limit for the class ORDER[step]."""
        lag = (self.lag, self.usual_lag, 0.0)[step]  # a busy loop still serves the most urgent
        shares = share * SHARE_MOST[step]
        return tuple(
            name
            for name, value, most in (
                ("event_loop", lag, share),
                ("memory", self.memory, shares),
                ("descriptors", self.descriptors, shares),
            )
            if value > most
        )


def next_shed(shed: int, reading: Reading) -> int:
    """Return the number of classes of ORDER to shed from now on. `shed` is the number so far."""
    if shed < len(ORDER) and reading.over(shed):
        return shed + 1
    if shed > 0 and not reading.over(shed - 1, 1.0 - SLACK):
        return shed - 1
    return shed


def refused(service_class: ServiceClass, shed: int) -> bool:
    """True if requests of this class are rejected."""
    return service_class in ORDER[:shed]
