"""Fit a small model to a trace. `model` describes its content."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from random import Random
from typing import Any, Final

from forebay.traces.edit.edit import text_blocks
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.model import CumulativeRate, FirstTurn, LaterTurn, TrafficModel
from forebay.traces.text import shared_text

SAMPLES: Final = 5_000  # first turns, and later turns: 0.3 MB of JSON
PROFILE_WINDOWS: Final = 240
LEAST_WINDOW_S: Final = 60.0
# A shorter session may begin at any time. The end of a trace cuts off half a span on average, so at
# most a fortieth of the turns is lost.
LONG_SHARE: Final = 1 / 20


class Reservoir:
    """A uniform sample of a stream (Vitter's algorithm R)."""

    def __init__(self, most: int, dice: Random) -> None:
        self.items: list[Any] = []
        self._most = most
        self._dice = dice
        self._seen = 0

    def add(self, item: Any) -> None:
        self._seen += 1
        if len(self.items) < self._most:
            self.items.append(item)
        elif (at := self._dice.randrange(self._seen)) < self._most:
            self.items[at] = item


@dataclass(slots=True, eq=False)
class _Open:
    """A session that may continue: its first turn's sample, its last prompt and time."""

    first: tuple[int, int, int, int]
    start_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    last_s: float
    turns: int = 1


@dataclass(slots=True)
class _Read:
    """Gathers samples and totals in one pass over a trace."""

    first: Reservoir  # requests without a session
    later: Reservoir  # (turn, its session, arrival)
    cache: IdealCache = field(default_factory=IdealCache)
    # The number of the last prompt that used each block. Memory grows with distinct blocks.
    uses: dict[int, int] = field(default_factory=dict)
    sessions: dict[str, _Open] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)  # arrivals without a session
    begin_s: float | None = None
    end_s: float = 0.0
    block_tokens: int = 0
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: float = 0.0

    def add(self, request: TraceRequest) -> None:
        if self.begin_s is None:
            self.begin_s = request.arrival_s
        self.end_s = request.arrival_s - self.begin_s
        # Text counts as blocks, so that its sharing can be measured.
        request = _in_blocks(request)
        blocks = request.blocks or ()
        if blocks:
            self.block_tokens = self.block_tokens or request.block_tokens
        hit = self.cache.look_up(request)
        hits = min(hit.hit_blocks, len(blocks))
        ago = self.requests - self.uses.get(blocks[hits - 1], self.requests) if hits else 0
        self.uses.update(dict.fromkeys(blocks, self.requests))
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.output_tokens += request.output_tokens
        self.hit_tokens += hit.hit_tokens
        # A first turn waits in `sessions` until its number of turns is known.
        row = (request.input_tokens, request.output_tokens, hits, ago)
        if request.session is None:
            self.starts.append(self.end_s)
            self.first.add(FirstTurn(*row, 1))
            return
        before = self.sessions.get(request.session)
        if before is None:
            self.sessions[request.session] = _Open(row, self.end_s, blocks, row[0], self.end_s)
            return
        turn = _later(before, request, self.end_s - before.last_s, hits, ago)
        self.later.add((turn, before, self.end_s))
        before.blocks, before.input_tokens = blocks, request.input_tokens
        before.last_s = self.end_s
        before.turns += 1


def fit(requests: Iterable[TraceRequest], seed: int = 0) -> TrafficModel:
    """Read a trace once. Memory: distinct blocks and sessions, and 8 bytes for each start.

    Raises:
        InputError: fewer than two requests at different times, so there is no rate.
    """
    dice = Random(f"{seed}:fit")
    read = _Read(Reservoir(SAMPLES, dice), Reservoir(SAMPLES, dice))
    for request in requests:
        read.add(request)
    if read.end_s <= 0:
        raise InputError("fewer than two requests at different times: there is no rate to fit")
    duration_s = read.end_s * (1 + 1 / (read.requests - 1))  # until the next request
    # Sort the sessions into short and long-lived.
    least_s = LONG_SHARE * duration_s
    starts, long_lived = read.starts, []
    for session in read.sessions.values():
        if _span(session) >= least_s:
            long_lived.append(session)
            continue
        starts.append(session.start_s)
        read.first.add(FirstTurn(*session.first, session.turns))
    # Short sessions have a profile of starts, long-lived sessions a profile of turns.
    starts.sort()
    window_s, counts = _counts(starts, duration_s, 10)  # with fewer, a rate would be noise
    profile = [round(count / window_s, 9) for count in counts]
    turns = read.later.items
    of_long = [(turn, at_s) for turn, session, at_s in turns if _span(session) >= least_s]
    long_profile, long_later = _even(of_long, duration_s)
    sampled = long_lived if len(long_lived) <= SAMPLES else dice.sample(long_lived, SAMPLES)
    long_first = [
        FirstTurn(*each.first, each.turns, round(each.start_s, 3), round(_span(each), 3))
        for each in sampled
    ]
    return TrafficModel(
        block_tokens=read.block_tokens or BLOCK_TOKENS,
        root_blocks=read.cache.root_blocks,
        window_s=window_s,
        profile=profile,
        session_cv=_variation(starts, window_s, profile),
        first=read.first.items,
        later=[turn for turn, session, _ in turns if _span(session) < least_s],
        long_sessions=len(long_lived),
        long_profile=long_profile,
        long_first=sorted(long_first, key=lambda turn: turn.start_s),
        long_later=long_later,
        requests=read.requests,
        hit_ratio=round(read.hit_tokens / read.input_tokens, 4),
        mean_input_tokens=round(read.input_tokens / read.requests, 2),
        mean_output_tokens=round(read.output_tokens / read.requests, 2),
    )


def _span(session: _Open) -> float:
    return session.last_s - session.start_s


def _in_blocks(request: TraceRequest) -> TraceRequest:
    """Replace the text of a request by block ids made from it."""
    text = shared_text(request)
    if text is None:
        return request
    blocks = text_blocks(text, request.input_tokens)
    return replace(request, text=None, messages=None, blocks=blocks, block_tokens=BLOCK_TOKENS)


def _later(before: _Open, request: TraceRequest, gap_s: float, hits: int, ago: int) -> LaterTurn:
    blocks = request.blocks or ()
    shared = 0
    for old, new in zip(before.blocks, blocks, strict=False):
        if old != new:
            break
        shared += 1
    full = before.input_tokens // request.block_tokens
    continues = request.parent is not None and shared >= full > 0
    # Without blocks, no part is known to be kept, and a turn has a length of its own. So has a
    # turn that shares more with others, such as a question about another document.
    own = (hits > shared and not continues) or not (full and blocks)
    share = 0.0 if own else min(1.0, shared / full)
    return LaterTurn(
        before.input_tokens,
        round(share, 4),
        max(1, round(request.input_tokens - share * before.input_tokens)),
        request.output_tokens,
        round(gap_s, 3),
        -1.0 if request.think_s is None else round(request.think_s, 3),
        hits if own else 0,
        ago if own else 0,
        int(request.parent is not None),
    )


def _counts(times: Sequence[float], duration_s: float, least: int) -> tuple[float, list[int]]:
    """Count times in equal windows, with `least` in each on average. Return their width too."""
    windows = max(1, int(min(PROFILE_WINDOWS, duration_s // LEAST_WINDOW_S, len(times) // least)))
    window_s = duration_s / windows
    counts = [0] * windows
    for time_s in times:
        counts[min(windows - 1, int(time_s / window_s))] += 1
    return window_s, counts


def _even(
    turns: Sequence[tuple[LaterTurn, float]], duration_s: float
) -> tuple[list[float], list[LaterTurn]]:
    """Return the profile of turns over time, and the turns with gaps as if it were even.

    Otherwise a pause of a night could return at noon.
    """
    # A window has a hundred turns on average: `turns` is only a sample.
    window_s, counts = _counts([at_s for _, at_s in turns], duration_s, 100)
    mean = len(turns) / len(counts)
    profile = [round(count / mean, 6) for count in counts] if turns else [1.0]
    rate = CumulativeRate(profile, window_s)
    later = []
    for turn, at_s in turns:
        gap_s = rate.count(at_s) - rate.count(max(0.0, at_s - turn.gap_s))
        later.append(turn._replace(gap_s=round(gap_s, 3)))
    return profile, later


def _variation(starts: Sequence[float], window_s: float, profile: list[float]) -> float:
    """Compute the CV of gaps in units of the expected number of starts."""
    rate = CumulativeRate(profile, window_s)
    gaps = [later - earlier for earlier, later in pairwise(map(rate.count, starts))]
    if not gaps or (mean := sum(gaps) / len(gaps)) == 0:
        return 1.0
    return round(sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean, 4)
