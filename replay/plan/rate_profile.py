"""Make arrivals whose rate changes with time: bursts, ramps, steps and days. Pure.

Each profile is a Poisson process with a known rate at every moment. Unit-rate arrivals are mapped
through the inverse of the integrated rate (E. Cinlar, Introduction to Stochastic Processes, 1975,
4.7).

    onoff:ON/OFF        Poisson for ON, no arrival for OFF, and so on. --rate is the mean
    ramp:A-B/TIME       from A to B requests a second within TIME, then B
    steps:A,B,.../TIME  A requests a second for TIME, then B, ... and ends after the last
    diurnal:PEAK/TIME   a sine with period TIME and a peak of PEAK times (1 to 2) the mean
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

CELLS = 1000  # parts of a period or ramp, each with a constant rate
FORMS = {
    "onoff": "onoff:10s/50s",
    "ramp": "ramp:1-10/5m",
    "steps": "steps:1,2,4/60s",
    "diurnal": "diurnal:1.8/24h",
}


@dataclass(frozen=True, slots=True)
class RateProfile:
    """A rate over time. The kind decides the meaning of durations `times_s` and rates `levels`."""

    kind: str
    levels: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def absolute(self) -> bool:
        """True if it has its own rates, so that no other rate can be set."""
        return self.kind in ("ramp", "steps")

    def cells(self, mean_per_s: float) -> Iterator[tuple[float, float]]:
        """Yield durations with their rates, endlessly except for steps."""
        if self.kind == "steps":
            yield from ((self.times_s[0], level) for level in self.levels)
            return
        if self.kind == "onoff":
            on, off = self.times_s
            while True:
                yield on, mean_per_s * (on + off) / on
                yield off, 0.0
        period = self.times_s[0]
        if self.kind == "ramp":
            low, high = self.levels
            for cell in range(CELLS):
                yield period / CELLS, low + (high - low) * (cell + 0.5) / CELLS
            while True:
                yield period, high
        while True:
            for cell in range(CELLS):
                wave = math.sin(2 * math.pi * (cell + 0.5) / CELLS)
                yield period / CELLS, mean_per_s * (1 + (self.levels[0] - 1) * wave)

    def arrival_times(self, count: int, mean_per_s: float, dice: Random) -> Iterator[float]:
        """Make at most `count` ascending times in seconds from 0."""
        target, passed, now_s = dice.expovariate(1.0), 0.0, 0.0
        yielded = 0
        for length_s, rate in self.cells(mean_per_s):
            more = length_s * rate
            while target <= passed + more:
                if yielded == count:
                    return
                yield now_s + (target - passed) / rate
                yielded += 1
                target += dice.expovariate(1.0)
            passed += more
            now_s += length_s
            if yielded == count:
                return


def parse_profile(kind: str, value: str, text: str) -> RateProfile:
    """Read the part of `--arrivals` after the colon (InputError: another form)."""
    left, _, right = value.partition("/")
    try:
        if kind == "onoff":
            return _checked(RateProfile(kind, (), (_time(left), _time(right))))
        if kind == "ramp":
            low, _, high = left.partition("-")
            return _checked(RateProfile(kind, (float(low), float(high)), (_time(right),)))
        levels = tuple(float(level) for level in left.split(","))
        return _checked(RateProfile(kind, levels, (_time(right),)))
    except ValueError as error:
        why = f" ({error})" if str(error).startswith("the ") else ""
        raise InputError(f"--arrivals: {text!r} is not of the form {FORMS[kind]}{why}") from None


def _time(text: str) -> float:
    time_s = float(seconds(text))
    if not time_s > 0:
        raise ValueError("the times must be above 0")
    return time_s


def _checked(profile: RateProfile) -> RateProfile:
    levels = profile.levels
    if not all(math.isfinite(level) and 0 <= level <= 1e6 for level in levels):
        raise ValueError("the rates must be 0 to 1e6")
    if profile.kind == "diurnal" and not (len(levels) == 1 and 1 <= levels[0] <= 2):
        raise ValueError("the peak must be 1 to 2 times the mean")
    if profile.absolute and not any(levels):
        raise ValueError("the rates must not all be 0")
    if profile.kind == "ramp" and levels[1] <= 0:
        raise ValueError("the last rate must be above 0")
    return profile
