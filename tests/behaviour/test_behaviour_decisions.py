"""Wrong rejections, and admitted requests that were late: judged in hindsight."""

import pytest
from admission_hindsight import RejectionHindsight, TtftTargets, judge
from behaviour_decisions import FILES, MADE, judged, rows
from paths import SHARED
from stages.behaviour_scenes import about

from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.replay.sim.scenario import Scenario

TRACES = SHARED / "data" / "traces"
needs_shared = pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/data/traces")
CHAT = Bucket("chat", 5_000, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_wait_s=30.0, prefills_per_backend=1)


class TestTheJudge:
    """Two documents at once on one engine, 0.6 s of prefill each; no place to wait."""

    @staticmethod
    def two(target_s: float) -> RejectionHindsight:
        proxy = Config.model_validate(
            {"buckets": [{"name": "document", "up_to": 131_072, "max_queue": 0,
                          "prefills_per_backend": 1}]}
        )  # fmt: skip
        scenario = Scenario(gpus=1, proxy=proxy)
        trace = [about(i, 0.0, f"d{i}", 20_000) for i in range(2)]
        return judge(trace, TtftTargets(scenario, {"document": target_s}))

    def test_requests_that_would_have_been_in_time_were_rejected_falsely(self) -> None:
        found = self.two(target_s=5.0)
        assert (found.met, len(found.rejected), found.missed) == (1, 1, [])
        assert found.otherwise == {"never": 2, "without margin": 1}
        assert found.false_together == 0.5

    def test_requests_that_would_have_been_late_were_rejected_rightly(self) -> None:
        found = self.two(target_s=0.9)
        assert found.false_together == 0.0

    def test_an_admitted_request_that_is_late_counts_as_missed(self) -> None:
        found = self.two(target_s=0.1)  # an idle engine refuses nobody
        assert len(found.missed) == 1
        assert found.missed_share == 1.0


def hold(found: RejectionHindsight) -> None:
    assert found.missed_share < 0.05
    assert found.false_together < 0.025  # one seed: 0.002 to 0.021
    assert found.met > 0.9 * found.requests


@pytest.mark.parametrize("load", [0.8, 1.5])
def test_chat_beside_documents(load: float) -> None:
    hold(judged(rows(MADE, None), load))


@needs_shared
@pytest.mark.parametrize("name", ["Mooncake conversation", "Mooncake synthetic"])
@pytest.mark.parametrize("load", [0.8, 1.0])
def test_replayed_traces(name: str, load: float) -> None:
    hold(judged(rows(name, TRACES), load))


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_few_are_taken_in_and_late_at_half_as_much_again(name: str) -> None:
    assert judged(rows(name, TRACES), 1.5).missed_share < 0.05


class TestWhatMadeThemFalse:
    @staticmethod
    def shaper(slots: int) -> Shaper:
        shaper = Shaper([BackendSpec("a", slots)], [CHAT, DOCUMENT])
        shaper.backend_up("a", 0.0)
        return shaper

    def test_a_chat_waits_for_no_slot_behind_documents_that_go_after_it(self) -> None:
        shaper = self.shaper(slots=4)
        shaper.backends["a"].decode_s["chat"].value = 4.0
        for i in range(9):  # one prefill at a time: eight wait
            assert not any(
                isinstance(a, Reject) for a in shaper.arrive(Request(f"d{i}", 20_000), 0.0)
            )
        assert shaper.queued("document") == 8
        assert shaper.arrive(Request("c", 1_000), 0.1) == []  # queued, not refused

    def test_a_request_that_is_sent_at_once_is_not_rejected_for_a_wait(self) -> None:
        shaper = self.shaper(slots=64)
        for i in range(3):  # those that wait have an earlier deadline than the chat will have
            patience_s = 100.0 if i == 0 else 3.3
            shaper.arrive(Request(f"d{i}", 20_000, timeout_s=patience_s), 0.0)
        assert shaper.queued("document") == 2
        (action,) = shaper.arrive(Request("c", 1_000), 0.6)
        assert isinstance(action, Send)

    def test_a_chat_reckons_with_the_part_that_waiting_documents_have(self) -> None:
        """Each of two has 30 % once it has waited long: then 1.6 s of chats take 2.3."""

        def taken(documents: int, now: float) -> int:
            shaper, count = self.shaper(slots=64), 0
            for i in range(documents):
                shaper.arrive(Request(f"d{i}", 20_000), 0.0)
            while not any(
                isinstance(a, Reject) for a in shaper.arrive(Request(f"c{count}", 4_000), now)
            ):
                count += 1
            return count

        assert taken(3, 0.0) == taken(1, 0.0)
        assert taken(3, 23.0) < taken(1, 23.0)
