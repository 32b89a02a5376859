"""Which requests a proxy that is short of something itself still takes.

A proxy that runs out of event loop, memory or file descriptors fails everybody. Before that it
refuses the least urgent: first batch, then standard, at the last everyone. It goes one step up
each time it looks and finds too much for the step it is on, and one step down once everything is
well below the limit of that step, so that it does not flap around it. A loop that is late now and
then costs batch its place; standard is refused only where the loop is late as a rule.
"""

from dataclasses import dataclass

from forebay.proxy.core.model import ServiceClass

ORDER: tuple[ServiceClass, ...] = ("batch", "standard", "interactive")  # who goes first

SHARE_MOST = (0.8, 0.9, 0.95)  # above which each class of ORDER is refused
CALM = 0.9  # of a limit: below that, one step down


@dataclass(frozen=True, slots=True)
class Reading:
    """What the process uses; 0 where that is not known.

    Attributes:
        lag: how late the event loop was lately, at the 99th percentile, as a multiple of the
            limit.
        usual_lag: the same at the median.
        memory: resident memory, as a share of what it may have.
        descriptors: file descriptors, as a share of what it may have.
    """

    lag: float = 0.0
    usual_lag: float = 0.0
    memory: float = 0.0
    descriptors: float = 0.0

    def over(self, step: int, share: float = 1.0) -> tuple[str, ...]:
        """What is above `share` of the limit for the class ORDER[step]."""
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
    """How many classes of ORDER to refuse from now on, when it was `shed` until now."""
    if shed < len(ORDER) and reading.over(shed):
        return shed + 1
    if shed > 0 and not reading.over(shed - 1, CALM):
        return shed - 1
    return shed


def refused(service_class: ServiceClass, shed: int) -> bool:
    """Whether a request of this class is turned away."""
    return service_class in ORDER[:shed]
