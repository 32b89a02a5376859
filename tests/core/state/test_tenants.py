"""Tenants share prefill seconds, slots and KV cache, whatever their requests say of themselves."""

from collections.abc import Callable
from itertools import cycle
from math import inf
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stages.tenant_stage import Ask, Stage

from forebay.proxy.core.model import CLASSES, Tenant

SECONDS = 16.0
WARM_S = 5.0  # before that an engine may have met no streamed answer, which teaches most
PER_S = 20.0  # of each tenant: two engines complete so many of both together

SHAPES = st.fixed_dictionaries(
    {},
    optional={
        "service_class": st.sampled_from(CLASSES),
        "timeout_s": st.sampled_from([0.4, 1.0, 5.0]),
        "streams": st.booleans(),
        "most_tokens": st.sampled_from([1, 100, 4_000]),
        "sequences": st.sampled_from([1, 2, 8]),
        "says": st.sampled_from(["usage", "events", "nothing"]),
    },
)


def flood(tenant: str, shapes: list[dict[str, Any]], **more: Any) -> list[Ask]:
    """More requests of one tenant than its share, evenly spaced; the shapes take turns."""
    times = (number / PER_S for number in range(int(SECONDS * PER_S)))
    return [
        Ask(at, tenant, **{"prompt_tokens": 2_000, "answer_tokens": 20, **more, **shape})
        for at, shape in zip(times, cycle(shapes), strict=False)
    ]


def got(asks: list[Ask], tenant: str) -> int:
    """Prompt tokens of a tenant that were computed while both had more to ask."""
    computed = (a for a in asks if a.tenant == tenant and a.first_at is not None)
    return sum(a.prompt_tokens for a in computed if WARM_S < (a.first_at or 0.0) < SECONDS)


def served(
    shapes: list[dict[str, Any]], stage: Callable[[], Stage] = lambda: Stage(slots=256)
) -> tuple[int, int]:
    """What tenant `a`, whose requests have these shapes, and the plain tenant `b` get."""
    asks = stage().play(flood("a", shapes) + flood("b", [{}]))
    return got(asks, "a"), got(asks, "b")


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.lists(SHAPES, min_size=1, max_size=3))
def test_no_field_gives_a_tenant_more_than_its_weight(shapes: list[dict[str, Any]]) -> None:
    mine, theirs = served(shapes)
    assert mine == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("service_class", CLASSES)
def test_equal_tenants_get_equal_parts_whatever_class_one_names(service_class: str) -> None:
    mine, theirs = served([{"service_class": service_class}])
    assert mine == pytest.approx(theirs, rel=0.05)


def test_a_class_that_was_granted_counts_among_all_tenants() -> None:
    tenants = [Tenant("a", classes=("interactive",))]
    mine, theirs = served(
        [{"service_class": "interactive"}], lambda: Stage(slots=256, tenants=tenants)
    )
    assert mine > 10 * theirs
    mine, theirs = served([{"service_class": "batch"}], lambda: Stage(slots=256, tenants=tenants))
    assert mine == pytest.approx(theirs, rel=0.05)


def test_a_class_orders_the_requests_of_its_tenant() -> None:
    shapes: list[dict[str, Any]] = [{"service_class": name} for name in CLASSES]
    asks = Stage(slots=256).play(flood("a", shapes) + flood("b", [{}]))
    answered = {
        name: sum(a.done_at is not None for a in asks if a.service_class == name)
        for name in CLASSES
    }
    assert answered["interactive"] > 1.5 * answered["batch"]
    assert got(asks, "a") == pytest.approx(got(asks, "b"), rel=0.05)


@pytest.mark.parametrize("sequences", [16, 64, 200])
def test_slots_are_shared_by_sequences(sequences: int) -> None:
    """A tenant with many outputs for each prompt takes none of a plain tenant's prefill seconds."""
    plain = served([{}])[1]
    _, theirs = served([{"sequences": sequences, "most_tokens": 20}])
    assert theirs > 0.95 * plain


class Watched(Stage):
    """Notes which part of all KV cache the running requests of each tenant need.

    Attributes:
        mean, most: after `since`.
    """

    def __init__(self, since: float, **options: Any) -> None:
        super().__init__(**options)
        self.since = self._counted_at = since
        self.mean: dict[str, float] = {}
        self.most: dict[str, float] = {}

    def observe(self) -> None:
        if self.now < self.since:
            return
        kv_tokens = sum(engine.kv_tokens for engine in self.engines.values())
        held = {ask.tenant: 0.0 for ask in self.asked.values()}
        for engine in self.engines.values():
            for ask, began_at in engine.running:
                held[ask.tenant] += ask.sequence_kv_tokens(began_at, self.now) / kv_tokens
        for tenant, part in held.items():
            self.most[tenant] = max(part, self.most.get(tenant, 0.0))
            lasted = (self.now - self._counted_at) / (SECONDS - self.since)
            self.mean[tenant] = self.mean.get(tenant, 0.0) + part * lasted
        self._counted_at = self.now


SMALL: dict[str, Any] = {"prompt_tokens": 500, "answer_tokens": 200, "most_tokens": 200}


@pytest.mark.parametrize("shape", [{"sequences": 16}, {"answer_tokens": 600, "most_tokens": 600}])
def test_kv_cache_is_shared_by_weight(shape: dict[str, Any]) -> None:
    """Both tenants have more to ask than the KV cache holds; one of them in larger requests."""
    stage = Watched(SECONDS / 2, engines=1, slots=512, kv_tokens=30_000)
    stage.play(flood("a", [shape], **SMALL) + flood("b", [{}], **SMALL), SECONDS)
    assert stage.mean["b"] > 0.38
    assert 0.3 < stage.mean["a"] < 0.6


def test_nobody_holds_twice_its_share_of_kv_cache_for_longer_than_a_request() -> None:
    """One tenant has all of it when three others come; a request takes five seconds at most."""
    come_at, longest_s = 6.0, 5.0
    asks = flood("a", [{"sequences": 4}], **SMALL)
    for tenant in "bcd":
        asks += [ask for ask in flood(tenant, [{}], **SMALL) if ask.at > come_at]
    before = Watched(come_at, engines=1, slots=512, kv_tokens=30_000)
    before.play([ask for ask in asks if ask.tenant == "a"], come_at + 1.0)
    assert before.most["a"] > 0.8
    stage = Watched(come_at + longest_s, engines=1, slots=512, kv_tokens=30_000)
    for ask in asks:
        ask.sent_at = ask.first_at = ask.done_at = None
    stage.play(asks, SECONDS)
    assert max(stage.most.values()) < 2 * 0.25
    assert min(stage.mean.values()) > 0.1


def test_two_large_reservations_shut_nobody_out() -> None:
    """n: 128 and max_tokens: 8192 ask for more KV cache than there is, and use a part of it."""
    hog = {"sequences": 128, "most_tokens": 8_192, "answer_tokens": 1_500}
    for tenant in ("hog", ""):
        asks = [Ask(0.1 * number, tenant, **hog) for number in range(2)]  # type: ignore[arg-type]
        good = [Ask(1.0 + number / 4, tenant and "good", most_tokens=512) for number in range(24)]
        Stage(slots=256, kv_tokens=400_000).play(asks + good)
        assert not [ask.rejected for ask in good if ask.rejected]


def test_lengths_are_learned_from_events() -> None:
    """Agents allow themselves 48,000 tokens, use 200, and ask for no usage."""
    agent = {"prompt_tokens": 3_000, "most_tokens": 48_000, "answer_tokens": 200}
    rejected = {}
    for says in ("events", "nothing"):
        asks = [Ask(number / 8, "agents", says=says, **agent) for number in range(512)]  # type: ignore[arg-type]
        Stage(slots=256, kv_tokens=400_000).play(asks)
        rejected[says] = sum(bool(ask.rejected) for ask in asks)
    assert rejected["events"] < 16
    assert rejected["nothing"] > 128


def test_batches_leave_an_engine_to_others() -> None:
    """A batch of 4,900 prompts fills an engine until it ends; its tenant gets one engine of two."""
    batch = {"prompt_tokens": 49_000, "sequences": 4_900, "most_tokens": 16, "answer_tokens": 64}
    batches = [Ask(5.0 + number / 10, "a", **batch) for number in range(4)]  # type: ignore[arg-type]
    chats = [Ask(number / 3, "b", answer_tokens=60) for number in range(180)]
    Stage(slots=256, kv_tokens=400_000).play(batches + chats)
    assert all(chat.first_at is not None and chat.first_at - chat.at < 0.2 for chat in chats)
    assert any(one.done_at is not None for one in batches)


def test_batches_take_turns_with_chats_on_a_single_engine() -> None:
    """Each batch keeps out all others while it runs: it counts as many requests, not as one."""
    batch = {"prompt_tokens": 20, "sequences": 64, "most_tokens": 64, "answer_tokens": 64}
    batches = [Ask(2.0 + number / 2, "a", **batch) for number in range(40)]  # type: ignore[arg-type]
    chats = [Ask(number / 4, "b", 20, answer_tokens=4) for number in range(100)]
    Stage(engines=1, slots=64, kv_tokens=400_000).play(batches + chats)
    assert sum(chat.first_at is not None and chat.first_at - chat.at < 2.0 for chat in chats) > 90


def test_a_batch_beyond_all_slots_is_served() -> None:
    batch = Ask(5.0, prompt_tokens=10_000, tenant="", sequences=1_000, most_tokens=16)
    chats = [Ask(number / 3, "", answer_tokens=60, timeout_s=inf) for number in range(60)]
    stage = Stage(engines=1, slots=64, kv_tokens=400_000)
    stage.play([batch, *chats])
    assert batch.done_at is not None
    assert stage.shaper.backends["gpu0"].sequences == 0
