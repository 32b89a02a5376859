"""Receipts explain decisions; hindsight judges rejections."""

import random
from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from core_requests import all_up
from fakes.api_servers import without_api_server
from stages.parity_scene import NAMES, a_shaper, a_trace

from forebay.proxy.api.rejections import rejection
from forebay.proxy.core.explain.receipt import ERROR_S, DecisionTally, Receipt, Receipts
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import (
    HISTORY,
    Action,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
    Tenant,
)
from forebay.proxy.core.policy.routing import Affinity, Option, warm_or_least_work
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.diagnose.receipt_text import HINDSIGHT, WAITS, receipt_fields, verdict
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet
from forebay.traces.ground.schema import TraceRequest

CHAT = Bucket("chat", 5_000, max_queue=2, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=2, max_wait_s=30.0, prefills_per_backend=1)
ROOMY = Bucket("chat", 5_000, max_queue=2, max_wait_s=60.0)
LONG = 120_000  # about ten seconds of prefill, by the cost model's first guess


def explained(
    backends: int = 1,
    *,
    slots: int = 64,
    kv_tokens: float = inf,
    buckets: tuple[Bucket, ...] = (CHAT, DOCUMENT),
    tenants: tuple[Tenant, ...] = (),
    keep: int = 100,
    up: bool = True,
    chunk_tokens: float = inf,
) -> Shaper:
    specs = [
        BackendSpec(f"gpu{i}", slots, kv_tokens, chunk_tokens=chunk_tokens) for i in range(backends)
    ]
    made = Shaper(specs, buckets, tenants=tenants, recorder=DecisionRecorder(keep))
    return all_up(made) if up else made


def receipt_of(made: Shaper, request_id: str) -> Receipt:
    receipt = made.recorder.receipts.find(request_id)
    assert receipt is not None
    return receipt


def arrive(made: Shaper, request: Request, now: float = 0.0) -> Receipt:
    made.arrive(request, now)
    return receipt_of(made, request.id)


def fill(made: Shaper, tokens: int, *names: str, now: float = 0.0) -> None:
    for name in names:
        made.arrive(Request(name, tokens), now)


def test_an_engine_that_is_tried_though_another_is_thought_faster() -> None:
    made = explained(2)
    for number, (tokens, took_s) in enumerate([(100, 0.05), (LONG, 1.0)]):
        arrive(made, Request(str(number), tokens), 20.0 * number)
        made.first_token(str(number), 20.0 * number + took_s)
        made.finish(str(number), 20.0 * number + took_s)
    receipt = arrive(made, Request("2", LONG), 40.0)
    assert "gpu0, where the time of prompts of this size is not known yet" in (
        verdict(receipt, 40.0)
    )


class TestRefusals:
    def test_the_wait_is_too_long(self) -> None:
        made = explained()
        fill(made, LONG, "d")
        receipt = arrive(made, Request("c", 1_000))
        assert receipt.rule == "max_wait"
        assert receipt.chosen is not None
        wait_s = receipt.chosen.wait_s + receipt.chosen.margin_s
        assert (receipt.value, receipt.limit) == (wait_s, 2.0)
        assert "the limit of bucket chat is 2.00 s" in verdict(receipt, 0.0)

    def test_the_client_does_not_wait_so_long(self) -> None:
        made = explained()
        fill(made, LONG, "d")
        receipt = arrive(made, Request("late", LONG, timeout_s=3.0))
        assert receipt.rule == "timeout"
        assert receipt.value > receipt.limit == 3.0
        assert "the client waits 3.00 s" in verdict(receipt, 0.0)

    def test_the_line_is_full(self) -> None:
        made = explained(slots=1, buckets=(ROOMY,))
        fill(made, 100, "a", "b", "c")
        receipt = arrive(made, Request("d", 100))
        assert (receipt.rule, receipt.value, receipt.limit) == ("line_full", 2.0, 2.0)
        assert "2 requests of bucket chat were waiting; the limit is 2" in verdict(receipt, 0.0)

    def test_the_tenant_has_its_share_of_the_line(self) -> None:
        made = explained(slots=1, buckets=(Bucket("chat", 5_000, 4, 60.0),))
        for name in ("a", "b", "c"):
            made.arrive(Request(name, 100, tenant="heavy"), 0.0)
        made.arrive(Request("l", 100, tenant="light"), 0.0)
        receipt = arrive(made, Request("d", 100, tenant="heavy"))
        assert receipt.rule == "tenant_share"
        reject = Reject(Request("d", 100), "queue_full", "chat", 0.0, 1.0)
        assert rejection(reject, receipt) == "Your own requests fill your share of the queue"
        assert not receipt.hindsight  # by policy, not by prediction

    def test_the_quota_is_used_up(self) -> None:
        made = explained(tenants=(Tenant("t", 1.0, tokens_per_s=10.0, burst_tokens=100.0),))
        made.arrive(Request("a", 100, tenant="t"), 0.0)
        receipt = arrive(made, Request("b", 100, tenant="t"))
        assert (receipt.rule, receipt.value) == ("tenant_quota", 10.0)
        assert "quota is used up for 10.0 s more" in verdict(receipt, 0.0)

    def test_the_prompt_is_too_long(self) -> None:
        receipt = arrive(explained(), Request("a", 200_000))
        assert (receipt.rule, receipt.limit, receipt.bucket) == ("prompt_too_long", 131_072, "")
        assert "200,000 tokens; the largest bucket allows 131,072" in verdict(receipt, 0.0)

    def test_nobody_is_up(self) -> None:
        receipt = arrive(explained(up=False), Request("a", 100))
        assert (receipt.rule, receipt.options) == ("no_backend", ())
        assert verdict(receipt, 0.0) == "Rejected at once: no backend that it may use was up."

    def test_the_deadline_passed_in_the_queue(self) -> None:
        made = explained(slots=1)
        fill(made, 100, "a", "b")
        made.wake(2.0)
        receipt = receipt_of(made, "b")
        assert receipt.rule == "deadline_passed"
        assert receipt.waits == {"slots": 2.0}
        assert made.recorder.receipts.tally("chat").admitted["refused"] == 1
        assert "after 2.00 s in the queue, its limit because all slots" in verdict(receipt, 9.0)

    def test_somebody_more_urgent_takes_its_place(self) -> None:
        made = explained(slots=1, buckets=(ROOMY,))
        fill(made, 100, "a", "b", "c")
        made.arrive(Request("urgent", 100, service_class="interactive"), 0.5)
        assert receipt_of(made, "c").rule == "gave_way"
        assert "a request that is more urgent" in verdict(receipt_of(made, "c"), 1.0)

    def test_its_backend_failed_and_there_is_no_other(self) -> None:
        made = explained()
        fill(made, 100, "a")
        made.retry("a", 0.5)
        receipt = receipt_of(made, "a")
        assert receipt.rule == "no_backend"
        assert verdict(receipt, 1.0).startswith("Its backend failed, and no other")
        assert [step.kind for step in receipt.steps] == ["sent", "failed", "refused"]

    def test_its_backend_failed_and_there_is_no_time(self) -> None:
        made = explained(2)
        made.arrive(Request("a", 100, timeout_s=1.0), 0.0)
        made.retry("a", 0.999)
        assert receipt_of(made, "a").rule == "no_time"

    def test_its_backend_failed_and_the_line_is_full(self) -> None:
        made = explained(2, slots=2, buckets=(Bucket("chat", 5_000, 1, 2.0),))
        fill(made, 100, *"abcde")
        made.retry("a", 0.1)
        assert receipt_of(made, "a").rule == "line_full"
        assert "Its backend failed" in verdict(receipt_of(made, "a"), 1.0)

    def test_no_bucket_holds_it_any_longer(self) -> None:
        made = explained(slots=1)
        fill(made, LONG, "a", "b")
        made.changes.reconfigure([CHAT], 1.0)
        receipt = receipt_of(made, "b")
        assert (receipt.rule, receipt.limit) == ("prompt_too_long", 5_000)
        assert not made._state.queues.waiting
        assert set(made.recorder.receipts.under_way) == {"a"}

    def test_its_bucket_is_gone_while_a_refusal_is_followed(self) -> None:
        made = explained()
        fill(made, LONG, *"abcdef")
        assert made.recorder.hindsight.watches
        renamed = (CHAT, Bucket("papers", 131_072, 2, 30.0, 1))
        made.changes.reconfigure(renamed, 1.0)
        made.settle(1.1)
        made.finish("a", 1.2)
        made.wake(1.3)
        assert made.recorder.receipts.tally("document").refusals["unjudged"] > 0

    def test_a_request_behind_its_own_tenant_in_a_full_line(self) -> None:
        one = (Bucket("all", 131_072, 1, 30.0),)
        made = explained(kv_tokens=10_000, buckets=one, tenants=(Tenant("t"),))
        made.arrive(Request("r", 4_000, 3_000), 0.0)
        made.first_token("r", 0.2)
        made.arrive(Request("h", 3_000, 1_000, tenant="t"), 1.0)
        assert arrive(made, Request("w", 100, 50, tenant="t"), 3.0).rule == "line_full"


class TestWaits:
    """The reasons why a request waits, each with its time."""

    def test_slots_then_nothing(self) -> None:
        made = explained(slots=1)
        fill(made, 100, "a", "b")
        made.finish("a", 0.75)
        receipt = receipt_of(made, "b")
        assert receipt.waits == {"slots": 0.75}
        assert verdict(receipt, 1.0) == (
            "Waited 0.75 s because all slots of its backend were in use; then sent to gpu0."
        )

    def test_others_in_front_then_slots(self) -> None:
        made = explained(slots=1, buckets=(ROOMY,))
        fill(made, 100, "a", "b", "c")
        made.finish("a", 0.5)
        made.finish("b", 0.75)
        assert receipt_of(made, "c").waits == {"turn": 0.5, "slots": 0.25}

    def test_a_busy_line(self) -> None:
        made = explained()
        fill(made, 20_000, "a", "b")
        assert receipt_of(made, "b").waiting_for == "line"

    def test_behind_a_prefill_that_it_does_not_pass(self) -> None:
        made = explained(chunk_tokens=2_048)
        without_api_server(made)
        fill(made, 20_000, "long")
        fill(made, 1_000, "a")  # passes it
        fill(made, 20_000, "b")
        assert receipt_of(made, "a").waiting_for == ""
        assert receipt_of(made, "b").waiting_for == "line"

    def test_the_limit_of_prefills(self) -> None:
        bucket = Bucket("document", 131_072, 9, 30.0, prefills_per_backend=1)
        made = explained(buckets=(bucket,))
        fill(made, 100, "a", "b")  # short: there is room in the line
        assert receipt_of(made, "b").waiting_for == "prefill_limit"

    def test_the_kv_cache(self) -> None:
        made = explained(kv_tokens=10_000.0)
        made.arrive(Request("a", 4_000, 4_000), 0.0)
        made.first_token("a", 0.5)
        receipt = arrive(made, Request("b", 4_000, 4_000), 0.5)
        assert receipt.waiting_for == "kv"

    def test_the_last_engine_clear_of_long_prefills(self) -> None:
        made = explained(2)
        fill(made, 100, "chat", "another")
        made.first_token("chat", 0.01)
        made.first_token("another", 0.01)
        fill(made, LONG, "a", "b", now=0.02)
        receipt = receipt_of(made, "b")
        assert receipt.waiting_for in ("partition", "line")
        made.wake(0.1)
        waiting = made._state.queues.waiting["b"]
        clear = next(b for b in made.backends.values() if not b.prefills)
        assert made._state.forecast.gate.why_not(clear, waiting, 0.1) == "partition"

    def test_a_backend_on_trial(self) -> None:
        made = explained(up=False)
        made.backend_up("gpu0", 0.0, None, 1)
        fill(made, 100, "a", "b")
        assert receipt_of(made, "b").waiting_for == "trial"

    def test_a_backend_that_is_down_is_not_waited_for(self) -> None:
        made = explained(slots=1)
        fill(made, 100, "a", "b")
        blocked = made._state.queues.waiting["b"]
        made.backends["gpu0"].up = False
        assert made._state.forecast.gate.why_not(made.backends["gpu0"], blocked, 0.0) == "down"
        made.backend_down("gpu0", 0.5)
        assert receipt_of(made, "b").rule == "no_backend"

    def test_all_of_them_have_words(self) -> None:
        from typing import get_args

        from forebay.proxy.core.policy.start import Block

        assert {*get_args(Block), "turn"} == {*WAITS, ""}


class TestWays:
    def test_sent_at_once_first_token_and_usage(self) -> None:
        made = explained(2)
        blocks = tuple(range(2))
        made.arrive(Request("before", 1_100, blocks=blocks), 0.0)
        made.first_token("before", 0.05)
        made.finish("before", 0.1)
        made.arrive(Request("a", 1_100, 50, blocks), 1.0)
        made.first_token("a", 1.25)
        made.used("a", 40, 2.0, 1_024, 1_100)
        made.finish("a", 2.0)
        made.recorder.receipts.answered("a", 200, "", "m")
        said = receipt_fields(receipt_of(made, "a"), 9.0, 100)
        assert said["state"] == "ended"
        assert said["age_s"] == 8.0
        assert [c["chosen"] for c in said["candidates"]] == [True, False]
        assert said["actual"] == {
            "backend": "gpu0", "tries": 1, "queue_s": 0.0, "ttft_s": 0.25,
            "ttft_after_dispatch_s": 0.25, "cached_tokens": 1_024, "prompt_tokens": 1_100,
            "output_tokens": 40, "total_s": 1.0, "status": 200, "error": None,
        }  # fmt: skip
        assert said["predicted"]["cached_tokens"] == 1_024
        assert "gpu0, which had 1,024 of its 1,100 tokens cached" in said["verdict"]
        assert "First token after 0.25 s; predicted on arrival: " in said["verdict"]
        kinds = [step["event"] for step in said["timeline"]]
        assert kinds == ["sent", "first_token", "ended"]

    def test_taken_by_another_backend_than_it_was_meant_for(self) -> None:
        made = explained(2, slots=1)
        fill(made, 100, "a", "b", "c")
        meant = receipt_of(made, "c").steps[0].backend
        other = {"gpu0": "b", "gpu1": "a"}[meant]  # who runs on the other
        made.finish(other, 0.25)
        receipt = receipt_of(made, "c")
        assert receipt.backend != meant
        assert f"which had room before {meant}, its first choice" in verdict(receipt, 1.0)

    def test_a_second_try(self) -> None:
        made = explained(2)
        fill(made, 100, "a")
        made.retry("a", 0.5)
        made.first_token("a", 0.75)
        receipt = receipt_of(made, "a")
        assert [(s.kind, s.backend) for s in receipt.steps if s.kind != "queued"] == [
            ("sent", "gpu0"), ("failed", "gpu0"), ("sent", "gpu1"), ("first_token", "gpu1"),
        ]  # fmt: skip
        assert "gpu0 had failed" in verdict(receipt, 1.0)
        assert sum(made.recorder.receipts.tally("chat").late) == 0  # no error of a prediction

    def test_its_client_leaves_the_queue(self) -> None:
        made = explained(slots=1)
        fill(made, 100, "a", "b")
        made.cancel("b", 0.5)
        assert "left after 0.50 s in the queue because all slots" in verdict(
            receipt_of(made, "b"), 1.0
        )

    def test_an_idle_backend_takes_even_the_hopeless(self) -> None:
        receipt = arrive(explained(), Request("a", LONG, timeout_s=1.0))
        assert receipt.rule == "idle"

    def test_while_it_waits_and_while_it_streams(self) -> None:
        made = explained(slots=1)
        fill(made, 100, "a", "b")
        assert verdict(receipt_of(made, "b"), 1.5).startswith("Waiting for 1.50 s because all")
        assert receipt_fields(receipt_of(made, "b"), 1.5, 1)["waited"] == {"slots": 1.5}
        assert receipt_fields(receipt_of(made, "a"), 1.5, 1)["state"] == "prefilling"


class TestTargets:
    @pytest.mark.parametrize(
        ("timeout_s", "first_token_s", "outcome"),
        [(inf, 1.9, "met"), (inf, 2.9, "missed"), (1.0, 0.9, "met"), (1.0, 1.1, "missed")],
    )
    def test_met_and_missed(self, timeout_s: float, first_token_s: float, outcome: str) -> None:
        made = explained()
        made.arrive(Request("a", 1_000, timeout_s=timeout_s), 5.0)
        made.first_token("a", 5.0 + first_token_s)
        assert made.recorder.receipts.tally("chat").admitted[outcome] == 1

    def test_without_a_first_token(self) -> None:
        made = explained()
        made.arrive(Request("gone", 100), 0.0)
        made.finish("gone", 0.1)
        made.arrive(Request("whole", 100, streams=False), 0.1)
        made.finish("whole", 0.2)
        counts = made.recorder.receipts.tally("chat").admitted
        assert (counts["unanswered"], counts["not_streamed"]) == (1, 1)

    def test_the_error_of_a_prediction(self) -> None:
        tally = DecisionTally()
        tally.first_token(1.0, 0.96)
        tally.first_token(1.0, 1.3)
        tally.first_token(100.0, 1.0)
        assert tally.late == [1, *[0] * (len(ERROR_S) - 1), 1]
        assert tally.early == [0, 0, 1, *[0] * (len(ERROR_S) - 2)]
        assert [tally.late_s, tally.early_s] == pytest.approx([99.04, 0.3])


class TestMemory:
    def test_only_the_last_are_kept_and_those_under_way(self) -> None:
        made = explained(keep=3)
        for number in range(10):
            made.arrive(Request(str(number), 10), number)
            if number != 4:
                made.finish(str(number), number + 0.5)
        assert set(made.recorder.receipts.ended) == {"7", "8", "9"}
        assert set(made.recorder.receipts.under_way) == {"4"}
        assert made.recorder.receipts.find("0") is None

    def test_nothing_is_kept_with_0_and_all_is_counted(self) -> None:
        made = explained(keep=0)
        made.arrive(Request("a", 200_000), 0.0)
        made.arrive(Request("b", 100), 0.0)
        made.first_token("b", 0.1)
        made.finish("b", 0.2)
        assert not made.recorder.receipts.ended
        assert not made.recorder.receipts.under_way
        assert made.recorder.receipts.tally("chat").admitted["met"] == 1

    def test_a_request_that_goes_round_in_circles_has_no_endless_way(self) -> None:
        receipt = Receipt(Request("a", 1), "chat", 0.0)
        for number in range(1_000):
            receipt.step(number, "queued", "gpu0", "turn")
        assert len(receipt.steps) == HISTORY

    def test_no_prompt_is_kept(self) -> None:
        """A request holds the hashes of its prompt: kilobytes of a long one."""
        made = explained(slots=1)
        fill(made, 100, "a", "b", "c", "d")
        for receipt in made.recorder.receipts.ended.values():
            for name in dir(receipt):
                assert not isinstance(getattr(receipt, name), Request)
        assert made.recorder.receipts.ended

    def test_by_the_id_that_its_client_gave(self) -> None:
        receipts = Receipts(10)
        for number, name in enumerate(("x/1", "y/2", "x/3", "x/y/4")):
            receipts.open(Request(name, 1), "chat", number)
        assert [r.id for r in receipts.named("x")] == ["x/3", "x/1"]
        assert [r.id for r in receipts.named("x/1")] == ["x/1"]
        assert [r.id for r in receipts.named("x/y")] == ["x/y/4"]
        assert receipts.named("z") == []


@pytest.mark.parametrize("seed", range(3))
def test_receipts_tell_what_was_decided(seed: int) -> None:
    plain, last = a_shaper(), dict[str, Action]()
    specs = [backend.spec for backend in plain.backends.values()]
    kept = Shaper(specs, list(plain.buckets.values()), recorder=DecisionRecorder(100_000))

    def note(_: float, action: Action) -> None:
        last[action.request.id] = action

    Fleet(kept, {name: served_engine(EngineConfig()) for name in NAMES}, note).run(a_trace(seed))
    assert not kept.recorder.receipts.under_way
    for request_id, action in last.items():
        receipt = receipt_of(kept, request_id)
        if isinstance(action, Send):
            assert (receipt.backend, receipt.tries) == (action.backend, 1)
            assert sum(receipt.waits.values()) == pytest.approx(action.queued_s, abs=1e-9)
        else:
            assert receipt.state == "refused"
        assert verdict(receipt, 1e6)


# Hindsight.

HASTY = [Bucket("chat", 5_000, max_queue=256, max_wait_s=2.0)]


def bursts(seed: int, count: int, burst: float) -> list[TraceRequest]:
    """Chats, for five seconds more and for five less than two engines can serve."""
    rng, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(36.0 * burst if int(at / 5) % 2 == 0 else 36.0 / burst)
        tokens, first = int(rng.uniform(1_000, 4_500)), 1_000 * number
        blocks = tuple(range(first, first + tokens // 512 + 1))
        rows.append(TraceRequest(str(number), at, tokens, rng.randint(5, 60), blocks))
    return rows


def play(rows: list[TraceRequest], taken: str = "") -> Shaper:
    """The request `taken` is taken whatever was predicted."""

    def route(
        request: Request, options: Sequence[Option], affinity: Affinity, now: float
    ) -> Option:
        best = warm_or_least_work(request, options, affinity, now)
        if request.id != taken:
            return best
        costs = best.prefill_s, best.cold_prefill_s, best.matched_tokens, best.load
        return Option(best.backend, 0.0, 0.0, *costs)

    made = Shaper(
        [BackendSpec(n, 64) for n in NAMES], HASTY, route=route, recorder=DecisionRecorder(10_000)
    )
    Fleet(made, {name: served_engine(EngineConfig()) for name in NAMES}).run(rows)
    made.settle(inf)
    return made


def in_time(made: Shaper) -> set[str]:
    receipts = made.recorder.receipts.ended.values()
    return {r.id for r in receipts if 0 <= r.first_token_at <= r.arrived_at + r.target_s}


@pytest.mark.parametrize("burst", [1.2, 1.5])
def test_verdicts_are_those_of_a_world_in_which_it_was_taken(burst: float) -> None:
    """The truth: the same trace once more, with one rejected request admitted.

    It is right when that one is late, costs_another when anybody who was in time no longer is.
    """
    rows = bursts(3, 600, burst)
    made = play(rows)
    before, ended = in_time(made), made.recorder.receipts.ended.values()
    judged = [receipt for receipt in ended if receipt.hindsight not in ("", "unjudged")]
    assert len(judged) > 12
    agreed: Counter[bool] = Counter()
    in_time_agreed = 0
    for receipt in random.Random(1).sample(judged, 12):
        after = in_time(play(rows, receipt.id))
        truth = "right" if receipt.id not in after else "costs_another"
        if receipt.id in after and before <= after:
            truth = "false"
        agreed[receipt.hindsight == truth] += 1
        in_time_agreed += (receipt.hindsight == "right") == (truth == "right")
    assert in_time_agreed >= 11
    assert agreed[True] >= 8, agreed


def test_a_refusal_that_a_fast_engine_proves_wrong() -> None:
    """The predicted wait was 10 s, for a prefill that then took one second."""
    made = explained()
    fill(made, LONG, "d")
    receipt = arrive(made, Request("c", 1_000), 0.5)
    assert (receipt.rule, receipt.hindsight) == ("max_wait", "pending")
    made.first_token("d", 1.0)
    made.settle(60.0)
    assert receipt.hindsight == "false"
    assert made.recorder.receipts.tally("chat").refusals["false"] == 1
    assert HINDSIGHT["false"] in verdict(receipt, 60.0)


def test_a_refusal_that_the_engine_proves_right() -> None:
    made = explained()
    fill(made, LONG, "d")
    receipt = arrive(made, Request("c", 1_000), 0.5)
    made.settle(2.4)
    assert receipt.hindsight == "pending"
    made.first_token("d", 9.0)
    assert receipt.hindsight == "right"


def test_a_refusal_whose_place_another_took() -> None:
    """One waits, and two may: who came third would have been in time, and the fourth was not."""
    made = explained(slots=1, buckets=(Bucket("chat", 5_000, max_queue=1, max_wait_s=2.0),))
    fill(made, 100, "a", "b")
    receipt = arrive(made, Request("c", 100))
    assert receipt.rule == "line_full"
    made.finish("a", 0.1)  # b runs, and the line is free
    fill(made, 100, "d", now=0.2)  # takes the place that c would have
    made.finish("b", 0.3)
    made.finish("d", 0.4)
    made.settle(60.0)
    assert receipt.hindsight == "costs_another"


def test_rejections_that_are_not_followed_are_counted() -> None:
    made = explained()
    fill(made, LONG, "d")
    for number in range(20):
        made.arrive(Request(str(number), 100), 0.1)
    made.backend_down("gpu0", 0.2)
    made.settle(0.3)
    assert made.recorder.receipts.tally("chat").refusals["unjudged"] == 20
    assert not made.recorder.hindsight.watches
