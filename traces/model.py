"""Fit a small model to a trace, and make more traffic like it.

The model holds no text and no names: a profile of the rate of new sessions, the CV of their gaps,
and samples of turns. A sample of a first turn is joint (lengths, shared blocks, how many prompts
ago they were used), so that long prompts keep their own answers and their own sharing. A sample of
a later turn is how much of the prompt before it keeps, what is new, the answer, gap and think time.
A request without a session is a session of one turn.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson

from forebay.traces.errors import InputError
from forebay.traces.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.sharing import IdealCache
from forebay.traces.text import shared_text
from forebay.traces.verbs import group, text_blocks

SAMPLES: Final = 5_000  # of first and of later turns: 0.2 MB of JSON
PROFILE_WINDOWS: Final = 240
LEAST_WINDOW_S: Final = 60.0
VERSION: Final = 1
LOOK_AROUND: Final = 64  # prompts near the wanted one, to find one that is long enough
RECENT: Final = 50_000  # prompts that a new one may share with


@dataclass(slots=True)
class TrafficModel:
    """The result of `fit`.

    Attributes:
        profile: session starts a second in equal windows of `window_s`.
        root_blocks: leading blocks that all prompts share.
        session_cv: CV of the gaps between starts, each gap times the rate of its window.
        first: (input tokens, output tokens, shared blocks, prompts ago, turns) of first turns.
        later: (share of the prompt before that is kept, new tokens, output tokens, gap_s, think_s
            or -1) of later turns.
    """

    block_tokens: int
    root_blocks: int
    window_s: float
    profile: list[float]
    session_cv: float
    first: list[tuple[int, int, int, int, int]]
    later: list[tuple[float, int, int, float, float]]
    version: int = VERSION
    requests: int = 0


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


@dataclass(slots=True)
class _Open:
    """A session that may go on: its first turn's sample, its last prompt and time."""

    first: tuple[int, int, int, int]
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    last_s: float
    turns: int = 1


@dataclass(slots=True)
class _LastUse:
    """The number of the prompt that last used each block; memory grows with distinct blocks."""

    numbers: dict[int, int] = field(default_factory=dict)

    def ago(self, blocks: tuple[int, ...], hits: int, number: int) -> int:
        found = number - self.numbers.get(blocks[hits - 1], number) if hits else 0
        self.numbers.update((one, number) for one in blocks)
        return found


def fit(requests: Iterable[TraceRequest], seed: int = 0) -> TrafficModel:
    """Read a trace once. Memory grows with distinct blocks and sessions, and 8 bytes a start.

    Raises:
        InputError: fewer than two sessions, so there is no rate.
    """
    dice = Random(f"{seed}:fit")
    first, later = Reservoir(SAMPLES, dice), Reservoir(SAMPLES, dice)
    cache, uses = IdealCache(), _LastUse()
    sessions: dict[str, _Open] = {}
    starts: list[float] = []
    block_tokens = 0
    number = -1
    for number, request in enumerate(requests):
        request = _in_blocks(request)
        blocks = request.blocks or ()
        if blocks:
            block_tokens = block_tokens or request.block_tokens
        hits = cache.look_up(request).hit_blocks
        ago = uses.ago(blocks, min(hits, len(blocks)), number)
        before = sessions.get(request.session) if request.session is not None else None
        if before is None:
            starts.append(request.arrival_s)
            row = (request.input_tokens, request.output_tokens, hits, ago)
            opened = _Open(row, blocks, *row[:2], request.arrival_s)
            if request.session is None:
                first.add((*row, 1))
            else:
                sessions[group(request)] = opened
            continue
        later.add(_later(before, request, blocks))
        before.blocks, before.input_tokens = blocks, request.input_tokens
        before.output_tokens, before.last_s = request.output_tokens, request.arrival_s
        before.turns += 1
    for one in sessions.values():
        first.add((*one.first, one.turns))
    if len(starts) < 2 or starts[-1] == starts[0]:
        raise InputError("fewer than two sessions at different times: there is no rate to fit")
    window_s, profile = _profile(starts)
    return TrafficModel(
        block_tokens=block_tokens or 512,
        root_blocks=cache.root_blocks,
        window_s=window_s,
        profile=profile,
        session_cv=_variation(starts, window_s, profile),
        first=first.items,
        later=later.items,
        requests=number + 1,
    )


def _in_blocks(request: TraceRequest) -> TraceRequest:
    """Replace the text of a request by block ids made from it."""
    text = shared_text(request)
    if text is None:
        return request
    blocks = text_blocks(text, request.input_tokens)
    return replace(request, text=None, messages=None, blocks=blocks, block_tokens=BLOCK_TOKENS)


def _later(
    before: _Open, request: TraceRequest, blocks: tuple[int, ...]
) -> tuple[float, int, int, float, float]:
    kept = 0
    for one, other in zip(before.blocks, blocks, strict=False):
        if one != other:
            break
        kept += 1
    full = before.input_tokens // request.block_tokens
    # Without blocks nothing is known to be kept: a turn then has a length of its own.
    share = min(1.0, kept / full) if full and blocks else 0.0
    kept_tokens = share * before.input_tokens
    return (
        round(share, 4),
        max(1, round(request.input_tokens - kept_tokens)),
        request.output_tokens,
        round(request.arrival_s - before.last_s, 3),
        -1.0 if request.think_s is None else round(request.think_s, 3),
    )


def _profile(starts: list[float]) -> tuple[float, list[float]]:
    duration_s = (starts[-1] - starts[0]) * (1 + 1 / (len(starts) - 1))  # to the next start
    # A window holds ten starts on average, or its rate would be noise and not a profile.
    windows = int(min(PROFILE_WINDOWS, duration_s // LEAST_WINDOW_S, len(starts) // 10))
    windows = max(1, windows)
    window_s = duration_s / windows
    counts = [0] * windows
    for start_s in starts:
        counts[min(windows - 1, int((start_s - starts[0]) / window_s))] += 1
    return window_s, [round(one / window_s, 9) for one in counts]


def _variation(starts: list[float], window_s: float, profile: list[float]) -> float:
    """Compute the CV of gaps in units of the expected number of starts."""
    gaps = []
    for one, other in pairwise(starts):
        window = min(len(profile) - 1, int((one - starts[0]) / window_s))
        gaps.append((other - one) * profile[window])
    mean = sum(gaps) / len(gaps)
    if mean == 0:
        return 1.0
    return round(sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean, 4)


def write_model(model: TrafficModel) -> bytes:
    return orjson.dumps(asdict(model), option=orjson.OPT_APPEND_NEWLINE)


def read_model(path: str | Path) -> TrafficModel:
    """Read a model; InputError if it is none."""
    try:
        values = orjson.loads(Path(path).read_bytes())
        model = TrafficModel(**values)
        if model.version != VERSION:
            raise InputError(f"{path}: a model of version {model.version}; fit it again")
        model.first = [(int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in model.first]
        model.later = [
            (float(a), int(b), int(c), float(d), float(e)) for a, b, c, d, e in model.later
        ]
        if not model.first or not any(one > 0 for one in model.profile):
            raise ValueError("no samples")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a model of traces fit ({error}); make one with forebay traces fit"
        ) from error
    return model


def synthesise(
    model: TrafficModel,
    *,
    duration_s: float | None = None,
    requests: int | None = None,
    speed: float = 1.0,
    seed: int = 0,
) -> Iterator[TraceRequest]:
    """Make traffic like the one that was fitted; the profile repeats after its end.

    Args:
        speed: factor of the rate of sessions; think times stay as they are.
    """
    if duration_s is None and requests is None:
        duration_s = model.window_s * len(model.profile)
    maker = _Maker(model, seed)
    starts = _starts(model, speed, Random(f"{seed}:starts"))
    next_start = next(starts)
    due: list[tuple[float, int, _SynthSession]] = []
    for number in count():
        if not due or next_start <= due[0][0]:
            at_s, session = next_start, maker.session()
            next_start = next(starts)
        else:
            at_s, _, session = heappop(due)
        if (requests is not None and number >= requests) or (
            duration_s is not None and at_s >= duration_s
        ):
            return
        yield maker.turn(session, at_s, number)
        if session.left:
            session.next = maker.draw_later()
            heappush(due, (at_s + max(session.next[3], 1e-3), number, session))


def _starts(model: TrafficModel, speed: float, dice: Random) -> Iterator[float]:
    """Make gamma gaps of mean 1 and run them through the profile of rates."""
    shape = 1 / max(model.session_cv, 0.05) ** 2
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
        yield base_s + inside_s


@dataclass(slots=True)
class _SynthSession:
    name: str
    left: int
    first: tuple[int, int, int, int, int]
    blocks: tuple[int, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    parent: str | None = None
    next: tuple[float, int, int, float, float] | None = None


class _Maker:
    """Makes turns with block ids that share what the samples share."""

    def __init__(self, model: TrafficModel, seed: int) -> None:
        self._model = model
        self._dice = Random(f"{seed}:turns")
        self._fresh = count()
        self._names = count()
        self._recent: list[tuple[int, ...]] = []

    def session(self) -> _SynthSession:
        first = self._dice.choice(self._model.first)
        return _SynthSession(f"session-{next(self._names)}", first[4], first)

    def draw_later(self) -> tuple[float, int, int, float, float]:
        return self._dice.choice(self._model.later)

    def turn(self, session: _SynthSession, at_s: float, number: int) -> TraceRequest:
        size = self._model.block_tokens
        if session.next is None:
            input_tokens, output_tokens, hits, ago, _ = session.first
            hits = max(hits, self._model.root_blocks)  # the first prompt of a trace hits nothing
            shared = self._shared(min(hits, input_tokens // size), ago)
            think_s = None
        else:
            share, new, output_tokens, _, think = session.next
            kept = int(session.input_tokens * share)
            input_tokens = max(1, kept + new)
            shared = session.blocks[: min(kept, input_tokens) // size]
            think_s = think if think >= 0 else None
        need = -(-input_tokens // size) - len(shared)
        session.blocks = (*shared, *(next(self._fresh) for _ in range(need)))
        session.input_tokens, session.output_tokens = input_tokens, output_tokens
        session.left -= 1
        self._remember(session.blocks)
        name = f"synth-{number}"
        parent, session.parent = session.parent, name
        return TraceRequest(
            id=name,
            arrival_s=round(at_s, 6),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            blocks=session.blocks,
            block_tokens=size,
            session=session.name if session.first[4] > 1 else None,
            parent=parent,
            think_s=think_s if parent is not None else None,
        )

    def _remember(self, blocks: tuple[int, ...]) -> None:
        self._recent.append(blocks)
        if len(self._recent) > 2 * RECENT:
            del self._recent[:RECENT]

    def _shared(self, hits: int, ago: int) -> tuple[int, ...]:
        """Return the first `hits` blocks of a prompt near the one `ago` prompts back."""
        if not hits or not self._recent:
            return ()
        wanted = max(0, len(self._recent) - max(1, ago))
        best: tuple[int, ...] = ()
        for step in range(LOOK_AROUND):
            for at in (wanted - step, wanted + step):
                if 0 <= at < len(self._recent) and len(self._recent[at]) > len(best):
                    best = self._recent[at]
            if len(best) > hits:
                break
        return best[:hits]
