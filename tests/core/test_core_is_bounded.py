"""The state of the core is bounded, however many requests, tenants and prompts there were.

FOREBAY_BOUNDED_REQUESTS=1000000 plays more of them: each of another tenant, with another prompt.
"""

import gc
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from math import inf

import pytest

from forebay.proxy.api.token_estimate import MAX_TENANTS, TokenEstimate
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.health import Health
from forebay.proxy.core.learn.decay import LOAD_TIME_S
from forebay.proxy.core.model import (
    CLASSES,
    REMEMBERED_MOST,
    Action,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
)
from forebay.proxy.core.shaper import Shaper

REQUESTS = int(os.environ.get("FOREBAY_BOUNDED_REQUESTS", "4000"))
HISTORY = 200  # receipts
MOST = 200_000  # items of all containers together
PER_S = 20.0
# Filled slowly, up to a bound: places of rejected requests, histograms of answer lengths by tenant,
# of about 40 bins each, and accounts of tenants that were active lately, each in two containers.
SLOWLY = {
    "ReturnTimes": REMEMBERED_MOST,
    "OutputLengths": REMEMBERED_MOST,
    "LengthHistogram": 40 * REMEMBERED_MOST,
    "Fairness": 2 * round(1.5 * PER_S * LOAD_TIME_S),
}
BUCKETS = (Bucket("chat", 2_000, 64, 2.0), Bucket("document", 50_000, 64, 30.0, 1))
CONTAINERS = (dict, list, set, deque)


def containers(root: object) -> Iterator[tuple[str, int]]:
    """Yield the place and the length of each container that is reached from `root`."""
    seen, todo = {id(root)}, [("", root)]
    while todo:
        place, found = todo.pop()
        ours = type(found).__module__.startswith("forebay.")
        if isinstance(found, CONTAINERS):
            yield place, len(found)
        elif not ours and not isinstance(found, tuple):
            continue
        name = type(found).__name__ if ours else ""
        for each in gc.get_referents(found):
            if id(each) not in seen and not isinstance(each, type):
                seen.add(id(each))
                todo.append((f"{place}.{name}" if name else place, each))


class Life:
    """Requests of strangers, whose engines answer, fail, hang or are left by their clients."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0.0
        self.recorder = DecisionRecorder(HISTORY)
        specs = [BackendSpec(f"b{i}", 64, 100_000, priority=bool(i)) for i in range(2)]
        self.shaper = Shaper(specs, BUCKETS, recorder=self.recorder)
        self.health = Health([spec.name for spec in specs])
        self.estimate = TokenEstimate(4.0)
        self.sent: dict[str, Send] = {}
        self.waiting: set[str] = set()
        self.number = 0
        for spec in specs:
            self.shaper.backend_up(spec.name, 0.0)
            self.health.probe_passed(spec.name, 0.0)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            id_ = action.request.id
            self.waiting.discard(id_)
            if isinstance(action, Reject):
                self.sent.pop(id_, None)
                continue
            self.sent[id_] = action
            self.health.sent(action.backend, id_, action.predicted_ttft_s, self.now)

    def arrive(self) -> None:
        dice, self.number = self.dice, self.number + 1
        tokens = int(dice.choice((50, 500, 1_500, 8_000, 40_000)) * dice.uniform(0.5, 1.2))
        blocks = tuple(dice.getrandbits(64) for _ in range(tokens // 512))
        request = Request(
            f"r{self.number}", tokens, dice.choice((1, 200, 8_000)), blocks, 512.0,
            dice.choice((inf, 1.0, 20.0)), dice.random() < 0.8, f"tenant {self.number}",
            dice.choice(CLASSES), pure=dice.random() < 0.8, identity=self.number,
        )  # fmt: skip
        self.waiting.add(request.id)
        self.do(self.shaper.arrive(request, self.now))

    def progress(self, id_: str) -> None:
        """Let one of the things happen that may happen to a request that was sent."""
        send, shaper, now = self.sent.pop(id_), self.shaper, self.now
        request, name = send.request, send.backend
        match self.dice.randrange(8):
            case 0:
                self.health.left(name, id_)
            case 1 if id_ not in self.waiting:
                self.health.failed(name, id_, now)
                self.waiting.add(id_)
                self.do(shaper.retry(id_, now))
                return
            case _:
                self.do(shaper.first_token(id_, now) if request.streams else [])
                self.health.answered(name, id_, now)
                shaper.used(id_, self.dice.randrange(500), now, 0, request.prompt_tokens)
                self.estimate.learn(
                    4 * request.prompt_tokens, request.prompt_tokens, request.tenant
                )
        self.do(shaper.finish(id_, now))

    def step(self) -> None:
        self.now += self.dice.expovariate(PER_S)
        if (at := self.shaper.wake_at()) <= self.now:
            self.do(self.shaper.wake(max(at, self.now)))
        self.arrive()
        while len(self.sent) > self.dice.randrange(40):
            self.progress(next(iter(self.sent)))
        if self.waiting and self.dice.random() < 0.1:
            id_ = min(self.waiting)
            self.waiting.discard(id_)
            self.do(self.shaper.cancel(id_, self.now))
        if self.number % 20 == 0:
            self.health.look_for_gray(self.now)
        self.health.intakes(self.now)
        self.health.new_transitions()

    def sizes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for root in (self.shaper, self.recorder, self.health, self.estimate):
            for place, length in containers(root):
                found[place] += length
        return found


@pytest.mark.parametrize("seed", [0])
def test_the_state_of_the_core_is_bounded(seed: int) -> None:
    life = Life(seed)
    for _ in range(REQUESTS // 2):
        life.step()
    half = life.sizes()
    for _ in range(REQUESTS // 2):
        life.step()
    whole = life.sizes()
    for place, length in whole.items():
        bound = SLOWLY.get(place.rpartition(".")[2], 1.2 * half[place] + 500)
        assert length <= bound, (place, half[place], length)
    assert sum(whole.values()) < MOST, whole.most_common(5)
    assert len(life.estimate._tenants) <= MAX_TENANTS
    while life.sent:
        life.now += 0.1
        life.progress(next(iter(life.sent)))
        life.do(life.shaper.wake(life.now))
    assert not any(b.in_flight or b.queued or b.kv.tokens for b in life.shaper.backends.values())


def test_a_map_that_grows_is_seen() -> None:
    life = Life(0)
    before = sum(life.sizes().values())
    life.shaper._state.running.update({str(i): (None, None) for i in range(500)})  # type: ignore[misc]
    assert sum(life.sizes().values()) == before + 500
