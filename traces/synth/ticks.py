"""Spread arrivals that are on ticks, as in Mooncake's conversation trace."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from random import Random

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

TICK_S = 3.0
"""Arrivals of the conversation trace are on ticks of three seconds."""
TICK_ERROR_S = 0.01
"""The ticks are up to a millisecond early or late."""


def spread_ticks(
    requests: Iterable[TraceRequest], *, seed: int, tick_s: float = TICK_S
) -> Iterator[TraceRequest]:
    """Spread the requests of one tick uniformly at random over the `tick_s` seconds after it.

    The ticks of the conversation trace make its inter-arrival CV 3.03. Spread, it is 1.01. The
    order and so the prefix sharing stay. Memory: the requests of one tick.

    Raises:
        InputError: two ticks are less than `tick_s` apart, so they would overlap.
    """
    dice = Random(f"{seed}:ticks")
    tick: list[TraceRequest] = []
    for request in requests:
        if tick and request.arrival_s != tick[0].arrival_s:
            gap_s = request.arrival_s - tick[0].arrival_s
            if gap_s < tick_s - TICK_ERROR_S:
                raise InputError(
                    f"--spread: this trace has no {tick_s:g} s ticks ({request.id} comes "
                    f"{gap_s:g} s after the instant before it); leave out --spread"
                )
            yield from _spread(tick, tick_s, dice, request.arrival_s)
            tick = []
        tick.append(request)
    yield from _spread(tick, tick_s, dice)


def _spread(
    tick: list[TraceRequest], tick_s: float, dice: Random, next_s: float = inf
) -> Iterator[TraceRequest]:
    for offset_s, request in zip(sorted(dice.random() * tick_s for _ in tick), tick, strict=True):
        due_s = min(request.arrival_s + offset_s, next_s)  # the next tick may be early
        yield replace(request, arrival_s=round(due_s, 6))
