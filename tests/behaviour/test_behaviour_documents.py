"""Shared documents: each stays on one engine, and a hot one gets a second copy."""

import asyncio
import json
from contextlib import AsyncExitStack
from math import inf
from typing import Any

import pytest
from core_requests import all_up, sent_ids, sent_to
from stages.behaviour_scenes import HOT, Fifty, fifty, hot_alone, hot_beside_cold, spread, uniform
from stages.proxy_stage import Stage, stage

from forebay.proxy.core.model import BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine


class TestAffinity:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("gap_s", [0.25, 1.0])
    def test_each_document_stays_and_engines_share_them(self, seed: int, gap_s: float) -> None:
        found = spread(uniform(seed, gap_s))
        assert found.cold >= 0.95
        assert found.extra <= 1
        assert 0.38 < found.backends < 0.62  # 16 documents fall on two engines by their load

    def test_a_hot_document_runs_on_both_after_one_more_prefill(self) -> None:
        found = spread(hot_alone())
        assert 0.45 <= found.hot <= 0.55
        assert found.whole[HOT] == 2

    @pytest.mark.parametrize("seed", range(4))
    def test_only_the_hot_document_does(self, seed: int) -> None:
        """The hot one is in use once on each engine, so the cold ones decide most of its ties."""
        found = spread(hot_beside_cold(seed))
        assert found.cold >= 0.95
        assert 0.35 <= found.hot <= 0.65
        assert found.whole[HOT] == 2
        assert found.extra <= 1


class TestWhoIsSent:
    """The rules behind it, one by one: documents of 20,000 tokens, 0.72 s by the first estimate."""

    @staticmethod
    def question(number: int, document: int) -> Request:
        blocks = tuple(range(1_000 * document, 1_000 * document + 39))
        return Request(str(number), 20_000, 50, blocks, 512.0)

    @staticmethod
    def shaper(names: str, chunk_tokens: float = inf) -> Shaper:
        buckets = [Bucket("document", 131_072, prefills_per_backend=1)]
        specs = [BackendSpec(name, 64, chunk_tokens=chunk_tokens) for name in names]
        return all_up(Shaper(specs, buckets))

    def test_a_question_while_its_document_is_computed(self) -> None:
        """The engine begins prefills in order: it has the document when it begins the follower."""
        shaper = self.shaper("a")
        shaper.arrive(self.question(0, 1), 0.0)
        (send,) = shaper.arrive(self.question(1, 1), 0.1)  # 0.62 s are left
        assert isinstance(send, Send)
        assert send.request.id == "1"
        assert shaper.arrive(self.question(2, 2), 0.1) == []  # another document waits

    def test_nobody_who_would_pass_the_prefill_of_his_document(self) -> None:
        shaper = self.shaper("a", chunk_tokens=2_048)
        shaper.arrive(self.question(0, 1), 0.0)
        assert shaper.arrive(self.question(1, 1), 0.6) == []  # 0.12 s are left
        assert sent_ids(shaper.first_token("0", 0.7)) == ["1"]

    def test_a_hit_beside_the_one_prefill_that_a_bucket_may_have(self) -> None:
        shaper = self.shaper("a")
        shaper.arrive(self.question(0, 1), 0.0)
        shaper.first_token("0", 0.7)
        shaper.finish("0", 0.8)
        shaper.arrive(self.question(1, 2), 1.0)
        assert shaper.arrive(self.question(2, 3), 1.6) == []  # another cold one
        shaper.cancel("2", 1.6)
        (send,) = shaper.arrive(self.question(3, 1), 1.6)
        assert isinstance(send, Send)

    @pytest.mark.parametrize(("others", "copies"), [(0, 0), (1, 1)])
    def test_a_copy_for_one_request_only_where_that_is_much_sooner(
        self, others: int, copies: int
    ) -> None:
        """Its document is where a prefill takes 1.1 s; a copy on the other engine takes 0.7 s."""
        shaper = self.shaper("ab")
        for number, name in enumerate("ab"):
            assert sent_to(shaper.arrive(self.question(number, number), 10.0 * number)) == [name]
            shaper.first_token(str(number), 10.0 * number + 0.72)
            shaper.finish(str(number), 10.0 * number + 0.8)
        request = Request("long", 30_000, 50, tuple(range(9_000, 9_059)), 512.0)
        (send,) = shaper.arrive(request, 30.0)
        assert isinstance(send, Send)
        document = "ab".index(send.backend)
        for number in range(others):
            assert shaper.arrive(self.question(10 + number, document), 30.0) == []
        sent = shaper.arrive(self.question(20, document), 30.0)
        assert [s.backend for s in sent if isinstance(s, Send)] == ["ba"[document]] * copies

    def test_something_to_an_engine_that_has_not_been_measured(self) -> None:
        shaper = self.shaper("ab")
        for number in range(2):
            (send,) = shaper.arrive(self.question(number, number), 10.0 * number)
            assert isinstance(send, Send)
            assert send.backend == "ab"[number]
            shaper.first_token(send.request.id, 10.0 * number + 0.2)  # fast
            shaper.finish(send.request.id, 10.0 * number + 0.3)

    @pytest.mark.parametrize(("document_s", "then"), [(0.3, "abb"), (1.4, "bbb")])
    def test_a_document_to_an_engine_of_which_only_slow_chats_are_known(
        self, document_s: float, then: str
    ) -> None:
        """Times of chats teach little about documents; two documents on an engine teach a lot.

        One is enough where the engine then seems more than twice as slow as the other. After two
        it still seems 0.33 s where the other takes 0.23, so it gets no third while that one is
        idle: the time in the API server, 0.08 s of each, is no longer part of both.
        """
        shaper = self.shaper("ab")
        took_s = {"a": document_s, "b": 0.3}
        for number, backend in enumerate("abab" + then):
            request = Request(str(number), 20_000 if number else 100, 50)
            assert sent_to(shaper.arrive(request, 10.0 * number)) == [backend]
            answered_at = 10.0 * number + (took_s[backend] if number else 0.05)
            shaper.first_token(request.id, answered_at)
            shaper.finish(request.id, answered_at)


class TestFiftyUsersOfOneDocument:
    """60,000 tokens, 2.6 s of prefill, cached nowhere. A hit is one of fifty at
    once who find it cached."""

    @staticmethod
    def hold(cold: Fifty, hit: Fifty) -> None:
        assert cold.refused == 0
        assert cold.whole <= 2  # the second so that both engines have it
        assert len(cold.others_s) >= 48
        for share in (0.5, 0.9, 1.0):
            at = int(share * (len(cold.others_s) - 1))
            assert cold.others_s[at] <= 3 * hit.others_s[min(at, len(hit.others_s) - 1)], share

    @staticmethod
    def alone_s(config: EngineConfig, tokens: int) -> float:
        """Seconds that a hit takes alone, without its engine step."""
        constants = config.step_constants()
        admit_s = constants.admit_s + constants.admit_token_s * tokens
        return config.step_constants().server_times().alone_s(tokens) + admit_s

    @pytest.mark.parametrize("system", [0, 4_096])
    def test_questions_at_once(self, system: int) -> None:
        self.hold(fifty(0.0, system), fifty(0.0, system, cached=True))

    @pytest.mark.parametrize("system", [0, 4_096])
    @pytest.mark.parametrize("seed", range(2))
    def test_questions_within_five_seconds(self, system: int, seed: int) -> None:
        self.hold(fifty(5.0, system, seed=seed), fifty(0.0, system, cached=True))

    @pytest.mark.parametrize("system", [0, 4_096])
    async def test_over_sockets(self, system: int) -> None:
        """The proxy itself in front of two simulated servers."""
        words = "the reservoir feeds the turbines evenly while the river rises and falls " * 4_200
        prompt = "You answer from the document. " * (system // 7) + words
        firsts: list[float] = []
        usages: list[dict[str, Any]] = []

        async def ask(on: Stage, number: int) -> None:
            body = {
                "prompt": f"{prompt} Question {number}: what does it say about {number * 7919}?",
                "max_tokens": 20,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            start = asyncio.get_running_loop().time()
            async with on.post(body) as response:
                assert response.status == 200
                seen = False
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if event["choices"] and not seen:
                        seen = True
                        firsts.append(asyncio.get_running_loop().time() - start)
                    if event.get("usage"):
                        usages.append(event["usage"])

        engine = EngineConfig()

        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(start_engine(engine)) for _ in range(2)]
            on = await stack.enter_async_context(stage([e.url for e in engines]))
            await asyncio.gather(*(ask(on, number) for number in range(50)))
        assert len(firsts) == len(usages) == 50
        whole = [
            u
            for u in usages
            if 2 * u["prompt_tokens_details"]["cached_tokens"] < u["prompt_tokens"]
        ]
        assert usages[0]["prompt_tokens"] > 50_000
        assert len(whole) <= 2
        first, *others = sorted(firsts)
        # The hits of an engine come one after the other: 0.3 s each, most of it in its API server.
        assert others[46] - first < 24 * 1.05 * self.alone_s(engine, usages[0]["prompt_tokens"])
