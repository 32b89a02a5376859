"""Split prefill: the length of a part, and the requests that run between two parts."""

from math import inf

import pytest
from core_requests import BLOCK, document
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.model import SLACK, Action, BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.policy.long_prefills import next_piece
from forebay.proxy.core.policy.routing import Affinity, warm_or_least_work
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.prefill_queue import PrefillQueue
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.telemetry.receipt_text import verdict

CHAT = Bucket("chat", 5_000, max_queue=100, max_wait_s=2.0)
DOCUMENT = Bucket("document", 200_000, 100, 30.0, prefills_per_backend=1)


class TestBeginning:
    @given(tokens=st.integers(1_000, 200_000), piece_s=st.floats(0.05, 5.0))
    def test_pieces_grow_to_the_whole_prompt(self, tokens: int, piece_s: float) -> None:
        """Each takes about `piece_s` or is one block; so does the rest."""
        cost, request, before = CostModel(), document("r", tokens), 0
        fixed_s = cost.predict_s(0, 0)
        most_s = (1 + SLACK) * max(piece_s, 2 * fixed_s) + fixed_s
        while (piece := next_piece(request, before * BLOCK, before, cost, piece_s)) is not None:
            blocks = len(piece.blocks)
            assert before < blocks < len(request.blocks)
            assert piece.blocks == request.blocks[:blocks]
            assert piece.prompt_tokens == blocks * BLOCK
            assert (piece.id, piece.output_tokens, piece.streams) == ("r", 1, True)
            taken_s = cost.predict_s((blocks - before) * BLOCK, piece.prompt_tokens)
            assert taken_s <= most_s or blocks == before + 1
            before = blocks
        left_s = cost.predict_s(tokens - before * BLOCK, tokens)
        assert left_s <= most_s or before >= len(request.blocks) - 1

    def test_pieces_at_most_double_what_a_prompt_takes(self) -> None:
        """A server where every request costs nearly a piece: by time there would be 200 pieces."""

        class Slow(CostModel):
            def predict_s(self, uncached: float, total: float) -> float:
                return 0.21 + 2e-5 * uncached

        cost, request, before, took_s, piece_s = Slow(), document("r", 100_000), 0, 0.0, 0.225
        while (piece := next_piece(request, before * BLOCK, before, cost, piece_s)) is not None:
            took_s += cost.predict_s((len(piece.blocks) - before) * BLOCK, piece.prompt_tokens)
            before = len(piece.blocks)
        took_s += cost.predict_s(100_000 - before * BLOCK, 100_000)
        assert 2.2 < took_s < 2 * 2.3

    @pytest.mark.parametrize("piece_s", [0.8, 1.0, 1.2, 1.4])
    def test_the_last_piece_is_as_long_as_the_others(self, piece_s: float) -> None:
        cost, request, before, took_s = CostModel(), document("r"), 0, []
        while (piece := next_piece(request, before * BLOCK, before, cost, piece_s)) is not None:
            blocks = len(piece.blocks)
            took_s.append(cost.predict_s((blocks - before) * BLOCK, piece.prompt_tokens))
            before = blocks
        took_s.append(cost.predict_s(120_000 - before * BLOCK, 120_000))
        assert max(took_s) / min(took_s) < 1.25
        whole_s = cost.predict_s(120_000, 120_000) / piece_s
        assert whole_s - SLACK <= len(took_s) <= whole_s + 2

    def test_what_goes_whole(self) -> None:
        cost = CostModel()
        assert next_piece(document("r"), 0, 0, cost, inf) is None
        assert next_piece(document("r", whole=True), 0, 0, cost, 0.5) is None
        assert next_piece(Request("r", 120_000), 0, 0, cost, 0.5) is None  # nobody shares it

    def test_who_finds_less_cached_than_was_computed_goes_whole(self) -> None:
        """The engine caches nothing: each part would compute all earlier parts again."""
        cost = CostModel()
        assert next_piece(document("r"), 19 * BLOCK, 20, cost, 0.5) is None
        assert next_piece(document("r"), 20 * BLOCK, 20, cost, 0.5) is not None


class Fleet:
    """Backends that accept split prefills; actions are collected, not carried out."""

    def __init__(self, count: int = 1, piece_s: float = 0.8) -> None:
        specs = [BackendSpec(f"b{i}", 64, piece_s=piece_s) for i in range(count)]
        self.recorder = DecisionRecorder(100)
        self.shaper = Shaper(specs, [CHAT, DOCUMENT], recorder=self.recorder)
        for spec in specs:
            self.shaper.backend_up(spec.name, 0.0)

    def chat(self, now: float) -> list[Action]:
        """One that is answered at once, just after another: chats flow."""
        self.chats_flow(now)
        name = f"chat at {now}"
        actions = self.shaper.arrive(Request(name, 500, 10), now)
        if any(isinstance(a, Send) and a.request.id == name for a in actions):
            self.shaper.first_token(name, now + 0.03)
            self.shaper.finish(name, now + 0.03)
        return actions

    def chats_flow(self, now: float) -> None:
        """One has just come in; nothing else of it."""
        self.shaper._dispatcher.forecast.long_prefills.arrived("chat", "", now)


def deep_in_a_document() -> tuple[Fleet, float]:
    """The shaper just after it sent a document's seventh part."""
    fleet, now = Fleet(), 0.1
    fleet.chat(0.0)
    fleet.shaper.arrive(document("d"), now)
    for _ in range(6):
        now += 0.8
        fleet.chats_flow(now)
        fleet.shaper.piece_computed("d", now)
    return fleet, now


def sends(actions: list[Action]) -> list[tuple[str, int]]:
    return [(a.request.id, a.piece_blocks) for a in actions if isinstance(a, Send)]


class TestShaper:
    @pytest.mark.parametrize(
        ("chats_at", "document_at", "in_pieces"),
        [
            ((0.0,), 0.5, False),  # a probe, say
            ((0.0, 60.0), 60.5, True),
            ((0.0, 60.0), 71.0, False),
            ((0.0, 180.0), 180.5, False),  # the first in three minutes
        ],
    )
    def test_a_lone_chat_splits_no_document(
        self, chats_at: tuple[float, ...], document_at: float, in_pieces: bool
    ) -> None:
        fleet = Fleet()
        for at in chats_at:
            fleet.shaper.arrive(Request(f"chat {at}", 500, 10), at)
        (sent,) = sends(fleet.shaper.arrive(document("d"), document_at))
        assert bool(sent[1]) == in_pieces

    @pytest.mark.parametrize(("chats", "piece_s"), [(0, 0.8), (4, 0.8), (4, 0.3)])
    def test_a_piece_leaves_room_for_the_chats_of_its_step(
        self, chats: int, piece_s: float
    ) -> None:
        fleet = Fleet(piece_s=piece_s)
        fleet.chat(0.0)
        for i in range(chats):
            fleet.shaper.arrive(Request(f"c{i}", 2_000, 10), 1.0)
        queue = fleet.shaper._dispatcher.backends["b0"].prefill_queue
        chats_s = queue.total_s
        assert chats_s >= 0.05 * chats
        fleet.shaper.arrive(document("d"), 1.0)
        taken_s = queue.prefills["d"].prefill_s
        assert taken_s == pytest.approx(max(piece_s / 2, piece_s - chats_s), rel=SLACK)

    def test_a_reload_counts_a_piece_for_the_bucket_of_its_prompt(self) -> None:
        """However short the piece is."""
        fleet = Fleet(piece_s=0.1)
        fleet.chat(0.0)
        (sent,) = fleet.shaper.arrive(document("d"), 1.0)
        assert isinstance(sent, Send)
        assert 0 < sent.piece_blocks * BLOCK < CHAT.up_to
        fleet.shaper.changes.reconfigure(
            [CHAT, DOCUMENT], 1.0, route=warm_or_least_work, affinity=Affinity(),
            dispatch_ahead_s=0.3,
        )  # fmt: skip
        queue = fleet.shaper._dispatcher.backends["b0"].prefill_queue
        assert queue.prefills_of == {"chat": 0, "document": 1}

    def test_a_document_goes_in_pieces_while_chats_come(self) -> None:
        fleet, now, sent = Fleet(), 1.0, []
        fleet.chat(0.0)
        actions = fleet.shaper.arrive(document("d"), now)
        while (last := sends(actions)[0])[1]:
            sent.append(last[1])
            now += 0.8
            fleet.chats_flow(now)
            actions = fleet.shaper.piece_computed("d", now)
        assert sent == sorted(set(sent))
        assert 8 <= len(sent) <= 16
        assert sends(actions) == [("d", 0)]
        fleet.shaper.first_token("d", now + 0.5)
        fleet.shaper.finish("d", now + 1.0)
        (backend,) = fleet.shaper.backends.values()
        assert backend.idle
        assert backend.kv.tokens == 0
        assert backend.sent_prompt_tokens == 120_000 + 500

    def test_it_goes_whole_while_nobody_is_held_up(self) -> None:
        fleet = Fleet()
        assert sends(fleet.shaper.arrive(document("d"), 0.0)) == [("d", 0)]

    def test_what_is_left_goes_whole_once_nobody_is_held_up(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        ((_, blocks),) = sends(fleet.shaper.arrive(document("d"), 9.0))
        assert blocks
        assert sends(fleet.shaper.piece_computed("d", 10.5)) == [("d", 0)]

    def test_a_chat_has_its_turn_between_two_pieces(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        assert sends(fleet.shaper.arrive(document("d"), 0.1))[0][1]
        assert fleet.shaper.arrive(Request("c", 4_000, 10), 0.2) == []  # the engine is busy
        assert sends(fleet.shaper.piece_computed("d", 0.9))[0] == ("c", 0)

    def test_a_chat_is_sent_shortly_before_a_piece_ends(self) -> None:
        """However long the whole of it would take: its beginning is known to be cached."""
        fleet, now = deep_in_a_document()
        (backend,) = fleet.shaper.backends.values()
        (piece,) = backend.prefills.values()
        assert piece.overdue_s < 0.3 < 0.1 * piece.cold_s
        ends_at = now + piece.prefill_s
        assert fleet.shaper.arrive(Request("c", 4_000, 10), ends_at - 0.5) == []
        assert sends(fleet.shaper.wake(ends_at - 0.29)) == [("c", 0)]

    @pytest.mark.parametrize("kept", [True, False])
    def test_what_an_engine_did_not_keep_may_take_as_long_as_the_whole(self, kept: bool) -> None:
        """Then nothing is sent behind it just because its predicted end is near."""
        fleet, now = deep_in_a_document()
        (backend,) = fleet.shaper.backends.values()
        cached = backend.in_flight["d"].matched_tokens if kept else 0
        tokens = backend.in_flight["d"].request.prompt_tokens
        fleet.chats_flow(now + 0.8)
        fleet.shaper.piece_computed("d", now + 0.8, cached, tokens)
        flight = backend.in_flight["d"]
        assert (flight.overdue_s < 0.3) == kept
        assert flight.request.whole != kept

    def test_one_whose_prompt_cannot_be_cut_has_had_nothing_computed(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        assert sends(fleet.shaper.arrive(document("d"), 0.1))[0][1]
        fleet.shaper.not_split("d", 0.2)
        (backend,) = fleet.shaper.backends.values()
        flight = backend.in_flight["d"]
        assert flight.overdue_s == pytest.approx(0.1 * flight.cold_s)

    def test_another_document_waits_for_the_first_one(self) -> None:
        """The first document goes on; otherwise each would take as long as both."""
        fleet = Fleet()
        fleet.chat(0.0)
        assert sends(fleet.shaper.arrive(document("d"), 0.1))[0][1]
        assert fleet.shaper.arrive(document("e", first=10_000), 0.2) == []
        assert sends(fleet.shaper.piece_computed("d", 0.9))[0][0] == "d"

    def test_who_asks_about_it_waits_until_it_is_computed_whole(self) -> None:
        """One prefill, though the first tokens are far; and then before other documents."""
        fleet, now = Fleet(), 0.1
        fleet.chat(0.0)
        (first,) = fleet.shaper.arrive(document("d"), now)
        assert isinstance(first, Send)
        assert fleet.shaper.arrive(document("again"), 0.2) == []
        actions: list[Action] = [first]
        while sends(actions) and sends(actions)[0][1]:
            now += fleet.shaper.backends[first.backend].in_flight["d"].prefill_s
            fleet.chats_flow(now)
            actions = fleet.shaper.piece_computed("d", now)
            assert [w.request.id for w in fleet.shaper.waiting()] == ["again"]
        assert sends(actions) == [("d", 0)]
        (hit,) = fleet.shaper.first_token("d", now + 0.8)
        assert isinstance(hit, Send)
        assert (hit.request.id, hit.backend) == ("again", first.backend)
        assert hit.matched_tokens == 119_808  # its full blocks
        assert not fleet.shaper.backends[first.backend].splits.by_id

    def test_it_goes_on_where_it_began(self) -> None:
        """However little was computed: the other engine has done less, and would begin anew."""
        fleet = Fleet(2)
        fleet.chat(0.0)
        (first,) = fleet.shaper.arrive(document("d"), 0.1)
        assert isinstance(first, Send)
        assert first.piece_blocks * BLOCK < fleet.shaper._dispatcher.affinity.min_match * 120_000
        fleet.chats_flow(0.9)
        (second,) = fleet.shaper.piece_computed("d", 0.9)
        assert isinstance(second, Send)
        assert second.backend == first.backend

    def test_who_shares_only_the_beginning_waits_only_for_that(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 0.1)
        other = Request("o", 20_000, 100, (*range(30), *range(1_000, 1_009)), float(BLOCK))
        assert fleet.shaper.arrive(other, 0.2) == []
        fleet.chats_flow(0.9)
        actions = fleet.shaper.piece_computed("d", 0.9)
        assert sends(actions)[0] == ("o", 0)

    def test_who_waited_for_one_that_left_between_pieces_begins_itself(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 0.1)
        fleet.shaper.arrive(document("again"), 0.2)
        (backend,) = fleet.shaper.backends.values()
        assert list(backend.followers) == ["again"]
        chats = [str(number) for number in range(4)]
        for name in chats:
            fleet.shaper.arrive(Request(name, 4_000, 10), 0.3)
        fleet.shaper.piece_computed("d", 0.9)  # the chats go first
        actions = fleet.shaper.cancel("d", 0.95)
        for name in chats:
            actions += fleet.shaper.finish(name, 1.0)
        blocks = dict(sends(actions))["again"]
        assert blocks > backend.in_flight["again"].matched_tokens / BLOCK > 0

    @pytest.mark.parametrize("under_way", [True, False])
    def test_what_is_left_of_a_prompt_counts_while_a_piece_of_it_runs(
        self, under_way: bool
    ) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        if under_way:
            fleet.shaper.arrive(document("d"), 0.1)
        waiting = _waiting(document("e", first=10_000), 0.2)
        (option,) = fleet.shaper._dispatcher.forecast.options(waiting, 0.2)
        assert (option.wait_s > 8.0) == under_way

    def test_only_the_last_clear_engine_has_pieces(self) -> None:
        """Chats go to the other engine while there is one."""
        fleet = Fleet(2)
        fleet.chat(0.0)
        assert sends(fleet.shaper.arrive(document("d"), 0.1)) == [("d", 0)]
        ((_, blocks),) = sends(fleet.shaper.arrive(document("e", first=10_000), 0.2))
        assert blocks
        fleet.shaper.first_token("d", 0.8)
        fleet.chats_flow(0.9)
        assert sends(fleet.shaper.piece_computed("e", 0.9)) == [("e", 0)]

    @pytest.mark.parametrize(("other", "pieces"), [("a", False), ("b", True)])
    def test_an_engine_of_another_model_is_none_that_chats_could_use(
        self, other: str, pieces: bool
    ) -> None:
        fleet = Fleet(2)
        for name, model in (("b0", "a"), ("b1", other)):
            fleet.shaper.changes.set_models(name, frozenset([model]), 0.0)
        fleet.chat(0.0)
        ((_, blocks),) = sends(fleet.shaper.arrive(document("d", model="a"), 0.1))
        assert (blocks > 0) == pieces

    def test_an_engine_that_caches_nothing_is_sent_the_rest_whole(self) -> None:
        fleet, now = Fleet(), 0.1
        fleet.chat(0.0)
        actions = fleet.shaper.arrive(document("d"), now)
        for _ in range(3):
            now += 0.8
            fleet.chats_flow(now)
            if not sends(actions)[0][1]:
                break
            actions = fleet.shaper.piece_computed("d", now, 0, 60_000)
        assert sends(actions) == [("d", 0)]

    def test_one_that_leaves_between_or_in_a_piece(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 0.1)
        chats = [str(number) for number in range(4)]
        for name in chats:
            fleet.shaper.arrive(Request(name, 4_000, 10), 0.2)
        fleet.shaper.piece_computed("d", 0.9)  # the chats go first
        assert "d" in [w.request.id for w in fleet.shaper.waiting()]
        fleet.shaper.cancel("d", 0.95)
        for name in chats:
            fleet.shaper.finish(name, 1.0)
        assert sends(fleet.shaper.arrive(document("e", first=10_000), 1.1))[0][1]
        fleet.shaper.finish("e", 1.2)
        (backend,) = fleet.shaper.backends.values()
        assert backend.idle
        assert not backend.prefills

    def test_its_backend_fails_in_a_piece(self) -> None:
        """Another one begins again, and knows nothing of what the first has computed."""
        fleet = Fleet(3)
        fleet.chat(0.0)
        for number in range(2):
            fleet.shaper.arrive(document(f"{number}", first=10_000 * (number + 1)), 0.1)
        (send,) = fleet.shaper.arrive(document("d"), 0.1)
        assert isinstance(send, Send)
        assert send.piece_blocks
        fleet.shaper.first_token("0", 0.2)
        (again,) = fleet.shaper.retry("d", 0.2)
        assert isinstance(again, Send)
        assert again.backend != send.backend
        assert again.matched_tokens == again.piece_blocks == 0  # the failed one is clear

    def test_the_queue_time_ends_with_the_first_piece(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 1.0)
        (send,) = fleet.shaper.piece_computed("d", 1.8)
        assert isinstance(send, Send)
        assert send.queued_s == 0.0

    def test_the_receipt_tells_of_each_piece(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 1.0)
        fleet.shaper.piece_computed("d", 1.8)
        receipt = fleet.recorder.receipts.under_way["d"]
        assert [step.kind for step in receipt.steps].count("computed") == 1
        assert receipt.state == "prefilling"
        assert (receipt.tries, receipt.sent_at) == (1, 1.0)
        assert verdict(receipt, 2.0).startswith("Sent at once to b0, one part of its prompt first")

    def test_every_backend_is_gone_between_two_pieces(self) -> None:
        fleet = Fleet()
        fleet.chat(0.0)
        fleet.shaper.arrive(document("d"), 0.1)
        fleet.shaper.backend_down("b0", 0.5)
        (refused,) = fleet.shaper.piece_computed("d", 0.9)
        assert isinstance(refused, Reject)
        assert refused.reason == "no_backend_available"


def test_engines_that_let_shorter_prefills_pass_get_whole_prompts() -> None:
    shaper = Shaper([BackendSpec("a", 64, chunk_tokens=2_048.0, piece_s=0.8)], [CHAT, DOCUMENT])
    shaper.backend_up("a", 0.0)
    shaper.arrive(Request("c", 500, 10), 0.0)
    shaper.first_token("c", 0.1)
    assert sends(shaper.arrive(document("d"), 0.2)) == [("d", 0)]


@pytest.mark.parametrize("piece_s", [inf, 0.8])
def test_prefill_is_predicted_whole_either_way(piece_s: float) -> None:
    shaper = Shaper([BackendSpec("a", 64, piece_s=piece_s)], [CHAT, DOCUMENT])
    shaper.backend_up("a", 0.0)
    (option,) = shaper._dispatcher.forecast.options(_waiting(document("d")), 0.0)
    assert option.prefill_s > 8.0


def _waiting(request: Request, arrived_at: float = 0.0) -> QueuedRequest:
    return QueuedRequest(request, "document", arrived_at, inf, 0)


class TestALatePiece:
    """A step computes a piece and chats together, so each may be later than predicted alone."""

    @staticmethod
    def queue(*prefills: InFlight) -> PrefillQueue:
        queue = PrefillQueue([CHAT.name, DOCUMENT.name], inf)
        for prefill in prefills:
            queue.join(prefill, 0.0)
        return queue

    @staticmethod
    def piece(*, fresh: bool) -> InFlight:
        return InFlight(document("d", 50_000), DOCUMENT.name, 0.5, 4.0, 4_000, 0, fresh=fresh)

    def test_it_was_not_evicted(self) -> None:
        assert self.queue(self.piece(fresh=True)).backlog_s(0.8) < 0.1
        assert self.queue(self.piece(fresh=False)).backlog_s(0.8) == pytest.approx(3.2)

    def test_a_chat_before_it_is_computed_with_it(self) -> None:
        chat = InFlight(Request("c", 500, 10), CHAT.name, 0.03, 0.03, 500, 0)
        queue = self.queue(chat, self.piece(fresh=True))
        assert queue.backlog_s(0.4) == pytest.approx(0.13)
        assert queue.below_at(0.3) == pytest.approx(0.23)

    def test_a_step_holds_the_beginning_of_the_piece(self) -> None:
        chat = InFlight(Request("c", 5_000, 10), CHAT.name, 0.15, 0.15, 5_000, 0)
        queue = self.queue(chat, self.piece(fresh=True))
        assert queue.backlog_s(0.4) == pytest.approx(0.25)
        assert queue.step_s == pytest.approx(0.15 + 0.5 * (8_192 - 5_000) / 4_000)
