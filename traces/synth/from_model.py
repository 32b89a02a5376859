"""Make more traffic like a fitted trace.

The traffic repeats the fitted time span up to its duration. Short sessions begin at
random, at the rate of the profile. A long-lived session begins and ends at about the
same times as the original: its turns are drawn, and their times follow the profile of such turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import count
from random import Random
from typing import Final, Generic, TypeVar

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.model import CumulativeRate, FirstTurn, LaterTurn, TrafficModel

Sample = TypeVar("Sample")
LOOK_AROUND: Final = 64  # prompts near the drawn place, to find a prompt that is long enough
RECENT: Final = 50_000  # prompts that a new prompt may share with
LEAST_GAP_S: Final = 1e-3
HAND: Final = 16  # later turns, of which the best fit to the last prompt is next


class _Deck(Generic[Sample]):
    """Samples in random order, each once before any sample repeats.

    Independent draws would miss the mean of a few hundred requests with rare long prompts by a
    fifth.
    """

    def __init__(self, samples: Sequence[Sample], dice: Random) -> None:
        self._samples = samples
        self._dice = dice
        self._left: list[Sample] = []

    def draw(self) -> Sample:
        if not self._left:
            self._left = list(self._samples)
            self._dice.shuffle(self._left)
        return self._left.pop()


@dataclass(slots=True)
class _Span:
    """The time from a long-lived session's start to its end, in which its gaps must fit."""

    at_s: float
    begin: float
    end: float
    total_s: float
    passed_s: float = 0.0


@dataclass(slots=True)
class _SynthSession:
    """An unfinished session, with its remaining turns in any order."""

    name: str | None
    first: FirstTurn
    left: list[LaterTurn]
    span: _Span | None = None
    blocks: tuple[int, ...] = ()
    input_tokens: int = 0
    last_id: str | None = None
    next: LaterTurn | None = None


def synthesise(
    model: TrafficModel,
    *,
    duration_s: float | None = None,
    requests: int | None = None,
    speed: float = 1.0,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Make traffic like the fitted trace, which repeats after its end.

    Args:
        speed: factor of the number of sessions. Think times stay the same.
    """
    # Without a limit, the traffic is as long as the trace that was fitted.
    if duration_s is None and requests is None:
        duration_s = model.duration_s
    maker = _Maker(model, seed)
    starts = merge(
        maker.short_sessions(speed, Random(f"{seed}:starts")),
        maker.long_sessions(speed, Random(f"{seed}:long")),
        key=lambda start: start[0],
    )
    # The next request is the next turn that is due, or the start of a session.
    next_start, opened = next(starts)
    due: list[tuple[float, int, _SynthSession]] = []
    for number in count():
        if not due or next_start <= due[0][0]:
            at_s, session = next_start, opened
            next_start, opened = next(starts)
        else:
            at_s, _, session = heappop(due)
        if duration_s is not None and at_s >= duration_s:
            return
        if requests is not None and number >= requests:
            return
        yield maker.turn(session, at_s, number)
        if session.left:
            session.next = maker.next_turn(session)
            heappush(due, (at_s + max(session.next.gap_s, LEAST_GAP_S), number, session))


class _Maker:
    """Makes turns whose block ids share as many blocks as the samples do."""

    def __init__(self, model: TrafficModel, seed: int) -> None:
        dice = Random(f"{seed}:turns")
        self._model = model
        self._first = _Deck(model.first, dice)
        self._later = _Deck(model.later or model.long_later, dice)
        self._long_later = _Deck(model.long_later or model.later, dice)
        window_s = model.duration_s / max(1, len(model.long_profile))
        self._long_rate = CumulativeRate(model.long_profile, window_s)
        self._longest = max(
            *(turn.input_tokens for turn in (*model.first, *model.long_first)),
            *(
                round(turn.before_tokens * turn.share) + turn.new_tokens
                for turn in (*model.later, *model.long_later)
            ),
            0,
        )
        self._fresh = count()
        self._names = count()
        self._recent: list[tuple[int, ...]] = []

    def short_sessions(self, speed: float, dice: Random) -> Iterator[tuple[float, _SynthSession]]:
        """Make gamma gaps of mean 1 and run them through the profile of rates."""
        model = self._model
        shape = 1 / max(model.session_cv, 0.05) ** 2
        if not model.first or not any(rate > 0 for rate in model.profile):
            return
        window, inside_s, base_s = 0, 0.0, 0.0
        while True:
            left = dice.gammavariate(shape, 1 / shape)
            while True:
                rate = model.profile[window % len(model.profile)] * speed
                room = (model.window_s - inside_s) * rate
                if left <= room and rate > 0:
                    inside_s += left / rate
                    break
                left -= room
                window, inside_s, base_s = window + 1, 0.0, base_s + model.window_s
            yield base_s + inside_s, self._open(self._first.draw(), self._later)

    def long_sessions(self, speed: float, dice: Random) -> Iterator[tuple[float, _SynthSession]]:
        """Begin each long-lived session once in each repetition, or `speed` times on average."""
        model = self._model
        if not model.long_first:
            return
        end_s = max(first.start_s + first.span_s for first in model.long_first)
        copies = model.long_sessions / len(model.long_first) * speed
        for repetition in count():
            starts: list[tuple[float, FirstTurn]] = []
            owed = dice.random()
            for first in model.long_first:
                owed += copies
                while owed >= 1:
                    owed -= 1
                    # Copies, and other seeds, begin inside the first gap.
                    late_s = dice.random() * first.span_s / first.turns
                    starts.append((first.start_s + late_s, first))
            starts.sort()
            for start_s, first in starts:
                session = self._open(first, self._long_later)
                session.span = _Span(
                    start_s,
                    self._long_rate.count(start_s),
                    self._long_rate.count(min(start_s + first.span_s, end_s)),
                    sum(turn.gap_s for turn in session.left),
                )
                yield repetition * model.duration_s + start_s, session

    def _open(self, first: FirstTurn, later: _Deck[LaterTurn]) -> _SynthSession:
        name = f"session-{next(self._names)}" if first.turns > 1 else None
        return _SynthSession(name, first, [later.draw() for _ in range(first.turns - 1)])

    def next_turn(self, session: _SynthSession) -> LaterTurn:
        """Take the turn that followed a prompt of similar length: contexts grow, and end."""
        left, length = session.left, session.input_tokens
        near = range(max(0, len(left) - HAND), len(left))
        at = min(near, key=lambda index: abs(left[index].before_tokens - length))
        turn, left[at] = left[at], left[-1]
        left.pop()
        return turn if session.span is None else self._timed(turn, session.span, len(left))

    def _timed(self, turn: LaterTurn, span: _Span, left: int) -> LaterTurn:
        """Fit the gap of a turn between start and end of its session."""
        span.passed_s += turn.gap_s
        share = span.passed_s / span.total_s if span.total_s and left else 1.0
        at_s = self._long_rate.time(span.begin + (span.end - span.begin) * share)
        gap_s = max(0.0, at_s - span.at_s)
        span.at_s = max(span.at_s, at_s)
        return turn._replace(gap_s=gap_s, think_s=min(turn.think_s, gap_s))

    def turn(self, session: _SynthSession, at_s: float, number: int) -> TraceRequest:
        """Make the next turn of a session."""
        # A first turn shares with other prompts, a later turn with the turn before.
        size = self._model.block_tokens
        turn = session.next
        if turn is None:
            input_tokens, output_tokens, hits, ago = session.first[:4]
            hits = max(hits, self._model.root_blocks)  # the first prompt of a trace hits nothing
            shared = self._shared(min(hits, input_tokens // size), ago)
        else:
            kept_tokens = int(session.input_tokens * turn.share)
            if kept_tokens + turn.new_tokens > self._longest:  # the context would be compacted
                kept_tokens = min(kept_tokens, int(turn.before_tokens * turn.share))
            input_tokens, output_tokens = max(1, kept_tokens + turn.new_tokens), turn.output_tokens
            shared = session.blocks[: min(kept_tokens, input_tokens) // size]
            if turn.hits:
                shared = self._shared(min(turn.hits, input_tokens // size), turn.ago)
        # The rest of the prompt is new.
        need = -(-input_tokens // size) - len(shared)
        session.blocks = (*shared, *(next(self._fresh) for _ in range(need)))
        session.input_tokens = input_tokens
        self._recent.append(session.blocks)
        if len(self._recent) > 2 * RECENT:
            del self._recent[:RECENT]
        name = f"synth-{number}"
        parent, session.last_id = session.last_id, name
        follows = turn if turn is not None and turn.follows else None
        return TraceRequest(
            id=name,
            arrival_s=round(at_s, 6),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            blocks=session.blocks,
            block_tokens=size,
            session=session.name,
            parent=parent if follows else None,
            think_s=follows.think_s if follows and follows.think_s >= 0 else None,
        )

    def _shared(self, hits: int, ago: int) -> tuple[int, ...]:
        """Return the first `hits` blocks of a prompt from about `ago` prompts before."""
        if not hits or not self._recent:
            return ()
        middle = max(0, len(self._recent) - max(1, ago))
        best: tuple[int, ...] = ()
        for step in range(LOOK_AROUND):
            for at in (middle - step, middle + step):
                if 0 <= at < len(self._recent) and len(self._recent[at]) > len(best):
                    best = self._recent[at]
            if len(best) > hits:
                break
        return best[:hits]
