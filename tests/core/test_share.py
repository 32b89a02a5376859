"""Work of other proxies: its sums, where the shaper counts it, and when it is forgotten."""

from collections import Counter
from math import inf

import pytest
from core_requests import all_up, sent_to
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.model import (
    ENOUGH,
    HISTORY,
    MAJORITY,
    BackendSpec,
    Bucket,
    Reject,
    Request,
)
from forebay.proxy.core.policy.rendezvous import CommonRoot, highest, name_seed
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.elsewhere import (
    SILENT_S,
    BackendReport,
    Elsewhere,
    Peers,
    ProxyReport,
    TenantUse,
)

CHAT = Bucket("chat", 5_000, max_queue=8, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=4, max_wait_s=30.0, prefills_per_backend=1)


def a_shaper(names: str = "ab", slots: int = 4, kv_tokens: float = 1e6) -> Shaper:
    return all_up(Shaper([BackendSpec(n, slots, kv_tokens) for n in names], [CHAT, DOCUMENT]))


def replace(peers: Peers, peer: str, report: ProxyReport, now: float) -> dict[str, float]:
    fresh = peers.keep(peer, report, now)
    peers.sum_up(now)
    return fresh


class TestElsewhere:
    def test_seconds_shrink_with_time_and_never_below_nothing(self) -> None:
        elsewhere = Elsewhere()
        elsewhere.update([(BackendReport(3.0), 10.0), (BackendReport(1.0), 10.5)], 10.5)
        assert [elsewhere.prefill_s(t) for t in (10.5, 11.0, 12.0, 13.0, 99.0)] == [
            3.5, 2.5, 1.0, 0.0, 0.0,
        ]  # fmt: skip

    @given(
        told=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=5),
        limit_s=st.floats(0.01, 20),
    )
    def test_below_at_is_when_the_sum_is_there(
        self, told: list[tuple[float, float]], limit_s: float
    ) -> None:
        elsewhere = Elsewhere()
        elsewhere.update([(BackendReport(s), at) for s, at in told], 5.0)
        at = elsewhere.below_at(limit_s)
        if at == -inf:
            assert elsewhere.prefill_s(5.0) <= limit_s + 1e-6
        else:
            assert elsewhere.prefill_s(at) == pytest.approx(limit_s, abs=1e-6)


class TestPeers:
    def test_counters_of_a_newcomer_are_no_news(self) -> None:
        peers = Peers()
        peers.know("a", 0.0)
        books = BackendReport(fresh_tokens=1_000.0, work=(1.0, 2.0, 3.0))
        assert replace(peers, "p", ProxyReport({"a": books}, {"t": TenantUse(5.0, 9.0)}), 0.0) == {}
        assert peers.elsewhere("a").work == (0.0, 0.0, 0.0)
        assert peers.used() == {}
        books = BackendReport(fresh_tokens=1_500.0, work=(1.5, 2.0, 4.0))
        assert replace(peers, "p", ProxyReport({"a": books}, {"t": TenantUse(7.0, 9.0)}), 0.1) == {
            "a": 500.0
        }
        assert peers.elsewhere("a").work == (0.5, 0.0, 1.0)
        assert peers.used()["t"].prefill_s == 2.0
        # A tenant that this proxy has never mentioned is all new once we know the proxy.
        replace(peers, "p", ProxyReport({"a": books}, {"u": TenantUse(1.0, 4.0)}), 0.2)
        assert peers.used()["u"].prompt_tokens == 4.0
        # What was not computed after all is given back; who counts fewer tokens has begun anew.
        replace(peers, "p", ProxyReport({"a": books}, {"u": TenantUse(0.75, 4.0)}), 0.3)
        assert peers.used()["u"].prefill_s == -0.25
        replace(peers, "p", ProxyReport({"a": books}, {"u": TenantUse(0.5, 3.0)}), 0.4)
        assert peers.used()["u"].prompt_tokens == 3.0

    def test_budgets_get_charges_and_refunds_and_the_requests_of_all(self) -> None:
        peers = Peers()

        def say(peer: str, charged: float, refunded: float, running: int = 0) -> None:
            tenants = {"t": TenantUse(0.0, 0.0, charged, refunded, running)}
            replace(peers, peer, ProxyReport({}, tenants), 0.0)

        say("p", 100.0, 0.0, running=2)
        assert peers.used() == {}
        say("p", 150.0, 20.0, running=3)
        say("q", 900.0, 0.0, running=4)
        used = peers.used()["t"]
        assert (used.charged, used.refunded) == (50.0, 20.0)
        assert (peers.running("t"), peers.running("u")) == (7, 0)
        say("p", 30.0, 5.0)  # it was idle, and has begun anew
        used = peers.used()["t"]
        assert (used.charged, used.refunded) == (30.0, 5.0)
        peers.gone("q", 1.0)
        assert peers.running("t") == 0

    @given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(0, 9)), max_size=30))
    def test_each_proxy_counts_with_what_it_said_last(self, said: list[tuple[str, int]]) -> None:
        peers, last = Peers(), Counter[str]()
        peers.know("a", 0.0)
        for step, (name, running) in enumerate(said):
            replace(peers, name, ProxyReport({"a": BackendReport(running=running)}), float(step))
            last[name] = running
            assert peers.elsewhere("a").running == sum(last.values())
        assert peers.silent(len(said) + SILENT_S + 1) == sorted(last)
        for name in list(last):
            peers.gone(name, 99.0)
        assert peers.elsewhere("a").running == len(peers) == 0


class TestShaper:
    def test_books_are_what_the_others_see(self) -> None:
        one, other = a_shaper(), a_shaper()
        one.arrive(Request("d", 100_000, 50), 0.0)
        one.arrive(Request("c", 1_000, 50), 0.0)
        other.peering.reported("one", one.peering.report(0.0), 0.0)
        for name, backend in one.backends.items():
            theirs = other.backends[name]
            assert theirs.running == len(backend.in_flight) == 1
            assert not theirs.in_flight
            assert not theirs.idle
            assert theirs.prefill_queue.backlog_s(0.5) == pytest.approx(
                backend.prefill_queue.backlog_s(0.0) - 0.5
            ) or (theirs.prefill_queue.backlog_s(0.5) == 0.0)

    def test_our_own_books_leave_out_what_we_were_told(self) -> None:
        shaper = a_shaper()
        before = shaper.peering.report(1.0).backends["a"]
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(9.0, 3, 5e4, 9.0, 1e5)}), 1.0)
        after = shaper.peering.report(1.0).backends["a"]
        for name in ("backlog_s", "running", "kv_tokens", "longest_s", "load"):
            assert getattr(after, name) == getattr(before, name) == 0

    def test_a_newcomer_goes_where_the_others_are_not(self) -> None:
        shaper = a_shaper()
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(5.0, 1, longest_s=5.0)}), 0.0)
        assert sent_to(shaper.arrive(Request("c", 1_000), 0.0)) == ["b"]

    @pytest.mark.parametrize(
        "books",
        [
            BackendReport(running=4),  # no slot
            BackendReport(backlog_s=2.0, running=1),  # late binding
            BackendReport(running=1, kv_tokens=9.4e5),  # no KV cache
            BackendReport(running=1, prefills={"document": 1}),  # the bucket's limit
        ],
    )
    def test_waits_for_what_others_hold_until_they_give_it_back(self, books: BackendReport) -> None:
        shaper = a_shaper("a")
        shaper.peering.reported("p", ProxyReport({"a": books}), 0.0)
        assert sent_to(shaper.arrive(Request("d", 100_000), 0.0)) == []
        assert shaper.queued("document") == 1
        assert sent_to(shaper.peering.reported("p", ProxyReport({"a": BackendReport()}), 0.1)) == [
            "a"
        ]

    def test_a_silent_proxy_is_forgotten_and_gives_all_back(self) -> None:
        shaper = a_shaper("a")
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(running=4)}), 0.0)
        shaper.arrive(Request("d", 100_000), 0.0)
        assert shaper.peering.forget_silent(SILENT_S) == []
        assert sent_to(shaper.peering.forget_silent(SILENT_S + 0.01)) == ["a"]
        assert shaper.peering.peers.names == []
        assert shaper.backends["a"].elsewhere is None

    def test_work_that_waits_elsewhere_is_reckoned_with(self) -> None:
        shaper = a_shaper("a", slots=1)
        shaper.arrive(Request("c", 1_000), 0.0)
        shaper.peering.reported(
            "p", ProxyReport({"a": BackendReport(queued_s={"document": 60.0})}), 0.0
        )
        (reject,) = shaper.arrive(Request("d", 100_000), 0.0)
        assert isinstance(reject, Reject)
        assert reject.reason == "deadline_unattainable"
        # Documents leave after chats: a chat need not reckon with those elsewhere either.
        assert shaper.arrive(Request("c2", 1_000), 0.0) == []
        assert shaper.queued("chat") == 1

    def test_prefill_costs_are_learned_beside_others(self) -> None:
        """The engine does both proxies' prefills; each learns what one costs, not what two do."""
        alone, one, other = a_shaper("a"), a_shaper("a"), a_shaper("a")
        work, at = Request("x", 60_000), 0.0
        whole_s = alone.backends["a"].prefill_s(work, 0)
        for turn in range(30):
            for shaper in (one, other):
                shaper.arrive(Request(f"{turn}", 60_000), at)
            one.peering.reported("other", other.peering.report(at), at)
            other.peering.reported("one", one.peering.report(at), at)
            for i, shaper in enumerate((one, other)):
                done_at = at + (i + 1) * whole_s
                shaper.first_token(f"{turn}", done_at)
                peer, name = (other, "one") if shaper is one else (one, "other")
                peer.peering.reported(name, shaper.peering.report(done_at), done_at)
                shaper.finish(f"{turn}", done_at)
            at += 2 * whole_s
        for shaper in (one, other):
            assert shaper.backends["a"].prefill_s(work, 0) == pytest.approx(whole_s, rel=0.35)

    def test_prompts_of_other_proxies_push_ours_out_of_the_cache(self) -> None:
        shaper = a_shaper("a", kv_tokens=10_000.0)
        prompt = Request("d", 5_000, 0, tuple(range(10)), 500.0)
        shaper.arrive(prompt, 0.0)
        shaper.finish("d", 1.0)
        backend = shaper.backends["a"]
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(fresh_tokens=1e6)}), 1.0)
        assert backend.matched_tokens(prompt) == 4_999
        shaper.peering.reported(
            "p", ProxyReport({"a": BackendReport(fresh_tokens=1e6 + 7_000)}), 1.1
        )
        assert backend.matched_tokens(prompt) == 3_000

    def test_a_backend_that_joins_counts_what_others_have_there_at_once(self) -> None:
        shaper = a_shaper("a")
        theirs = {"a": BackendReport(5.0, 1), "b": BackendReport(running=4, load=7.0)}
        shaper.peering.reported("p", ProxyReport(theirs), 0.0)
        shaper.changes.add_backend(BackendSpec("b", 4, 1e6), 0.1)
        shaper.backend_up("b", 0.1)
        assert shaper.backends["b"].running == 4
        shaper.arrive(Request("c", 1_000), 0.1)
        assert shaper.queued("chat") == 1
        assert sent_to(shaper.peering.reported("p", ProxyReport({}), 0.2)) in (["a"], ["b"])

    def test_a_removed_backend_leaves_nothing_behind(self) -> None:
        shaper = a_shaper("ab")
        shaper.peering.reported("p", ProxyReport({"b": BackendReport(running=2, load=7.0)}), 0.0)
        shaper.arrive(Request("d", 8_000, 1, tuple(range(16)), 500.0), 0.0)
        shaper.finish("d", 0.05)
        shaper.changes.drain_backend("b", 0.1)
        assert not shaper.backends["b"].idle  # others' requests run there: theirs to wait for
        assert shaper.backends["b"].empty
        shaper.changes.remove_backend("b", 0.1)
        assert "b" not in shaper.peering.report(0.1).backends
        assert "b" not in shaper._state.forecast._rendezvous._seeds
        shaper.peering.reported("p", ProxyReport({"b": BackendReport(running=2, load=7.0)}), 0.2)
        assert shaper.peering.gone("p", 0.3) == []

    def test_other_buckets_and_backends_change_nothing_between_proxies(self) -> None:
        shaper = a_shaper("a")
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(running=4)}), 0.0)
        for i in range(ENOUGH):
            shaper.arrive(Request(f"{i}", 1_000, 1, (1, 2), 512.0), 0.0)
        shaper.changes.reconfigure([Bucket("all", 131_072, 99, 30.0)], 0.1)
        assert shaper._state.forecast._rendezvous.root._seen == ENOUGH
        shaper.arrive(Request("x", 1_000, 1, (1, 2), 512.0), 0.1)
        assert shaper._state.forecast._rendezvous.root._seen == ENOUGH + 1
        assert shaper.queued("all") > 0
        assert set(sent_to(shaper.peering.gone("p", 0.2))) == {"a"}

    def test_the_running_limit_counts_everybody(self) -> None:
        """The adaptive limit, too: what others run fills it."""
        shaper = a_shaper("a", slots=8)
        shaper.changes.change_backend(BackendSpec("a", 4), 0.0)
        shaper.peering.reported("p", ProxyReport({"a": BackendReport(running=4)}), 0.0)
        assert sent_to(shaper.arrive(Request("c", 1_000), 0.0)) == []
        assert sent_to(
            shaper.peering.reported("p", ProxyReport({"a": BackendReport(running=3)}), 0.1)
        ) == ["a"]

    def test_tenants_of_the_last_seconds_are_told(self) -> None:
        shaper = a_shaper("a")
        shaper.peering.reported("p", ProxyReport({}), 0.0)
        shaper.arrive(Request("r", 1_000, tenant="t"), 0.0)
        use = shaper.peering.report(0.1).tenants["t"]
        assert use.prompt_tokens == 1_000
        assert use.prefill_s > 0
        assert shaper.peering.report(5.0).tenants == {}

    def test_a_batch_that_fills_an_engine_is_charged_equally_everywhere(self) -> None:
        shaper = a_shaper("a")
        shaper.peering.reported("p", ProxyReport({}), 0.0)
        shaper.arrive(Request("r", 1_000, tenant="t", sequences=4), 0.0)
        assert shaper.peering.report(0.1).tenants["t"].prefill_s == pytest.approx(
            shaper._state.fairness.counters()["t"]
        )


class TestComputedPrompts:
    def test_a_turn_goes_where_another_proxy_had_the_last_turn_computed(self) -> None:
        one, other = a_shaper(), a_shaper()
        other.peering.reported("one", ProxyReport({}), 0.0)
        one.peering.reported("other", ProxyReport({}), 0.0)
        blocks = tuple(range(500, 530))
        (home,) = sent_to(one.arrive(Request("t1", 61_000, 50, blocks, 2_048.0), 0.0))
        assert one.peering.report(0.1).computed == {}  # its prefill runs
        one.first_token("t1", 9.0)
        report = one.peering.report(9.1)
        assert report.computed == {home: [blocks]}
        assert one.peering.report(9.2).computed == {}
        other.peering.reported("one", report, 9.1)
        (away,) = {"a", "b"} - {home}
        assert other.backends[home].cache.prefixes.match(blocks) == 30
        assert other.backends[away].cache.prefixes.match(blocks) == 0
        other.backends[home].load.add(1e6, 9.1)  # a reason to prefer the other
        turn = Request("t2", 63_000, 50, (*blocks, 900), 2_048.0)
        assert sent_to(other.arrive(turn, 20.0)) == [home]

    def test_a_reported_prompt_takes_its_room_once(self) -> None:
        one, other = a_shaper("a"), a_shaper("a")
        one.peering.reported("other", ProxyReport({}), 0.0)
        other.peering.reported("one", one.peering.report(0.0), 0.0)
        one.arrive(Request("d", 61_000, 500, tuple(range(30)), 2_000.0), 0.0)
        one.first_token("d", 9.0)
        other.peering.reported("one", one.peering.report(9.1), 9.1)
        index = other.backends["a"].cache.prefixes
        assert index.match(tuple(range(30))) == 30
        assert 30 <= len(index) < 35  # the end of the prompt, and its answer

    def test_news_are_bounded(self) -> None:
        shaper = a_shaper("a", slots=64)
        shaper.peering.reported("p", ProxyReport({}), 0.0)
        long = 3 * HISTORY
        for i in range(2):
            shaper.arrive(
                Request(f"{i}", long, 1, tuple(range(i * long, (i + 1) * long)), 1.0), 0.0
            )
            shaper.first_token(f"{i}", 1.0)
        assert sum(map(len, shaper.peering.report(1.1).computed["a"])) == HISTORY
        assert shaper.peering.report(1.2).computed == {}

    def test_alone_nothing_is_kept(self) -> None:
        shaper = a_shaper("a")
        shaper.arrive(Request("d", 2_000, 1, (1, 2), 512.0, tenant="t"), 0.0)
        shaper.first_token("d", 0.1)
        report = shaper.peering.report(0.2)
        assert (report.computed, report.tenants) == ({}, {})


class TestRendezvous:
    @given(
        keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
        names=st.lists(st.text("abcdefgpu0123", min_size=1), min_size=2, max_size=8, unique=True),
        data=st.data(),
    )
    def test_losing_a_backend_moves_only_its_own(
        self, keys: list[int], names: list[str], data: st.DataObject
    ) -> None:
        gone = data.draw(st.sampled_from(names))
        left = [n for n in names if n != gone]
        for key in keys:
            before = names[highest(key, [name_seed(n) for n in names])]
            after = left[highest(key, [name_seed(n) for n in left])]
            assert after == before or before == gone

    @pytest.mark.parametrize("step", [1, 512, 1 << 40])
    def test_spreads_evenly_whatever_the_keys_look_like(self, step: int) -> None:
        seeds = [name_seed(f"gpu{i}") for i in range(4)]
        won = Counter(highest(i * step, seeds) for i in range(4_000))
        assert all(900 <= count <= 1_100 for count in won.values()), won

    def test_questions_about_one_document_have_one_key(self) -> None:
        root = CommonRoot()
        document = tuple(range(100, 158))
        keys = {root.key((*document, *range(q, q + q % 5)), 0.25) for q in range(1_000, 1_020)}
        assert len(keys) == 1
        assert root.key(tuple(range(300, 358)), 0.25) not in keys

    def test_a_common_beginning_is_no_key(self) -> None:
        """Chats behind one system prompt of 3 blocks must not all meet."""
        root, system = CommonRoot(), (1, 2, 3)
        chats = [(*system, 1_000 + i, 2_000 + i) for i in range(200)]
        for chat in chats:
            root.count(chat)
        keys = {root.key(chat, 0.25) for chat in chats}
        assert len(keys) == len(chats)
        assert root.key(system, 0.25) is None

    def test_the_root_is_forgotten_when_prompts_no_longer_begin_with_it(self) -> None:
        root = CommonRoot()
        for i in range(2 * ENOUGH):
            root.count((7, 10_000 + i))
        assert root.key((7, 5), 0.25) == 5
        for i in range(int(2 * ENOUGH / MAJORITY)):
            root.count((20_000 + i,))
        assert root.key((7, 5), 0.25) == 7

    @given(st.lists(st.lists(st.integers(0, 5), max_size=9).map(tuple), max_size=80))
    def test_a_key_is_one_of_the_blocks(self, prompts: list[tuple[int, ...]]) -> None:
        root = CommonRoot()
        for blocks in prompts:
            root.count(blocks)
            key = root.key(blocks, 0.25)
            assert key is None or key in blocks

    def test_two_proxies_send_a_cold_document_to_one_backend(self) -> None:
        homes = set()
        for load in ("a", "b"):  # each has its own reason to prefer another
            shaper = a_shaper("ab")
            shaper.peering.reported("p", ProxyReport({}), 0.0)
            shaper.arrive(Request("c", 2_000), 0.0)
            shaper.first_token("c", 0.1)
            shaper.finish("c", 0.2)
            shaper.backends[load].cost.scale = (1.0, 1.0, 1.0)
            blocks = tuple(range(500, 558))
            (home,) = sent_to(shaper.arrive(Request("d", 119_000, 50, blocks, 2_048.0), 0.3))
            homes.add(home)
        assert len(homes) == 1

    def test_with_no_peers_nothing_is_counted_and_nothing_preferred(self) -> None:
        shaper = a_shaper("ab")
        for i in range(100):
            shaper.arrive(Request(str(i), 2_000, 1, (1, 2, 3, 4), 512.0), float(i))
        assert shaper._state.forecast._rendezvous.root._seen == 0
