"""A preview says what would be decided about a request, and changes no decision."""

import random
from collections import deque
from functools import cache
from math import inf

import pytest
from core_requests import all_up
from decisions import Scramble

from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import CLASSES, BackendSpec, Bucket, Request, Tenant
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper

SECONDS = 40.0


class Previewed(Scramble):
    """The same random events, and before each of them previews of requests that never come."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.other_dice = random.Random(f"preview {seed}")
        self.states: set[str] = set()

    def event(self, kind: str, of: str) -> None:
        dice = self.other_dice
        for _ in range(2):
            blocks = dice.choice(self.documents)[: dice.choice([1, 20, 200])]
            request = Request(
                "preview", 512 * len(blocks) + 100, 100, blocks, 512.0, dice.choice([inf, 3.0]),
                dice.random() < 0.7, dice.choice(["a", "b", "new", ""]) if self.fair else "",
                dice.choice(CLASSES),
            )  # fmt: skip
            self.states.add(self.shaper.preview(request, self.now).state)
        super().event(kind, of)


@pytest.mark.parametrize("seed", range(8))
def test_previews_change_no_decision(seed: int) -> None:
    plain, previewed = Scramble(seed), Previewed(seed)
    plain.run(SECONDS)
    previewed.run(SECONDS)
    assert previewed.states >= {"refused", "prefilling"}
    assert (str(previewed.digest), str(previewed.explained)) == (
        str(plain.digest),
        str(plain.explained),
    )


CACHES = {
    "_moved",
    "ranks",
    "room_at",
    "room_beside_at",
    "silent_at",
    "_seeds",
    "_heap",
    "_places",
    "_full",
}
"""Attributes that are kept so as not to be computed twice; they follow from the rest."""


PLAIN = {type(None), bool, int, float, str, bytes, frozenset}


def facts(thing: object, seen: dict[int, int]) -> object:
    """Everything below `thing` as plain values that can be compared."""
    if type(thing) in PLAIN or callable(thing):
        return thing
    if id(thing) in seen:
        return f"<{seen[id(thing)]}>"
    seen[id(thing)] = len(seen)
    if isinstance(thing, dict):
        return [(facts(key, seen), facts(value, seen)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque | set):
        return [facts(one, seen) for one in thing]
    names = (*slots_of(type(thing)), *getattr(thing, "__dict__", ()))  # type: ignore[arg-type]
    return [
        (name, facts(getattr(thing, name), seen))
        for name in names
        if name not in CACHES and hasattr(thing, name)
    ]


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


class Looked(Previewed):
    """Previews after each of which the state is what it was, to the last bit."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.looks = 0

    def event(self, kind: str, of: str) -> None:
        if self.other_dice.random() > 0.1:
            Scramble.event(self, kind, of)
            return
        before = facts(self.shaper, {})
        request = Request("p", 9_000, 100, (1, 2), tenant="new" if self.fair else "")
        self.shaper.preview(request, self.now)
        assert facts(self.shaper, {}) == before
        self.looks += 1
        super().event(kind, of)


@pytest.mark.parametrize("seed", range(8))
def test_a_preview_leaves_the_state_as_it_is(seed: int) -> None:
    looked = Looked(seed)
    looked.run(SECONDS)
    assert looked.looks > 0


class Compared(Scramble):
    """A preview of each request just before it comes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.arrived = 0
        self.other: list[tuple[object, ...]] = []

    def event(self, kind: str, of: str) -> None:
        if kind != "arrive":
            super().event(kind, of)
            return
        before = self.dice.getstate()
        number = self.number
        request = self.request()
        self.dice.setstate(before)
        self.number = number
        seen = _decision(self.shaper.preview(request, self.now))
        super().event(kind, of)
        self.arrived += 1
        receipt = self.shaper.recorder.receipts.find(request.id)
        assert receipt is not None
        if (real := _decision(receipt)) != seen:
            self.other.append((seen, real))


def _decision(receipt: Receipt) -> tuple[object, ...]:
    chosen = receipt.chosen
    price = (chosen.backend, chosen.wait_s, chosen.margin_s, chosen.prefill_s) if chosen else ()
    return receipt.bucket, receipt.rule, receipt.value, receipt.limit, receipt.queued, price


@pytest.mark.parametrize("seed", range(8))
def test_a_preview_says_what_is_decided_then(seed: int) -> None:
    compared = Compared(seed)
    compared.run(SECONDS)
    assert compared.arrived > 30
    assert len(compared.other) <= 0.05 * compared.arrived, compared.other[:3]


CHAT = Bucket("chat", 5_000, max_queue=2, max_wait_s=2.0)


def shaper(**options: object) -> Shaper:
    made = Shaper(
        [BackendSpec("gpu0", 1)], [CHAT], recorder=DecisionRecorder(10), **options  # type: ignore[arg-type]
    )  # fmt: skip
    made.backend_up("gpu0", 0.0)
    return made


def test_a_preview_tells_state_and_rule() -> None:
    made = shaper()
    sent = made.preview(Request("p", 100), 0.0)
    assert (sent.state, sent.backend, sent.rule) == ("prefilling", "gpu0", "starts")
    made.arrive(Request("a", 100), 0.0)
    waits = made.preview(Request("p", 100), 0.0)
    assert (waits.state, waits.waiting_for) == ("queued", "slots")
    long = made.preview(Request("p", 6_000), 0.0)
    assert (long.state, long.rule, long.limit) == ("refused", "prompt_too_long", 5_000.0)
    made.backend_down("gpu0", 0.0)
    assert made.preview(Request("p", 100), 0.0).rule == "no_backend"
    assert made.recorder.receipts.find("p") is None


def test_a_quota_is_not_used() -> None:
    made = shaper(tenants=(Tenant("t", 1.0, tokens_per_s=10.0, burst_tokens=100.0),))
    for _ in range(3):
        assert made.preview(Request("p", 100, tenant="t"), 0.0).rule == "starts"
    made.arrive(Request("a", 100, tenant="t"), 0.0)
    assert made.preview(Request("p", 100, tenant="t"), 0.0).rule == "tenant_quota"


def test_a_rule_that_fails_in_a_preview_leaves_the_state_as_it_is() -> None:
    def broken(*_: object) -> Option:
        raise ZeroDivisionError

    specs, tenants = [BackendSpec(name, 8) for name in "ab"], [Tenant("a"), Tenant("b")]
    shaper = all_up(Shaper(specs, [Bucket("all", 10_000)], route=broken, tenants=tenants))
    before = facts(shaper, {})
    with pytest.raises(ZeroDivisionError):
        shaper.preview(Request("p", 9_000, 100, (1, 2), tenant="a"), 1.0)
    assert facts(shaper, {}) == before
