"""The API server in front of each engine: what is learned of it, and how texts are spaced."""

from math import inf

import pytest
from core_requests import all_up, document, sent_ids, sent_to
from fakes.api_servers import without_api_server

from forebay.proxy.core.health import Health
from forebay.proxy.core.learn.api_server import BEFORE_SHARE, PRIOR_SERVER_S_PER_TOKEN, ServerModel
from forebay.proxy.core.model import ENOUGH, INSTANT_S, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest

LONG = 120_000
CHAT = Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=64, max_wait_s=30.0)
ENGINE_S = 0.02  # of a hit, by the prior


def fleet(*names: str, chunk_tokens: float = inf) -> Shaper:
    specs = [BackendSpec(name, 64, chunk_tokens=chunk_tokens) for name in names]
    return all_up(Shaper(specs, [CHAT, DOCUMENT]))


def price(shaper: Shaper, name: str, tokens: int, now: float) -> Option:
    waiting = QueuedRequest(Request("new", tokens), "chat", now, inf, 10**6, 0.0)
    (option,) = shaper._state.forecast.options_among([shaper.backends[name]], waiting, now)
    return option


class Scene:
    """One backend, whose API server takes `slowness` times as long as the prior predicts."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.shaper = fleet("a")
        self.backend: Backend = self.shaper.backends["a"]
        self.model = self.backend.api_server.model
        self.token_s = slowness * PRIOR_SERVER_S_PER_TOKEN
        self.now = 0.0
        self.count = 0

    def hit(self, tokens: int = LONG, times: int = 1, *, cached: bool = True) -> None:
        """Answer hits of a long prompt one by one, each alone."""
        for _ in range(times):
            self.count += 1
            request = Request(str(self.count), tokens)
            matched = tokens - 1 if cached else 0
            sent = self.backend.send(request, "document", matched, self.now)
            engine_s = ENGINE_S if cached else sent.prefill_s
            self.now += self.token_s * tokens + engine_s
            self.backend.first_token(request.id, self.now)
            self.backend.finished(request.id, self.now)
            self.now += 10.0


class TestModel:
    def test_a_server_ten_times_as_slow_is_learned_from_hits_alone(self) -> None:
        scene = Scene(10.0)
        scene.hit(times=5)
        assert scene.model.token_s == pytest.approx(scene.token_s, rel=0.2)
        assert scene.backend.cost.observations == 0

    def test_an_outlier_is_forgotten(self) -> None:
        scene = Scene()
        scene.hit(times=10)
        scene.token_s *= 100.0
        scene.hit()
        assert scene.model.token_s < 1.2 * PRIOR_SERVER_S_PER_TOKEN
        scene.token_s /= 100.0
        scene.hit(times=2 * ENOUGH)
        assert scene.model.token_s == pytest.approx(PRIOR_SERVER_S_PER_TOKEN, rel=0.05)

    def test_a_first_observation_that_is_an_outlier_is_forgotten(self) -> None:
        scene = Scene(100.0)
        scene.hit()
        scene.token_s = PRIOR_SERVER_S_PER_TOKEN
        scene.hit(times=2 * ENOUGH)
        assert scene.model.token_s == pytest.approx(PRIOR_SERVER_S_PER_TOKEN, rel=0.1)

    def test_a_cold_document_teaches_the_engine_and_not_the_server(self) -> None:
        scene = Scene()
        scene.hit(cached=False)
        assert scene.backend.cost.observations == 1
        assert scene.model.token_s == PRIOR_SERVER_S_PER_TOKEN
        assert scene.backend.cost.scale == pytest.approx((1.0, 1.0, 1.0), rel=0.01)

    def test_hits_of_a_long_prompt_do_not_change_what_a_chat_is_predicted_to_take(self) -> None:
        """The engine was once learned to be five times as slow as it was, from such hits."""
        scene = Scene()
        before_s = scene.backend.cost.predict_s(500, 500)
        scene.hit(times=50)
        assert scene.backend.cost.predict_s(500, 500) == before_s

    def test_two_hits_in_one_step_are_not_one_alone(self) -> None:
        """Both texts are half of the time each: the server is no faster and no slower."""
        scene = Scene()
        server_s = scene.token_s * LONG
        for now in (0.0, 10.0):
            for name in ("x", "y"):
                scene.backend.send(Request(name, LONG), "document", LONG - 1, now)
            for name in ("x", "y"):  # the first one was only noticed with the second
                at = now + (1.0 + BEFORE_SHARE) * server_s + ENGINE_S
                scene.backend.first_token(name, at)
            for name in ("x", "y"):
                scene.backend.finished(name, now + 5.0)
        assert scene.model.token_s == pytest.approx(PRIOR_SERVER_S_PER_TOKEN, rel=0.01)

    def test_a_slow_server_without_a_pause_is_not_taken_for_a_slow_engine(self) -> None:
        """Hits of one document come all the time, so that the next one is always sent already.

        What they take is not learned: beside others it may be the engine's. When such times taught
        the server, 6 to 17 % of a flood's requests expired in the queue instead of 2 to 7 %.
        """
        scene = Scene(10.0)
        backend, before_s = scene.backend, BEFORE_SHARE * scene.token_s * LONG
        read_at, sent, answers = 0.0, 0, list[tuple[float, str]]()
        while sent < 40:
            while sent < 40 and backend.api_server.wait_s(scene.now) <= INSTANT_S:
                name = str(sent)
                sent += 1
                backend.send(Request(name, LONG), "document", LONG - 1, scene.now)
                read_at = max(read_at, scene.now) + before_s
                after_s = (1.0 - BEFORE_SHARE) * scene.token_s * LONG
                answers.append((read_at + ENGINE_S + after_s, name))
            sends_at = max(scene.now + 0.001, backend.api_server.free_at - INSTANT_S)
            if answers and answers[0][0] <= sends_at:
                scene.now, name = answers.pop(0)
                backend.first_token(name, scene.now)
            else:
                scene.now = sends_at
        assert backend.cost.predict_s(500, 500) < 0.05

    def test_an_impure_hit_of_a_long_prompt_teaches_the_engine_nothing(self) -> None:
        scene = Scene()
        before_s = scene.backend.cost.predict_s(500, 500)
        for number in range(2 * ENOUGH):
            request = Request(str(number), LONG, streams=False, pure=False)
            scene.backend.send(request, "document", LONG - 1, scene.now)
            scene.now += scene.token_s * LONG + ENGINE_S
            scene.backend.end_silent_prefills(scene.now)
            scene.backend.first_token(request.id, scene.now)
            scene.backend.finished(request.id, scene.now + 1.0)
            scene.now += 10.0
        assert scene.backend.cost.predict_s(500, 500) == before_s
        assert scene.model.token_s == PRIOR_SERVER_S_PER_TOKEN

    def test_before_and_after_are_the_whole(self) -> None:
        model = ServerModel()
        whole_s = model.before_s(LONG) + model.after_s(LONG)
        assert whole_s == pytest.approx(PRIOR_SERVER_S_PER_TOKEN * LONG)


class TestSpacing:
    def test_a_chat_is_predicted_to_wait_for_four_texts_and_goes_elsewhere(self) -> None:
        shaper = fleet("a", "b")
        backend = shaper.backends["a"]
        for i in range(4):  # as in mode observe, or by another proxy's hand
            backend.send(Request(str(i), LONG), "document", LONG - 1, 0.0)
        before_s = backend.api_server.model.before_s(LONG)
        assert price(shaper, "a", 500, 0.0).wait_s > 4 * before_s
        assert price(shaper, "b", 500, 0.0).wait_s < 0.01
        assert sent_to(shaper.arrive(Request("chat", 500), 0.0)) == ["b"]

    def test_long_texts_go_one_after_the_other_and_a_chat_between_them(self) -> None:
        shaper = fleet("a", chunk_tokens=2_048.0)
        backend = shaper.backends["a"]
        before_s = backend.api_server.model.before_s(LONG)
        assert sent_ids(shaper.arrive(document("leader"), 0.0)) == ["leader"]
        for i in range(3):
            assert shaper.arrive(document(f"hit{i}"), 1.0) == []
        assert sent_ids(shaper.first_token("leader", 11.0)) == ["hit0"]
        assert shaper.arrive(Request("chat", 500), 11.1) == []
        at = shaper.wake_at()
        assert at == pytest.approx(11.0 + before_s - INSTANT_S)
        assert sent_ids(shaper.wake(at)) == ["chat"]
        at = shaper.wake_at()
        assert at < 11.0 + before_s  # the chat's own text takes a millisecond
        assert sent_ids(shaper.wake(at)) == ["hit1"]
        at = shaper.wake_at()
        assert at == pytest.approx(11.0 + 2 * before_s - INSTANT_S, abs=0.01)
        assert sent_ids(shaper.wake(at)) == ["hit2"]

    def test_a_request_that_waits_for_a_text_goes_on_beside_a_late_prefill(self) -> None:
        """The backlog of a late prefill ends only with its answer; hits of one step pass it."""
        shaper = fleet("a")
        backend = shaper.backends["a"]
        backend.send(Request("late", 60_000), "document", 59_900, 0.0)
        backend.send(Request("long", LONG), "document", LONG - 100, 5.0)
        assert shaper.arrive(Request("chat", 500), 5.0) == []
        at = shaper.wake_at()
        assert at == pytest.approx(backend.api_server.free_at - INSTANT_S)
        assert sent_ids(shaper.wake(at)) == ["chat"]

    def test_the_timer_finds_the_server_free_however_old_the_clock_is(self) -> None:
        for year in range(40):
            start = 3.1557e7 * year
            shaper = fleet("a")
            shaper.backends["a"].send(Request("long", LONG), "document", LONG - 1, start)
            assert shaper.arrive(Request("chat", 500), start) == []
            assert sent_ids(shaper.wake(shaper.wake_at())) == ["chat"]

    def test_an_early_answer_lets_the_next_text_go(self) -> None:
        for streams in (True, False):
            shaper = fleet("a")
            request = Request("long", LONG, streams=streams)
            assert sent_ids(shaper.arrive(request, 0.0)) == ["long"]
            assert shaper.arrive(Request("next", 6_000), 0.0) == []
            if streams:
                assert sent_ids(shaper.first_token("long", 0.1)) == ["next"]
            else:
                shaper.used("long", 1, 0.1)
                assert sent_ids(shaper.finish("long", 0.1)) == ["next"]

    def test_a_failed_backend_tokenizes_no_more(self) -> None:
        shaper = fleet("a")
        backend = shaper.backends["a"]
        assert sent_ids(shaper.arrive(Request("long", LONG), 0.0)) == ["long"]
        shaper.backend_down("a", 0.01)
        shaper.backend_up("a", 0.02)
        assert backend.api_server.wait_s(0.02) == 0.0
        backend.send(Request("other", LONG), "document", LONG - 1, 0.02)
        wait_s = backend.api_server.wait_s(0.03)
        backend.first_token("long", 0.03)  # of before: it says nothing about the new texts
        assert backend.api_server.wait_s(0.03) == wait_s > 0.2
        shaper = fleet("a", "b")
        (send,) = shaper.arrive(Request("long", LONG), 0.0)
        assert isinstance(send, Send)
        shaper.retry("long", 0.01, refused=True)
        assert shaper.backends[send.backend].api_server.wait_s(0.01) < 1e-9

    def test_a_request_that_leaves_a_chunking_engine_does_not_hurry_a_text(self) -> None:
        backend = Backend(BackendSpec("a", 8, chunk_tokens=2_048), [CHAT, DOCUMENT])
        sent = backend.send(Request("long", LONG), "document", 0, 0.0)
        backend.send(Request("chat", 500), "chat", 0, 0.01)
        backend.finished("chat", 0.02)
        expected_s = sent.reached_at - 0.02 + sent.prefill_s
        assert backend.prefill_queue.backlog_s(0.02) == pytest.approx(expected_s)


class TestSlowServer:
    """With an API server that is slow, and known to be."""

    def slow(self, *names: str) -> Shaper:
        shaper = fleet(*names)
        for backend in shaper.backends.values():
            backend.api_server.model.token_s *= 10.0
        return shaper

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_document_is_admitted_all_the_same(self, busy: bool) -> None:
        """Its own time in the server is 4.6 s, and no other request is in its way."""
        shaper = self.slow("a")
        if busy:
            assert sent_ids(shaper.arrive(Request("chat", 500), 0.0)) == ["chat"]
        (send,) = shaper.arrive(Request("document", LONG), 0.1)
        assert isinstance(send, Send)
        assert send.predicted_ttft_s > 10.0 * PRIOR_SERVER_S_PER_TOKEN * LONG

    def test_a_document_that_has_to_wait_is_admitted_all_the_same(self) -> None:
        fast, slow = fleet("a"), self.slow("a")
        without_api_server(fast)
        for shaper in (fast, slow):
            assert sent_ids(shaper.arrive(Request("first", LONG), 0.0)) == ["first"]
            assert shaper.arrive(Request("second", LONG), 0.0) == []
            assert [waiting.request.id for waiting in shaper.waiting()] == ["second"]

    def test_nobody_is_ejected_while_it_is_learned(self) -> None:
        scene = Scene(10.0)
        health = Health(["a", "b"])
        for name in ("a", "b"):
            health.probe_passed(name, 0.0)
        for number in range(20):
            request = Request(f"r{number}", LONG)
            predicted_s = scene.backend.wait_s(0.0, LONG, scene.now) + ENGINE_S
            scene.backend.send(request, "document", LONG - 1, scene.now)
            health.sent("a", request.id, predicted_s, scene.now)
            health.sent("b", request.id, 1.0, scene.now)
            scene.now += scene.token_s * LONG + ENGINE_S
            scene.backend.first_token(request.id, scene.now)
            scene.backend.finished(request.id, scene.now)
            for name in ("a", "b"):
                health.answered(name, request.id, scene.now)
            health.look_for_gray(scene.now)
            assert health.state("a") == "up"
