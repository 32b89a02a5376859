"""Read Mooncake traces: block ids of 512 tokens with times in whole milliseconds.

A row is `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`. Ids are
prefix-chained (an equal id means an equal prefix), and there are ceil(input_length / 512) of them;
both are true of every row of the published files. The extended form with `session_id` and `delay`
is not supported. Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

from forebay.traces.errors import InputError
from forebay.traces.jsonl import block_ids, parse_object, seconds, whole_number
from forebay.traces.reader import RowError, TraceReader
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest

TICK_S = 3.0
"""Arrivals of the conversation trace are on ticks of three seconds."""
TICK_ERROR_S = 0.01
"""These ticks are up to a millisecond early or late."""


def read_mooncake(path: str | Path, *, skip_bad: bool = False) -> TraceReader:
    """Open `path` as a stream of requests; the first arrives at 0, ids are `mooncake-LINE`."""
    return TraceReader(path, _MooncakeRows().parse, skip_bad=skip_bad)


class _MooncakeRows:
    def __init__(self) -> None:
        self._start_ms: float | None = None

    def parse(self, line: bytes, number: int) -> TraceRequest:
        row = parse_object(line)
        if "delay" in row and "timestamp" not in row:
            raise RowError("delay and no timestamp: the extended form is not read")
        time_ms = seconds(row, "timestamp")
        input_tokens = whole_number(row, "input_length", least=1)
        request = TraceRequest(
            id=f"mooncake-{number}",
            arrival_s=(time_ms - (time_ms if self._start_ms is None else self._start_ms)) / 1000,
            input_tokens=input_tokens,
            output_tokens=whole_number(row, "output_length", least=0),
            blocks=block_ids(row, "hash_ids", input_tokens, BLOCK_TOKENS),
        )
        if self._start_ms is None:  # set here, because a bad first row must not set the start
            self._start_ms = time_ms
        return request


def spread_ticks(
    requests: Iterable[TraceRequest],
    *,
    seed: int,
    tick_s: float = TICK_S,
    name: str = "this trace",
) -> Iterator[TraceRequest]:
    """Spread the requests of one tick uniformly at random over the `tick_s` seconds after it.

    The ticks of the conversation trace make its inter-arrival CV 3.03; spread, it is 1.01. Order
    is kept, so prefix sharing is unchanged. Memory: the requests of one tick.

    Args:
        name: name of the trace, for the error.

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
                    f"--spread-ticks: {name} has no {tick_s:g} s ticks ({request.id} comes "
                    f"{gap_s:g} s after the instant before it); leave out --spread-ticks"
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
