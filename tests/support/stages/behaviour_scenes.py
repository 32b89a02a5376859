"""Two simulated engines (Llama-3-8B, H200) in virtual time, and documents with many requests.

Each scene returns figures, which `tests/behaviour/test_behaviour_documents.py` checks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.schema import TraceRequest

BLOCK = 512
HOT = "hot"


def about(
    number: int, at: float, document: str, tokens: int, system: int = 0, output: int = 50
) -> TraceRequest:
    """A question of 100 tokens about a document, behind a system prompt of `system` tokens."""
    system_ids = range(1, 1 + system // BLOCK)
    first = 10**6 * (1 + Random(document).randrange(10**6))
    ids = (*system_ids, *range(first, first + tokens // BLOCK), 10**12 + number)
    prompt = BLOCK * (len(ids) - 1) + 100
    return TraceRequest(str(number), at, prompt, output, ids, document=document)


def computed_whole(outcome: SimOutcome) -> bool:
    """More than half of the prompt was computed."""
    return outcome.served is not None and 2 * outcome.cached_tokens < outcome.request.input_tokens


@dataclass(frozen=True)
class Spread:
    """Where the requests of documents ran.

    Attributes:
        cold: share of the requests of each cold document on the backend that had most of them.
        hot: share of the hot document's requests on the first backend.
        backends: share of all on the first backend.
        whole: times each document was computed whole.
    """

    cold: float
    hot: float
    backends: float
    whole: Counter[str]

    @property
    def extra(self) -> int:
        """Whole prefills of cold documents beyond one each."""
        return sum(count - 1 for name, count in self.whole.items() if name != HOT)


def spread(rows: Sequence[TraceRequest]) -> Spread:
    outcomes = simulate(rows, Scenario()).outcomes
    assert all(o.served for o in outcomes), "a request was refused"
    where: dict[str, Counter[str]] = {}
    whole = Counter[str]()
    for o in outcomes:
        assert o.backend is not None
        name = o.request.document or ""
        where.setdefault(name, Counter())[o.backend] += 1
        whole[name] += computed_whole(o)
    cold = [count for name, count in where.items() if name != HOT]
    hot = where.get(HOT, Counter())
    every = sum((count for count in where.values()), Counter[str]())
    return Spread(
        sum(max(c.values()) for c in cold) / max(1, sum(c.total() for c in cold)),
        hot["gpu0"] / max(1, hot.total()),
        every["gpu0"] / every.total(),
        whole,
    )


def uniform(seed: int, gap_s: float = 0.25, documents: int = 16) -> list[TraceRequest]:
    """160 questions about 16 documents of 20,000 tokens, all equally likely."""
    dice = Random(seed)
    return [about(i, i * gap_s, f"d{dice.randrange(documents)}", 20_000) for i in range(160)]


def hot_alone(rounds: int = 10) -> list[TraceRequest]:
    """32 at once about one document, again every 8 s."""
    return [about(32 * k + i, 8.0 * k, HOT, 20_000) for k in range(rounds) for i in range(32)]


def hot_beside_cold(seed: int, documents: int = 16) -> list[TraceRequest]:
    """32 at once about the hot document every 4 s, and four questions about others between."""
    dice = Random(seed)
    arrivals = [(4.0 * k, HOT) for k in range(12) for _ in range(32)]
    arrivals += [
        (4.0 * k + dice.uniform(0.0, 4.0), f"d{dice.randrange(documents)}")
        for k in range(12)
        for _ in range(4)
    ]
    return [about(i, at, name, 20_000) for i, (at, name) in enumerate(sorted(arrivals))]


@dataclass(frozen=True)
class Fifty:
    """Fifty users of one document of 60,000 tokens.

    Attributes:
        whole: prefills of the whole document.
        first_s: until the document was computed the first time.
        others_s: first tokens of requests that found it cached: seconds after it was cached, or
            after the request arrived if that was later. Ascending.
        ttft_s: the same first tokens, from arrival. Ascending.
        refused: number of the fifty that were rejected.
    """

    whole: int
    first_s: float
    others_s: Sequence[float]
    ttft_s: Sequence[float]
    refused: int


def fifty(over_s: float = 0.0, system: int = 0, cached: bool = False, seed: int = 0) -> Fifty:
    """Fifty users ask about one document, at once or over some seconds.

    Args:
        system: tokens of a system prompt before the document, which others have used already.
        cached: True if a user has asked before, so that the others find the document cached.
    """
    dice, start = Random(seed), 30.0
    rows = [about(1_000 + i, 0.5 * i, f"d{i}", BLOCK, system) for i in range(8 if system else 0)]
    if cached:
        rows.append(about(999, 10.0, HOT, 60_000, system))
    at = sorted(start + dice.uniform(0.0, over_s) for _ in range(50))
    rows += [about(i, s, HOT, 60_000, system, output=100) for i, s in enumerate(at)]
    outcomes = simulate(rows, Scenario()).outcomes[-50:]
    served = [o for o in outcomes if o.first_token_s is not None]
    whole = [o for o in served if computed_whole(o)]
    ready = start if cached else min(o.first_token_s or 0.0 for o in whole)
    hits = [o for o in served if not computed_whole(o)]
    return Fifty(
        len(whole),
        ready - start,
        sorted((o.first_token_s or 0.0) - max(ready, o.request.arrival_s) for o in hits),
        sorted(o.ttft_s or 0.0 for o in hits),
        50 - len(served),
    )
