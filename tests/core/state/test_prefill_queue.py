"""Engines with --long-prefill-token-threshold: shorter prefills pass longer ones."""

from dataclasses import replace
from math import inf

import pytest
from core_requests import all_up, sent_to
from fakes.api_servers import without_api_server

from forebay.proxy.core.learn.cost import PRIOR_FIXED_S, CostModel, features
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.in_flight import InFlight, passing
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents

CHUNK = 2_048
BUCKETS = [
    Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0),
    Bucket("document", 131_072, max_queue=64, max_wait_s=30.0, prefills_per_backend=1),
]


def prefill(uncached_tokens: int, prefill_s: float) -> InFlight:
    request = Request("r", uncached_tokens)
    return InFlight(request, "chat", prefill_s, prefill_s, uncached_tokens, 0)


class TestPassing:
    LINE = (prefill(20_480, 10.0), prefill(1_000, 0.05), prefill(4_096, 0.2))

    @pytest.mark.parametrize(
        ("tokens", "equals_s", "steps"),
        [
            (500, 0.05, 1),
            (2_048, 0.05, 1),
            (2_049, 0.05, 2),  # shorter than the third, so it passes that one, too
            (4_096, 0.25, 2),
            (20_480, 10.25, 10),
        ],
    )
    def test_waits_for_those_no_longer_and_shares_steps_with_the_others(
        self, tokens: int, equals_s: float, steps: int
    ) -> None:
        got_s, chunks_s = passing(self.LINE, tokens, CHUNK)
        assert got_s == pytest.approx(equals_s)
        longer = [p for p in self.LINE if p.uncached_tokens > max(tokens, CHUNK)]
        # The rest of the running step and the step planned after it come first.
        share = [min(1.0, (1.5 + steps) * CHUNK / p.uncached_tokens) for p in longer]
        expected = sum(p.prefill_s * part for p, part in zip(longer, share, strict=True))
        assert chunks_s == pytest.approx(expected)

    def test_never_longer_than_the_whole_line(self) -> None:
        line = (prefill(3_000, 0.1), prefill(2_500, 0.1))
        assert sum(passing(line, 2_048, CHUNK)) <= 0.2


class TestLine:
    def backend(self, chunk: float = CHUNK) -> Backend:
        backend = Backend(BackendSpec("a", 8, chunk_tokens=chunk), BUCKETS)
        backend.up = True
        without_api_server(backend)
        return backend

    def test_a_chat_waits_for_chunks_and_a_document_for_everything(self) -> None:
        backend = self.backend()
        flight = backend.send(Request("d", 120_000), "document", 0, now=0.0)
        assert backend.prefill_queue.ahead_s(500, 0.0) < 0.05 * flight.prefill_s
        assert backend.prefill_queue.drain_s(500, 0.0) == 0.0
        assert (
            backend.prefill_queue.ahead_s(120_000, 0.0)
            == backend.prefill_queue.backlog_s(0.0)
            == flight.prefill_s
        )
        assert backend.prefill_queue.has_longer(2.0)
        assert self.backend(inf).prefill_queue.chunk_tokens == inf

    def test_a_chat_waits_for_whole_steps_of_a_document_that_is_alone(self) -> None:
        """vLLM 0.31 and later: the cap does not apply to a lone prompt."""
        backend = self.backend()
        document = backend.send(Request("d", 120_000), "document", 0, now=0.0)
        alone_s = backend.wait_s(0.0, 500, 0.0)
        assert alone_s == pytest.approx(1.5 * 8_192 / 120_000 * document.prefill_s)
        almost_done_s = backend.wait_s(0.0, 500, document.prefill_s)
        assert almost_done_s == backend.prefill_queue.backlog_s(document.prefill_s) < alone_s
        backend.send(Request("c", 500), "chat", 0, now=0.0)
        assert backend.wait_s(0.0, 500, 0.0) == 0.0
        assert self.backend(inf).wait_s(0.0, 500, 0.0) == 0.0

    def test_a_prefill_that_has_passed_took_its_part_of_the_time(self) -> None:
        backend = self.backend()
        document = backend.send(Request("d", 120_000), "document", 0, now=0.0)
        chat = backend.send(Request("c", 2_000), "chat", 0, now=1.0)
        before = backend.prefill_queue.backlog_s(1.5)
        backend.first_token("c", 1.5)
        assert backend.prefill_queue.backlog_s(1.5) == pytest.approx(before)
        assert before == pytest.approx(document.prefill_s + chat.prefill_s - 1.5)

    def test_chats_beside_a_document_do_not_teach_what_prefills_cost(self) -> None:
        """Their steps are long because of the document's chunks."""
        backend = self.backend()
        backend.send(Request("d", 120_000), "document", 0, now=0.0)
        for number in range(20):
            backend.send(Request(str(number), 500), "chat", 0, now=0.2 * number)
            backend.first_token(str(number), 0.2 * number + 0.2)
        assert backend.cost.observations == 0
        backend.first_token("d", 9.0)
        assert backend.cost.observations == 1  # of all that was done in these nine seconds

    def test_silent_answers_leave_the_line_when_they_should(self) -> None:
        backend = self.backend()
        backend.send(Request("d", 120_000), "document", 0, now=0.0)
        flight = backend.send(Request("c", 500, streams=False), "chat", 0, now=0.0)
        assert 0.0 < flight.ends_at < 1.0
        assert not backend.end_silent_prefills(flight.ends_at - 1e-3)
        assert backend.end_silent_prefills(flight.ends_at)
        assert list(backend.prefills) == ["d"]

    def test_total(self) -> None:
        model = CostModel()
        assert model.total_s(features(0, 0)) == PRIOR_FIXED_S
        assert model.total_s(features(900, 1_000)) == pytest.approx(model.predict_s(900, 1_000))


class TestShaper:
    def shaper(self) -> Shaper:
        specs = [BackendSpec(name, 64, 1e6, CHUNK) for name in "ab"]
        made = all_up(Shaper(specs, BUCKETS))
        without_api_server(made)
        return made

    def test_no_engine_is_kept_clear(self) -> None:
        shaper = self.shaper()
        shaper.arrive(Request("c0", 500), 0.0)
        documents = [shaper.arrive(Request(f"d{i}", 120_000), 0.2) for i in range(3)]
        assert {name for actions in documents[:2] for name in sent_to(actions)} == {"a", "b"}
        assert documents[2] == []  # one at a time on each
        assert sent_to(shaper.arrive(Request("c1", 500), 0.3))

    def test_a_shared_instruction_is_not_waited_for(self) -> None:
        shaper = self.shaper()
        for name in "ab":  # both are reading a document that begins as everything does
            blocks = (1, *(range(10, 70) if name == "a" else range(110, 170)))
            assert sent_to(shaper.arrive(Request(name, 120_000, 10, blocks, 2_000.0), 0.0))
        chat = Request("c", 4_500, 10, (1, 500), 2_000.0)
        assert sent_to(shaper.arrive(chat, 0.1))

    def test_a_follower_waits_for_its_document(self) -> None:
        shaper = self.shaper()
        blocks = tuple(range(60))
        first, second = (Request(name, 120_000, 10, blocks, 2_000.0) for name in "de")
        (where,) = sent_to(shaper.arrive(first, 0.0))
        assert not sent_to(shaper.arrive(second, 0.1))
        assert sent_to(shaper.first_token("d", 7.0)) == [where]


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_chats_beside_documents_that_no_engine_can_be_kept_clear_of(chunk: int) -> None:
    """Two fully loaded engines; no document is asked about twice. No chat is late all the same."""
    engine = replace(EngineConfig(), long_prefill_token_threshold=chunk)
    names = ["a", "b"]
    rows = list(chat_beside_documents(ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.18, questions=1, duration_s=120.0, seed=1
    )))  # fmt: skip
    engines = {name: served_engine(engine) for name in names}
    outcomes = Fleet(Scenario(engine=engine).new_policy(names), engines).run(rows)
    chats = [o for o in outcomes if o.request.input_tokens <= 5_000]
    late = [one for one in chats if _ttft_s(one) > 2.0]
    assert not late


def test_the_wait_beside_a_document_is_as_predicted() -> None:
    """Of hits and short chats. Their own step alone is less than half of it."""
    engine = replace(EngineConfig(), long_prefill_token_threshold=CHUNK)
    policy = Scenario(engine=engine).new_policy(["a"])
    assert isinstance(policy, Shaper)
    predicted_s: dict[str, float] = {}

    def note(now: float, action: Action) -> None:
        assert isinstance(action, Send)
        others = policy.backends["a"].in_flight.keys() - {action.request.id}
        if policy.backends["a"].prefill_queue.chunks_document and others:
            predicted_s[action.request.id] = action.predicted_ttft_s

    rows = list(chat_beside_documents(ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.02, questions=1, duration_s=300.0, seed=1
    )))  # fmt: skip
    outcomes = Fleet(policy, {"a": served_engine(engine)}, note).run(rows)
    beside = [
        o for o in outcomes if o.request.id in predicted_s and o.request.input_tokens <= CHUNK
    ]
    took_s = sum(o.first_token_s - o.sent_s for o in beside if o.first_token_s and o.sent_s)
    assert len(beside) > 100
    assert took_s / sum(predicted_s[o.request.id] for o in beside) == pytest.approx(1.0, abs=0.25)


def _ttft_s(outcome: SimOutcome) -> float:
    first_s = outcome.first_token_s
    return inf if first_s is None else first_s - outcome.request.arrival_s


def test_a_long_prompt_starts_on_a_chunking_engine_beside_a_busy_plain_one() -> None:
    """Chats pass it there, so that engine need not be kept clear."""
    specs = [BackendSpec("plain", 8), BackendSpec("chunking", 8, chunk_tokens=CHUNK)]
    shaper = all_up(Shaper(specs, BUCKETS))
    shaper.arrive(Request("chat", 500, 8), 0.0)
    shaper.finish("chat", 0.01)
    plain, chunking = shaper.backends.values()
    plain.send(Request("long", 120_000), "document", 0, now=0.02)
    shaper._state.forecast.moved(plain)
    assert sent_to(shaper.arrive(Request("second", 120_000, 8), 0.03)) == [chunking.name]
