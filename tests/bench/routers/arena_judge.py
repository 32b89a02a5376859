"""Decide whether a run is valid: was anything but the router the bottleneck? Pure.

The comparison is of routers. A run in which the load generator was late, the simulated engines fell
behind their own clock, or the machine had no core left measured something else and is invalid.
"""

from dataclasses import dataclass

VALID, INVALID = "valid", "invalid"
LATE_SHARE = 0.01  # as of the replay's own verdict: one in a hundred may be late
BUSY_SHARE = 0.97  # of all cores over the whole run


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of a bottleneck.

    Attributes:
        replay: the replay's verdict and its reason.
        late_steps: share of engine steps later than can decide a target.
        busy: share of all cores used, by anything, while the run went on.
    """

    replay: str
    reason: str
    late_steps: float
    busy: float


def judge(signs: Signs) -> tuple[str, str]:
    """`valid` or `invalid`, and why."""
    if signs.replay != "valid":
        return INVALID, f"load generator ({signs.replay}): {signs.reason}"
    if signs.late_steps > LATE_SHARE:
        return INVALID, (
            f"engines: {signs.late_steps:.1%} of their steps ended late by their own clock; lower "
            "the time scale"
        )
    if signs.busy > BUSY_SHARE:
        return INVALID, f"machine: {signs.busy:.0%} of all cores were busy"
    return VALID, signs.reason
