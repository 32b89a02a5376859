"""Engines with --scheduling-policy priority: the policy's order holds in the engine too."""

import random
from dataclasses import replace

import pytest

from forebay.proxy.core.model import (
    CLASSES,
    Action,
    BackendSpec,
    Bucket,
    Request,
    Send,
    ServiceClass,
    Tenant,
)
from forebay.proxy.core.shaper import Shaper

BUCKETS = [
    Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0),
    Bucket("document", 131_072, max_queue=64, max_wait_s=30.0, prefills_per_backend=1),
]
ENGINE = BackendSpec("a", 64, priority=True)


def a_shaper(spec: BackendSpec = ENGINE) -> Shaper:
    shaper = Shaper([spec], BUCKETS)
    shaper.backend_up("a", 0.0)
    return shaper


def chat(name: str, tenant: str = "", service_class: ServiceClass = "standard") -> Request:
    return Request(name, 2_000, 10, tenant=tenant, service_class=service_class)


def sent(actions: list[Action]) -> dict[str, int | None]:
    return {a.request.id: a.priority for a in actions if isinstance(a, Send)}


def flood(shaper: Shaper, count: int = 12, **more: str) -> dict[str, int | None]:
    """Chats of one tenant or class, more than are sent ahead."""
    found: dict[str, int | None] = {}
    for number in range(count):
        found |= sent(shaper.arrive(chat(f"f{number}", **more), 0.0))  # type: ignore[arg-type]
    assert 1 < len(found) < count
    return found


def test_an_engine_without_the_flag_is_told_nothing() -> None:
    shaper = a_shaper(BackendSpec("a", 64))
    assert set(flood(shaper, tenant="heavy").values()) == {None}
    assert sent(shaper.arrive(chat("light", "light"), 0.01)) == {}  # behind what was sent


def test_a_single_tenant_and_class_leave_the_engine_its_order() -> None:
    assert set(flood(a_shaper()).values()) == {0}


@pytest.mark.parametrize("chunk", [2_048.0, float("inf")])
def test_a_tenant_behind_its_share_is_sent_at_once_and_passes(chunk: float) -> None:
    shaper = a_shaper(replace(ENGINE, chunk_tokens=chunk))
    heavy = flood(shaper, tenant="heavy")
    light = sent(shaper.arrive(chat("light", "light"), 0.01))
    assert light["light"] is not None
    waiting = [priority for name, priority in heavy.items() if name != "f0"]
    assert all(priority is not None and light["light"] < priority for priority in waiting)
    assert not sent(shaper.arrive(chat("more", "heavy"), 0.01))


def test_an_urgent_class_passes_and_the_last_waits() -> None:
    shaper = a_shaper()
    flood(shaper)
    (urgent,) = sent(shaper.arrive(chat("u", service_class="interactive"), 0.01)).values()
    assert urgent is not None
    assert urgent < 0
    assert not sent(shaper.arrive(chat("b", service_class="batch"), 0.01))


def test_the_engine_begins_what_is_lowest_next() -> None:
    shaper = a_shaper()
    flood(shaper)
    shaper.arrive(chat("u", service_class="interactive"), 0.01)
    queue = shaper.backends["a"].prefill_queue
    assert queue.head is not None
    assert queue.head.request.id == "f0"  # it runs, and is not preempted
    shaper.first_token("f0", 0.1)
    assert queue.head.request.id == "u"


@pytest.mark.parametrize("seed", range(4))
def test_no_class_passes_a_more_urgent_one_but_for_its_share(seed: int) -> None:
    """Numbers of two classes never mix, however far tenants are apart."""
    rng = random.Random(seed)
    tenants = [Tenant(name, classes=CLASSES) for name in "ab"]
    shaper = Shaper([replace(ENGINE, max_concurrency=6)], BUCKETS, tenants=tenants)
    now = 0.0
    ranks: dict[tuple[int, bool], int] = {}
    running: list[str] = []
    actions = shaper.backend_up("a", 0.0)
    for number in range(3_000):
        now += rng.expovariate(8.0)
        for action in actions:
            if isinstance(action, Send):
                running.append(action.request.id)
                rank, priority = CLASSES.index(action.request.service_class), action.priority
                assert priority is not None
                owed = priority <= -1_000 < (rank - 1) * 1_000
                assert owed or (rank - 2) * 1_000 < priority <= (rank - 1) * 1_000
                ranks[rank, owed] = ranks.get((rank, owed), 0) + 1
        if running and rng.random() < 0.4:
            actions = shaper.finish(running.pop(0), now)
        else:
            request = chat(str(number), rng.choice("ab"), rng.choice(CLASSES))
            actions = shaper.arrive(request, now)
    assert {(0, False), (1, False), (2, False), (2, True)} <= set(ranks)
