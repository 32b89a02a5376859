"""The parts of the core, each by literal values: cost, prefixes, queue, routes, admission."""

import random
from math import inf, sqrt

import pytest
from core_requests import all_up, sends, sent_to
from fakes.api_servers import without_api_server
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.learn.cost import CostModel, features
from forebay.proxy.core.learn.prefix_index import PrefixIndex
from forebay.proxy.core.model import SLACK, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.policy.admission import refuse, whole_s
from forebay.proxy.core.policy.order import due_at
from forebay.proxy.core.policy.routing import Affinity, Option, warm_or_least_work
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.kv_budget import KvBudget
from forebay.proxy.core.state.queue import DueQueue, QueuedRequest

CHAT = Bucket("chat", 5_000, max_queue=2, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=2, max_wait_s=30.0, prefills_per_backend=1)


class TestCost:
    @pytest.mark.parametrize("factor", [0.1, 0.5, 3.0, 20.0])
    def test_learns_a_machine_of_another_speed(self, factor: float) -> None:
        rng, model = random.Random(1), CostModel()

        def truth(u: float, n: float) -> float:
            return factor * (0.01 + 2e-5 * u + 8e-10 * u * (n - u / 2))

        for _ in range(300):
            n = rng.choice([500, 2_000, 12_000, 60_000, 120_000])
            u = n * rng.choice([1.0, 0.2])
            model.observe(features(u, n), truth(u, n) * rng.uniform(0.9, 1.1))
        for n in (1_000, 30_000, 100_000):
            assert model.predict_s(n, n) == pytest.approx(truth(n, n), rel=0.15)

    def test_ten_answers_are_enough_for_a_rough_idea(self) -> None:
        model = CostModel()
        for _ in range(10):
            model.observe(features(10_000, 10_000), 1.5)
        assert model.predict_s(10_000, 10_000) == pytest.approx(1.5, rel=0.1)

    @pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
    @pytest.mark.parametrize("seed", range(5))
    def test_noisy_chats_say_how_fast_documents_are(self, factor: float, seed: int) -> None:
        """A document whose prefill looked short would take the engine that chats need."""
        rng, model = random.Random(seed), CostModel()
        for _ in range(400):
            n = rng.randint(50, 4_000)
            truth = factor * (0.015 + 2.2e-5 * n + 0.9e-9 * n * n / 2)
            model.observe(features(n, n), truth * rng.lognormvariate(0.0, 0.4))
        document = factor * (0.015 + 2.2e-5 * 120_000 + 0.9e-9 * 120_000**2 / 2)
        assert 0.5 * document < model.predict_s(120_000, 120_000) < 2.0 * document

    @given(
        st.lists(
            st.tuples(st.floats(1, 131_072), st.floats(0.01, 1), st.floats(0, 1e4)), max_size=60
        )
    )
    def test_never_predicts_nothing_or_less(self, seen: list[tuple[float, float, float]]) -> None:
        model = CostModel()
        for n, share, seconds in seen:
            model.observe(features(n * share, n), seconds)
            assert 0 < model.predict_s(1, 1) < inf
            assert 0 < model.predict_s(131_072, 131_072) < inf


class TestPrefixIndex:
    @given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=30))
    def test_bounded_even_where_hashes_are_not_chained(self, prompts: list[list[int]]) -> None:
        index = PrefixIndex(5)
        for prompt in prompts:
            index.touch(prompt, 0.7)
            assert len(index) <= 5

    def test_a_prompt_asked_for_ever_leaves_nothing_behind(self) -> None:
        index = PrefixIndex(100)
        for number in range(10_000):
            index.touch((1, 2, 3) if number % 3 else (1, 2, 3, 4, 5))
        assert len(index) == 5
        assert len(index._touches) < 200

    def test_many_backends_tell_who_holds_a_prefix(self) -> None:
        holders: dict[int, int] = {}
        first, second = PrefixIndex(4), PrefixIndex(4)
        first.share(holders, 1)
        second.share(holders, 2)
        first.touch([1, 2, 3, 4])
        second.touch([1, 2])
        assert holders == {1: 3, 2: 3, 4: 1}
        second.touch([7, 8, 9])
        assert holders == {1: 3, 2: 1, 4: 1, 7: 2, 8: 2}
        first.clear()
        second.clear()
        assert not holders


class TestKvReserve:
    def request(self, id_: str, *blocks: int) -> Request:
        return Request(id_, len(blocks) * 100 + 30, 20, blocks, 100.0)

    def test_shared_blocks_count_once_and_only_while_somebody_runs(self) -> None:
        kv = KvBudget()
        first, second = self.request("a", 1, 2), self.request("b", 1, 2, 3)
        assert kv.need(first, first.output_tokens) == 250
        kv.take(first, first.output_tokens)
        assert (kv.tokens, kv.need(second, second.output_tokens)) == (250, 150)
        kv.take(second, second.output_tokens)
        assert kv.tokens == 396  # of two answers of 20 the last tokens hardly ever come together
        kv.give_back(first, first.output_tokens)
        assert kv.tokens == 350
        kv.give_back(second, second.output_tokens)
        assert kv.tokens == 0

    @given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
    def test_equals_what_a_recount_finds(self, steps: list[tuple[int, bool]]) -> None:
        kv, running = KvBudget(), list[Request]()
        for number, (blocks, leaves) in enumerate(steps):
            request = self.request(str(number), *range(blocks))
            most = kv.held + kv.need(request, request.output_tokens)
            least = kv.held + kv.need(request, request.output_tokens // 2)
            kv.take(request, request.output_tokens)
            running.append(request)
            assert least <= kv.held <= most + 1e-6
            if leaves:
                first = running.pop(0)
                kv.give_back(first, first.output_tokens)
            held = {block for r in running for block in r.blocks}
            prompts, answers = 100 * len(held) + 30 * len(running), 20 * len(running)
            likely = answers / 2 + 2 * sqrt(len(running) * 20**2 / 12)
            assert kv.held == pytest.approx(prompts + min(answers, likely))

    @pytest.mark.parametrize("longest", [20, 2_000])
    def test_answers_at_a_random_moment_hold_no_more(self, longest: int) -> None:
        """19 in 20 times: the sum of many that are each evenly distributed is nearly normal."""
        dice, kv = random.Random(longest), KvBudget()
        answers = [dice.randint(1, longest) for _ in range(60)]
        for number, tokens in enumerate(answers):
            kv.take(Request(str(number), 0), tokens)
        assert kv.held < 0.75 * sum(answers)
        more = sum(sum(dice.uniform(0, n) for n in answers) > kv.held for _ in range(1_000))
        assert 0 < more < 50


class TestDueQueue:
    @given(
        st.lists(
            st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.1, 0.3]), st.booleans()),
            max_size=40,
        )
    )
    def test_leaves_when_due_and_tells_whose_deadline_is_first(
        self, steps: list[tuple[float, float, bool]]
    ) -> None:
        queue, model = DueQueue(), list[QueuedRequest]()
        for order, (deadline, work_s, pop) in enumerate(steps):
            waiting = QueuedRequest(Request(str(order), 1), "chat", 0.0, deadline, order, work_s)
            waiting.due = due_at(0.0, deadline, work_s)
            queue.push(waiting)
            model.append(waiting)
            assert queue.earliest() is min(model, key=lambda w: (w.deadline, w.order))
            if pop:
                head = min(model, key=lambda w: (w.due, w.order))
                assert queue.head() is head
                queue.remove(head.request.id)
                model.remove(head)
            assert queue.work_s == pytest.approx(sum(w.work_s for w in model))
            before = [w.work_s for w in model if w.due <= 1.0]
            assert queue.seconds_before(1.0) == pytest.approx(sum(before))
            assert queue.count_before(1.0) == len(before)
            urgent = [w.work_s for w in model if w.deadline <= 2.0]
            seconds, count = queue.urgent(2.0)
            assert seconds == pytest.approx(sum(urgent))
            assert count == len(urgent)
        assert queue.everyone() == sorted(model, key=lambda w: (w.due, w.order))

    @pytest.mark.parametrize(
        ("arrived_at", "prefill_s", "due"),
        [
            (10.0, 0.02, 10.1),  # a hit: before
            (9.0, 0.4, 11.0),  # this document, which came a second earlier
            (10.0, 8.0, 40.0),  # a long one: by deadline, as without sizes
        ],
    )
    def test_shortest_first_with_aging(
        self, arrived_at: float, prefill_s: float, due: float
    ) -> None:
        assert due_at(arrived_at, 40.0, prefill_s) == pytest.approx(due)

    def test_removing_one_who_is_not_there(self) -> None:
        assert DueQueue().remove("nobody") is None


def option(
    backend: str, wait_s: float, matched: int = 0, load: float = 0.0, *,
    wanted: bool = False, requests: int = 0, decode_s: float = 0.0,
) -> Option:  # fmt: skip
    """A 10,000-token prompt at 1 ms a token."""
    prefill_s = (10_000 - matched) / 1000
    return Option(
        backend, wait_s, wait_s / 4, prefill_s, 10.0, matched, load, wanted=wanted,
        requests=requests, decode_s=decode_s,
    )  # fmt: skip


class TestRoute:
    @pytest.mark.parametrize(
        ("options", "picked"),
        [
            ([option("a", 0), option("b", 0)], "a"),  # a tie: the first
            ([option("a", 0, load=9.0), option("b", 0)], "b"),  # then the fewest tokens
            ([option("a", 3), option("b", 1)], "b"),  # the shortest wait
            ([option("a", 3, matched=9_000), option("b", 0)], "a"),  # warm, though busier
            ([option("a", 12, matched=9_000), option("b", 0)], "a"),  # a copy for one request
            ([option("a", 12, matched=9_000, wanted=True), option("b", 0)], "b"),  # for several
            ([option("a", 19, matched=9_000), option("b", 0)], "b"),  # warm, but too busy
            ([option("a", 0.1, matched=2_000), option("b", 0)], "b"),  # a common root only
            # A copy for several delays what is decoded there, and what is decoded there delays it.
            ([option("a", 12, 9_000, wanted=True), option("b", 0, requests=25)], "a"),
            ([option("a", 0, 9_000, wanted=True, decode_s=9.5), option("b", 0)], "b"),
            ([option("a", 0, 9_000, wanted=True, decode_s=9.5), option("b", 0, decode_s=1)], "a"),
            ([option("a", 0, 9_000, decode_s=25.0), option("b", 0)], "a"),  # for one request
            ([option("a", 2, 9_000, wanted=True, decode_s=9.5), option("b", 1)], "a"),  # all busy
            # While a backend is free, nothing waits for a smaller batch.
            ([option("a", 0.2), option("b", 0, decode_s=9.5)], "b"),
        ],
    )
    def test_warm_or_least_work(self, options: list[Option], picked: str) -> None:
        request = Request("r", 10_000)
        assert warm_or_least_work(request, options, Affinity(), 0.0).backend == picked

    def test_a_backend_that_is_assumed_to_be_fast_is_as_fast_with_a_cached_prefix(self) -> None:
        slow = Option("a", 0.0, 0.0, 3.0, 6.0, 5_000, 0.0)
        slow.assume_fast(2.0)
        assert (slow.prefill_s, slow.cold_prefill_s) == (1.0, 2.0)


class TestAdmission:
    @pytest.mark.parametrize(
        ("wait_s", "timeout_s", "queued", "idle", "reason"),
        [
            (0.0, inf, 0, False, None),
            (1.6, inf, 0, False, None),  # with its margin of a quarter just within 2 s
            (1.7, inf, 0, False, "deadline_unattainable"),
            (0.0, 9.0, 0, False, "deadline_unattainable"),  # its own prefill takes 10 s
            (0.0, 9.0, 0, True, None),  # but an idle backend never refuses
            (0.0, inf, 2, False, "queue_full"),
        ],
    )
    def test_refuse(
        self, wait_s: float, timeout_s: float, queued: int, idle: bool, reason: str | None
    ) -> None:
        request = Request("r", 10_000, timeout_s=timeout_s)
        got = refuse(request, CHAT, option("a", wait_s), queued=queued, idle=idle)
        assert got == reason

    @pytest.mark.parametrize(
        ("wait_s", "seconds"), [(-inf, 1.0), (0.0, 1.0), (4.2, 5.0), (1e6, 60.0), (inf, 60.0)]
    )
    def test_whole_seconds(self, wait_s: float, seconds: float) -> None:
        assert whole_s(wait_s) == seconds


class TestBacklog:
    def backend(self) -> Backend:
        backend = Backend(BackendSpec("a", 8), [CHAT, DOCUMENT])
        backend.up = True
        without_api_server(backend)
        return backend

    def test_shrinks_with_time_but_a_late_engine_looks_busy(self) -> None:
        backend = self.backend()
        flight = backend.send(Request("r", 100_000), "document", 0, now=10.0)
        whole = flight.prefill_s
        assert backend.prefill_queue.backlog_s(10.0) == whole
        assert backend.prefill_queue.backlog_s(10.0 + whole / 2) == pytest.approx(whole / 2)
        assert backend.prefill_queue.backlog_s(10.0 + 5 * whole) == pytest.approx(SLACK * whole)
        backend.first_token("r", 10.0 + whole)
        assert backend.prefill_queue.backlog_s(11.0 + whole) == 0.0

    def test_an_answer_that_does_not_stream_leaves_the_line_when_it_should(self) -> None:
        backend = self.backend()
        flight = backend.send(Request("r", 100_000, streams=False), "document", 0, now=0.0)
        backend.end_silent_prefills(flight.prefill_s)
        assert not backend.prefills
        assert backend.cost.observations == 0

    @pytest.mark.parametrize("output_tokens", [0, 3])
    def test_a_whole_answer_before_its_first_token_was_due(self, output_tokens: int) -> None:
        """The prefill took at most as long as the answer; a failed request teaches nothing."""
        backend = self.backend()
        before_s = backend.cost.predict_s(500, 500)
        for number in range(20):
            request = Request(str(number), 500, streams=False)
            flight = backend.send(request, "chat", 0, now=1.0 * number)
            flight.output_tokens = output_tokens
            backend.finished(request.id, 1.0 * number + 0.002)
        assert not backend.prefills
        after_s = backend.cost.predict_s(500, 500)
        assert after_s == (pytest.approx(0.002, rel=0.3) if output_tokens else before_s)

    @pytest.mark.parametrize("streams", [False, True])
    def test_nothing_is_learned_from_a_prefill_whose_begin_is_unknown(self, streams: bool) -> None:
        """The prefill before it ended by its prediction, not by an answer."""
        backend = self.backend()
        first = backend.send(Request("a", 2_000, streams=False), "chat", 0, now=0.0)
        for name in "bc":
            second = backend.send(Request(name, 2_000, streams=streams), "chat", 0, now=0.0)
            second.output_tokens = 3
        backend.end_silent_prefills(first.prefill_s)
        for name in "bc":
            backend.first_token(name, first.prefill_s + 0.001)
        assert backend.cost.observations == 0
        backend.send(Request("d", 2_000), "chat", 0, now=1.0)
        backend.first_token("d", 1.1)
        assert backend.cost.observations == 1

    def test_a_whole_answer_after_its_first_token_was_due(self) -> None:
        """The share of decoding is unknown, but the time in the slot is not."""
        backend = self.backend()
        for number in range(20):
            request = Request(str(number), 500, streams=False)
            flight = backend.send(request, "chat", 0, now=9.0 * number)
            backend.end_silent_prefills(9.0 * number + 1.0)
            flight.output_tokens = 100
            backend.finished(request.id, 9.0 * number + 5.0)
        assert backend.cost.observations == 0
        assert backend.decode_s["chat"].value == pytest.approx(5.0, rel=0.15)


class Fleet:
    """Two backends, one clock, actions carried out on nothing."""

    def __init__(self, names: str = "ab", chunk_tokens: float = inf) -> None:
        specs = [BackendSpec(n, 64, 1e6, chunk_tokens=chunk_tokens) for n in names]
        self.shaper = all_up(Shaper(specs, [CHAT, DOCUMENT]))
        without_api_server(self.shaper)


class TestShaper:
    def test_a_request_behind_a_silent_prefill_starts_when_that_should_be_over(self) -> None:
        """Nothing is heard from it, and its backend had room all the time."""
        fleet = Fleet("a")
        first, second = (Request(name, 6_000, streams=False) for name in "12")
        assert sends(fleet.shaper.arrive(first, 0.0)) == [("1", "a")]
        assert sends(fleet.shaper.arrive(second, 0.0)) == []  # one document at a time
        at = fleet.shaper.wake_at()
        assert at < 1.0
        assert sends(fleet.shaper.wake(at)) == [("2", "a")]

    @pytest.mark.parametrize(
        ("chunk_tokens", "sent_at"), [(inf, 0.1), (2_048.0, 7.0)], ids=["in-order", "chunking"]
    )
    def test_fifty_users_one_document_one_prefill(
        self, chunk_tokens: float, sent_at: float
    ) -> None:
        """Single flight: followers go where the leader's prefill is.

        In an engine that computes prefills in order they go at once; one that chunks would compute
        the rest of the document for each of them, so there they go after it.
        """
        fleet = Fleet("a", chunk_tokens)
        blocks = tuple(range(58))
        prompts = [Request(str(i), 120_000, 50, blocks, 2_048.0) for i in range(3)]
        assert sends(fleet.shaper.arrive(prompts[0], 0.0)) == [("0", "a")]
        sent = {0.1: [*fleet.shaper.arrive(prompts[1], 0.1), *fleet.shaper.arrive(prompts[2], 0.1)]}
        sent[7.0] = fleet.shaper.first_token("0", 7.0)  # none of them in the way of another
        hits = sent.pop(sent_at)
        assert sends(hits) == [("1", "a"), ("2", "a")]
        assert all(isinstance(a, Send) and a.matched_tokens == 58 * 2_048 for a in hits)
        assert not any(sent.values())

    def test_followers_that_go_early_are_short_together(self) -> None:
        """They are computed before what comes later, so it must hardly notice them."""
        fleet = Fleet("a")
        blocks = tuple(range(58))
        own = 118_784 + 2_000  # 0.29 s each behind the document
        prompts = [Request(str(i), own, 50, blocks, 2_048.0) for i in range(4)]
        assert sends(fleet.shaper.arrive(prompts[0], 0.0)) == [("0", "a")]
        sent = [sends(fleet.shaper.arrive(prompt, 0.1)) for prompt in prompts[1:]]
        assert sent == [[("1", "a")], [("2", "a")], []]

    def test_a_chat_finds_one_engine_clear_of_long_documents(self) -> None:
        fleet = Fleet()
        chat, first, second = Request("c", 500), Request("d1", 131_000), Request("d2", 131_000)
        assert sends(fleet.shaper.arrive(chat, 0.0)) == [("c", "a")]
        assert sends(fleet.shaper.arrive(Request("c1", 500), 0.0)) == [("c1", "b")]
        fleet.shaper.finish("c1", 0.05)
        assert sends(fleet.shaper.arrive(first, 0.1)) == [("d1", "b")]
        assert sends(fleet.shaper.arrive(second, 0.2)) == []
        assert sends(fleet.shaper.arrive(Request("c2", 500), 0.3)) == [("c2", "a")]
        fleet.shaper.first_token("c", 0.31)
        fleet.shaper.first_token("c2", 0.33)
        # No chat for ten seconds: the second document need not wait for the first any longer.
        assert fleet.shaper.wake_at() <= 10.3
        now, sent = 0.4, list[tuple[str, str]]()
        while not sent and now < 20:
            now = fleet.shaper.wake_at()
            sent = sends(fleet.shaper.wake(now))
        assert sent == [("d2", "a")]
        assert now == pytest.approx(10.3)

    @pytest.mark.parametrize(("times_as_slow", "goes_to"), [(1.7, "b"), (3.0, "a")])
    def test_chats_show_that_a_backend_is_of_another_kind(
        self, times_as_slow: float, goes_to: str
    ) -> None:
        """Neither has computed a document; that fewer tokens were sent to b decides a tie."""
        shaper = Fleet().shaper
        for name, backend in shaper.backends.items():
            took_s = 0.04 * (times_as_slow if name == "b" else 1.0)
            for _ in range(5):
                backend.cost.observe(features(1_000, 1_000), took_s)
        shaper.arrive(Request("chat", 1_000), 0.0)
        shaper.first_token("chat", 0.04)
        shaper.finish("chat", 0.04)
        assert shaper.backends["a"].load.value(1.0) > shaper.backends["b"].load.value(1.0)
        assert sent_to(shaper.arrive(Request("document", 30_000), 1.0)) == [goes_to]

    def test_everything_down(self) -> None:
        fleet = Fleet("a")
        fleet.shaper.backend_down("a", 1.0)
        (reject,) = fleet.shaper.arrive(Request("r", 10), 1.0)
        assert getattr(reject, "reason", None) == "no_backend_available"

    def test_repr_shows_the_state_in_a_line(self) -> None:
        assert "running=0/64" in repr(Fleet().shaper)
