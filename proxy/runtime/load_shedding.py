"""Protect the proxy from overload: measure its resources, and shed classes of requests.

One task sleeps in short steps and measures how late it wakes: this is the lag of the event loop.
Once a second it also reads memory and file descriptors, and decides. Of the lag only the CPU time
of the process counts: on a shared machine, other processes take the processor away for 0.1 s and
more. Work for strangers does not count either, as shedding the requests of known clients would not
reduce it: parsing HTTP, and rejecting requests before their body is read.

A proxy that runs out of event loop, memory or file descriptors fails every request. Before that it
rejects the least urgent class: first batch, then standard, at last every class. At each look it
goes one step up if a reading is above the limit of its step, and one step down once every reading
is well below, so that it does not flap. A loop that is late now and then sheds batch. Standard is
shed only where the loop is late as a rule.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

from forebay.proxy.config.sections import Limits
from forebay.proxy.core.model import CLASSES, SLACK, ServiceClass
from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.runtime.memory import NO_DESCRIPTOR, memory_limit, resident_bytes

LAG_STEP_S = 0.05
LAG_STEPS = 200  # percentiles are over the last 10 s
DECIDE_EVERY = 20  # steps
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


class Protection:
    """Sheds classes while resources are short, and `run` runs: as long as the proxy lives.

    Attributes:
        shed: number of classes that are rejected now.
    """

    def __init__(
        self,
        limits: Limits,
        say: Say,
        lagged: Callable[[float], None],
        read: Callable[[float, float], Reading] | None = None,
        strangers_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Take the limits.

        Args:
            lagged: gets each lag of the event loop, in seconds.
            read: replaces the measurement; its arguments are the lag's p99 and median.
            strangers_s: returns the time that work for strangers has taken so far.
        """
        self._say = say
        self._lagged = lagged
        self._read = read or self._measure
        self.strangers_s = strangers_s
        self._lags: deque[float] = deque(maxlen=LAG_STEPS)
        self._resident_bytes = 0.0  # at the last reading
        self.reconfigure(limits)
        self.reading = Reading()
        self.shed = 0

    def reconfigure(self, limits: Limits) -> None:
        self._memory_bytes = memory_limit(limits)
        self._lag_s = limits.loop_lag

    def rejects(self, service_class: ServiceClass) -> bool:
        return self.shed > 0 and refused(service_class, self.shed)

    def decide(self) -> None:
        """Measure once, and decide which classes to shed."""
        lags = sorted(self._lags)
        p99_s, median_s = (lags[len(lags) * n // 100] if lags else 0.0 for n in (99, 50))
        self.reading = self._read(p99_s, median_s)
        shed, before = next_shed(self.shed, self.reading), self.shed
        self.shed = shed
        if shed > before:
            why = ", ".join(self.reading.over(before)).replace("_", " ")
            line = f"overloaded ({why}): rejecting {shed} of 3 service classes"
            self._say(LogEvent.OVERLOADED, line)
        elif before and not shed:
            line = "no longer overloaded: all service classes are accepted"
            self._say(LogEvent.OVERLOAD_OVER, line)

    async def run(self) -> None:
        """Measure and decide again and again."""
        clock = asyncio.get_running_loop().time
        steps = 0
        while True:
            due, own_s = clock() + LAG_STEP_S, process_time() - self.strangers_s()
            await asyncio.sleep(LAG_STEP_S)
            lag_s = max(0.0, clock() - due)
            # A machine that stood still is no sign of overload.
            own_s = process_time() - self.strangers_s() - own_s
            self._lags.append(max(0.0, min(lag_s, own_s)))
            self._lagged(lag_s)
            steps += 1
            if steps % DECIDE_EVERY == 0:
                self.decide()

    def _measure(self, lag_p99_s: float, lag_median_s: float) -> Reading:
        self._resident_bytes = resident_bytes(self._resident_bytes)
        memory = self._resident_bytes / self._memory_bytes
        lag, usual_lag = lag_p99_s / self._lag_s, lag_median_s / self._lag_s
        return Reading(lag, usual_lag, memory, descriptor_share())


def descriptor_share() -> float:
    """Return the share of the file descriptors in use, or 0 if it is unknown."""
    try:
        import resource

        used = len(os.listdir("/proc/self/fd"))
    except ImportError:
        return 0.0
    except OSError as error:  # reading this needs a descriptor too
        return 1.0 if error.errno in NO_DESCRIPTOR else 0.0
    return used / resource.getrlimit(resource.RLIMIT_NOFILE)[0]
