"""The speed of an engine is learned from prefills, whatever else its first tokens wait for."""

import pytest
from core_requests import all_up, sent_ids
from fakes.api_servers import without_api_server

from forebay.proxy.core.model import ENOUGH, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper

TOKENS = 4_000


def one_backend() -> Shaper:
    shaper = all_up(Shaper([BackendSpec("a", 64)], [Bucket("all", 100_000)]))
    without_api_server(shaper)
    return shaper


class Engine:
    """Answers one request after another, `slowness` times as late as the prior predicts."""

    def __init__(self) -> None:
        self.shaper = one_backend()
        self.cost = self.shaper.backends["a"].cost
        self.prior_s = self.cost.predict_s(TOKENS, TOKENS)
        self.now = 0.0
        self.count = 0

    def answer(self, slowness: float, *, pure: bool = True, times: int = 1) -> None:
        for _ in range(times):
            self.count += 1
            asked = Request(f"r{self.count}", TOKENS, pure=pure, streams=pure)
            (sent,) = self.shaper.arrive(asked, self.now)
            assert isinstance(sent, Send)
            self.now += slowness * self.prior_s
            self.shaper.first_token(asked.id, self.now)
            self.shaper.finish(asked.id, self.now)
            self.now += 1.0

    def slowness(self) -> float:
        return self.cost.predict_s(TOKENS, TOKENS) / self.prior_s


@pytest.mark.parametrize("slowness", [0.01, 100.0])
def test_an_outlier_moves_a_known_speed_little_and_three_answers_mend_it(slowness: float) -> None:
    engine = Engine()
    engine.answer(1.0, times=20)
    engine.answer(slowness)
    assert engine.slowness() == pytest.approx(1.0, rel=0.3)
    engine.answer(1.0, times=3)
    assert engine.slowness() == pytest.approx(1.0, rel=0.2)


def test_a_slow_engine_is_known_after_its_first_answer() -> None:
    engine = Engine()
    engine.answer(4.0)
    assert engine.slowness() > 3.0


def test_impure_first_tokens_teach_nothing_beside_pure_ones() -> None:
    engine = Engine()
    for _ in range(50):
        engine.answer(1.0)
        engine.answer(30.0, pure=False, times=ENOUGH - 1)
    assert engine.slowness() == pytest.approx(1.0, rel=0.01)


def test_without_pure_ones_the_median_of_impure_ones_teaches() -> None:
    """A fleet that gets nothing but images has to learn its speed too."""
    engine = Engine()
    for _ in range(10):
        engine.answer(4.0, pure=False, times=ENOUGH * 3 // 4)
        engine.answer(500.0, pure=False, times=ENOUGH // 4)  # their images took long to fetch
    assert engine.slowness() == pytest.approx(4.0, rel=0.05)


def test_a_late_image_holds_no_place_in_the_prefill_queue() -> None:
    """A document with an image that is fetched for minutes kept other documents waiting."""
    bucket = Bucket("all", 100_000, prefills_per_backend=1)
    shaper = all_up(Shaper([BackendSpec("a", 64)], [bucket]))
    image = Request("image", 20_000, pure=False, streams=False)
    assert len(shaper.arrive(image, 0.0)) == 1
    assert shaper.arrive(Request("document", 20_000), 0.1) == []
    while not (actions := shaper.wake(shaper.wake_at())):
        pass
    assert sent_ids(actions) == ["document"]
    # The image comes at last: what was measured meanwhile means nothing.
    shaper.first_token("image", 100.0)
    shaper.first_token("document", 100.1)
    assert shaper.backends["a"].cost.observations == 0
