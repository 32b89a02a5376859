"""Margins grow while too many of those who were taken are late, and shrink again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.punctuality import LATE, MOST, Punctuality
from forebay.proxy.core.shaper import Shaper

CHAT = Bucket("chat", 4_096, max_queue=100, max_wait_s=2.0)
DOCUMENT = Bucket("document", 200_000, max_queue=100, max_wait_s=30.0)


@given(st.lists(st.booleans(), max_size=500))
def test_the_factor_stays_between_one_and_its_most(late: list[bool]) -> None:
    punctuality = Punctuality()
    for one in late:
        (punctuality.late if one else punctuality.in_time)("document")
        assert 1.0 <= punctuality.factor("document") <= MOST
        assert punctuality.factor("chat") == 1.0


@pytest.mark.parametrize("late_at_one", [0.03, 0.08, 0.2])
def test_in_the_long_run_so_many_are_late_as_are_wanted(late_at_one: float) -> None:
    """Where larger margins help: each halving of the rest takes 0.3 of the factor."""
    rng, punctuality, late = random.Random(1), Punctuality(), 0
    requests = 20_000
    for _ in range(requests):
        share = late_at_one * 0.5 ** ((punctuality.factor("document") - 1.0) / 0.3)
        if rng.random() < share:
            late += 1
            punctuality.late("document")
        else:
            punctuality.in_time("document")
    assert late / requests == pytest.approx(LATE, rel=0.2)


class TestShaper:
    def shaper(self) -> Shaper:
        shaper = Shaper([BackendSpec("a", 8)], [CHAT, DOCUMENT])
        shaper.backend_up("a", 0.0)
        return shaper

    def factor(self, shaper: Shaper) -> float:
        return shaper._outlook.punctuality.factor("document")

    def wait_in_vain(self, shaper: Shaper, tenant: str = "") -> None:
        """One document that the engine never answers, and one that waits for it."""
        first, second = (Request(name, 100_000, 10, tenant=tenant) for name in "12")
        assert isinstance(shaper.arrive(first, 0.0)[0], Send)
        assert shaper.arrive(second, 0.0) == []
        (refused,) = shaper.wake(31.0)
        assert isinstance(refused, Reject)
        assert refused.reason == "deadline_unattainable"
        shaper.finish("1", 31.0)

    def margin_s(self, shaper: Shaper, tenant: str = "") -> float:
        """Of a document that comes as another begins."""
        shaper.arrive(Request("3", 100_000, 10, tenant=tenant), 40.0)
        waiting = Request("4", 100_000, 10, tenant=tenant)
        assert shaper.arrive(waiting, 40.0) == []
        (option,) = shaper._outlook.options(shaper._queues.waiting["4"], 40.0)
        return option.margin_s

    def test_one_that_was_late_makes_margins_larger(self) -> None:
        shaper, other = self.shaper(), self.shaper()
        self.wait_in_vain(shaper)
        assert self.factor(shaper) > 1.2
        assert self.margin_s(shaper) == pytest.approx(self.factor(shaper) * self.margin_s(other))

    def test_those_that_are_sent_make_them_smaller(self) -> None:
        shaper = self.shaper()
        self.wait_in_vain(shaper)
        before = self.factor(shaper)
        self.margin_s(shaper)  # one begins, one waits
        assert isinstance(shaper.first_token("3", 47.0)[0], Send)
        assert self.factor(shaper) < before

    def test_tenants_do_not_pay_for_each_other(self) -> None:
        shaper, other = self.shaper(), self.shaper()
        self.wait_in_vain(shaper, "a")
        assert self.margin_s(shaper, "b") == self.margin_s(other, "b")

    def test_what_was_seen_outlives_a_change_of_the_fleet(self) -> None:
        shaper = self.shaper()
        self.wait_in_vain(shaper)
        before = self.factor(shaper)
        shaper.add_backend(BackendSpec("b", 8), 32.0)
        assert self.factor(shaper) == before
