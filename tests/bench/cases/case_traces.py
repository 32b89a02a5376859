"""Make the requests of the cases: prompts in blocks of 80 tokens that share what users share.

Times are in seconds, lengths in tokens. A head is a beginning that prompts share, in whole blocks.
An answer is new text in the prompt of the next turn: only the earlier prompt is in the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import exp, log
from pathlib import Path
from random import Random

from forebay.traces.formats import open_trace
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.ticks import spread_ticks

BLOCK = 80
HEAD_IDS = 10**4  # ids of one head
OWN_IDS = 10**9  # the first id that only one request or conversation has
Rows = list[TraceRequest]
Pieces = Sequence[tuple[float, float]]
"""Seconds and requests a second of each part of a run."""
Make = Callable[[Pieces, int], Rows]
"""Makes the requests of a run from a seed."""
Draw = Callable[[Random], float]


def lognormal(mean: float, sigma: float, least: int = 1, most: float = 10**9) -> Draw:
    """Return a lognormal distribution of this mean. `sigma` belongs to the logarithm."""
    middle = log(mean) - sigma**2 / 2
    return lambda dice: min(max(exp(dice.gauss(middle, sigma)), least), most)


def normal(mean: float, sigma: float, least: int = 1, most: float = 10**9) -> Draw:
    return lambda dice: min(max(dice.gauss(mean, sigma), least), most)


def uniform(least: float, most: float) -> Draw:
    return lambda dice: dice.uniform(least, most)


def exponential(mean: float) -> Draw:
    return lambda dice: dice.expovariate(1 / mean) if mean else 0.0


def fixed(value: float) -> Draw:
    return lambda dice: value


def geometric(mean: float) -> Draw:
    """Return a geometric distribution of 1, 2, 3 and so on."""

    def draw(dice: Random) -> float:
        return float(next(n for n in count(1) if dice.random() < 1 / mean))

    return draw


def arrivals(pieces: Pieces, dice: Random, before_s: float = 0.0) -> Iterator[float]:
    """Yield the times of Poisson streams in turn, the first from -before_s on."""
    start_s, end_s = -before_s, 0.0
    for seconds, rate in pieces:
        end_s += seconds
        at_s = start_s + dice.expovariate(rate)
        while at_s < end_s:
            yield at_s
            at_s += dice.expovariate(rate)
        start_s = end_s


def blocks(head: int, head_tokens: int, own: int, prompt_tokens: int) -> tuple[int, ...]:
    """Return the ids of a prompt: whole blocks of a head, then ids from `own` on."""
    shared = head_tokens // BLOCK
    rest = -(-prompt_tokens // BLOCK) - shared
    return (*range(head * HEAD_IDS, head * HEAD_IDS + shared), *range(own, own + rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Requests of their own: a head, new text, an answer.

    Attributes:
        own: the length of the new text.
        heads: number of heads, each of a length drawn from `head`.
        weight: how often the i-th head is chosen, from 0 on.
        most: longer prompts are dropped, so that the rate is a little lower than named.
        classes: service classes and how often each comes.
    """

    own: Draw
    answer: Draw
    heads: int = 0
    head: Draw | None = None
    weight: Callable[[int], float] = lambda i: 1.0
    most: int = 10**9
    classes: tuple[tuple[str, float], ...] = ()

    def __call__(self, pieces: Pieces, seed: int) -> Rows:
        dice, rows = Random(f"prompts {seed}"), Rows()
        heads = [int(self.head(dice)) // BLOCK * BLOCK for _ in range(self.heads) if self.head]
        weights = list(accumulate(self.weight(i) for i in range(self.heads)))
        names = [name for name, _ in self.classes]
        shares = [share for _, share in self.classes]
        for number, at_s in enumerate(arrivals(pieces, dice)):
            chosen = dice.choices(range(self.heads), cum_weights=weights)[0] if heads else 0
            head_tokens = heads[chosen] if heads else 0
            prompt_tokens = head_tokens + int(self.own(dice))
            answer_tokens = max(1, int(self.answer(dice)))
            kind = dice.choices(names, shares)[0] if names else None
            if prompt_tokens > self.most:
                continue
            own = OWN_IDS + number * HEAD_IDS
            ids = blocks(chosen, head_tokens, own, prompt_tokens)
            rows.append(
                TraceRequest(
                    str(number), at_s, prompt_tokens, answer_tokens, ids, BLOCK, service_class=kind
                )
            )
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPrompts:
    """The same prompts in one shuffled order, again and again."""

    heads: int
    head_tokens: int
    questions: int
    question_tokens: int
    answer_tokens: int

    def __call__(self, pieces: Pieces, seed: int) -> Rows:
        dice, rows = Random(f"fixed {seed}"), Rows()
        order = [(head, asked) for head in range(self.heads) for asked in range(self.questions)]
        dice.shuffle(order)
        prompt_tokens = self.head_tokens + self.question_tokens
        for number, at_s in enumerate(arrivals(pieces, dice)):
            head, asked = order[number % len(order)]
            own = OWN_IDS + (head * self.questions + asked) * HEAD_IDS
            ids = blocks(head, self.head_tokens, own, prompt_tokens)
            rows.append(
                TraceRequest(str(number), at_s, prompt_tokens, self.answer_tokens, ids, BLOCK)
            )
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations whose prompts grow from turn to turn, and which began before the start.

    Attributes:
        per_conversation: requests of a conversation in the mean; the rate is divided by it.
        start: tokens of its own that the first prompt has after the head.
        added: tokens that each turn adds, the first one too, after the answer before.
        pause: seconds from an answer to the next turn.
        most: tokens of prompt and answer at which it ends.
        before_s: conversations that began so long before the start are there.
    """

    per_conversation: float
    heads: int
    head_tokens: int
    start: Draw
    added: Draw
    answer: Draw
    turns: Draw
    pause: Draw
    most: int
    before_s: float

    def __call__(self, pieces: Pieces, seed: int) -> Rows:
        dice, rows = Random(f"conversations {seed}"), Rows()
        end_s = sum(seconds for seconds, _ in pieces)
        begun = [(seconds, rate / self.per_conversation) for seconds, rate in pieces]
        for number, at_s in enumerate(arrivals(begun, dice, self.before_s)):
            rows += self._of_one(number, at_s, end_s, dice)
        return sorted(rows, key=lambda row: row.arrival_s)

    def _of_one(
        self, number: int, at_s: float, end_s: float, dice: Random
    ) -> Iterator[TraceRequest]:
        head = dice.randrange(self.heads)
        base = OWN_IDS + number * 100 * HEAD_IDS
        prompt_tokens = self.head_tokens + int(self.start(dice))
        parent, pause_s = None, 0.0
        for turn in range(round(self.turns(dice))):
            prompt_tokens += max(1, int(self.added(dice)))
            answer_tokens = max(1, int(self.answer(dice)))
            if prompt_tokens + answer_tokens > self.most or at_s >= end_s:
                return
            if at_s >= 0:
                ids = blocks(head, self.head_tokens, base, prompt_tokens)
                if prompt_tokens % BLOCK:  # the last block ends elsewhere in the next turn
                    ids = (*ids[:-1], base + 10 * HEAD_IDS + turn)
                yield TraceRequest(
                    f"{number}-{turn}", at_s, prompt_tokens, answer_tokens, ids, BLOCK,
                    session=str(number), parent=parent, think_s=pause_s if parent else None,
                )  # fmt: skip
                parent = f"{number}-{turn}"
            pause_s = self.pause(dice)
            at_s += 1.0 + 0.03 * answer_tokens + pause_s
            prompt_tokens += answer_tokens


@dataclass(frozen=True, slots=True)
class Published:
    """A random window of Mooncake's conversation trace, its times stretched to the rate.

    Its ticks of three seconds are spread.
    """

    path: Path
    rows: int = 4_000
    most: int = 131_000

    def __call__(self, pieces: Pieces, seed: int) -> Rows:
        listed = [
            row
            for row in spread_ticks(open_trace(self.path), seed=seed)
            if row.input_tokens + row.output_tokens < self.most
        ]
        ((seconds, rate),) = pieces
        count = min(self.rows, int(rate * seconds), len(listed))
        first = Random(f"window {seed}").randrange(len(listed) - count + 1)
        return stretched(listed[first : first + count], rate)


def stretched(rows: Sequence[TraceRequest], rate: float) -> Rows:
    """Return the rows from 0 on, at this rate in the mean."""
    start_s, end_s = rows[0].arrival_s, rows[-1].arrival_s
    factor = len(rows) / rate / (end_s - start_s)
    return [replace(row, arrival_s=(row.arrival_s - start_s) * factor) for row in rows]
