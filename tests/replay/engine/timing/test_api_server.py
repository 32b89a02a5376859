"""The API server's times: what waits for what in front of and behind the engine."""

import asyncio
import json

import pytest
from stages.engine_stage import Client, on_server

from forebay.replay.engine.server.server import RunningEngine
from forebay.replay.engine.timing.api_server import ApiProcess, ApiServer, ServerTimes

TIMES = ServerTimes(
    request_s=0.0025, receive_token_s=1e-6, tokenize_token_s=3e-6,
    answer_s=0.002, answer_token_s=1e-6, stream_token_s=100e-6,
)  # fmt: skip
LONG = 100_000  # 0.1 s to read, 0.3 s to tokenize


def a_process(workers: int = 1) -> ApiProcess:
    return ApiProcess(TIMES, workers)


class TestIn:
    def test_time_grows_with_the_text(self) -> None:
        assert a_process().receive(0, 5.0) == pytest.approx(5.0025)
        assert a_process().receive(LONG, 5.0) == pytest.approx(5.4025)

    def test_token_ids_are_only_read(self) -> None:
        process = a_process()
        assert process.receive(LONG, 5.0, text=False) == pytest.approx(5.1025)
        assert process.receive(0, 5.2) == pytest.approx(5.2025)

    @pytest.mark.parametrize(
        ("workers", "chat_at"),
        [
            (1, 4 * 0.3 + 0.101),  # behind all four texts, the first of which was read first
            (2, 2 * 0.3 + 0.101),
            (5, 4 * 0.101),  # behind their reading only
        ],
    )
    def test_a_chat_waits_for_the_texts_before_it(self, workers: int, chat_at: float) -> None:
        process = a_process(workers)
        for _ in range(4):
            process.receive(LONG, 0.0)
        assert process.receive(0, 0.0) == pytest.approx(chat_at, abs=0.008)

    def test_processes_take_requests_in_turn(self) -> None:
        server = ApiServer(TIMES, processes=2)
        first, second, third = (server.next_process() for _ in range(3))
        assert first is third
        assert first is not second
        first.receive(LONG, 0.0)
        assert second.receive(0, 0.0) == pytest.approx(0.0025)


class TestOut:
    def test_the_first_token_waits_until_the_prompt_is_decoded(self) -> None:
        process = a_process()
        assert process.answer(LONG, 3.0) == pytest.approx(3.102)
        assert process.sent_at(3.0) == pytest.approx(3.102)  # later tokens of that step wait for it
        assert process.sent_at(3.05) == pytest.approx(3.102)  # and those of the next
        assert process.sent_at(3.2) == pytest.approx(3.202)

    def test_a_reading_loop_sends_nothing(self) -> None:
        process = a_process()
        process.receive(LONG, 1.0)
        assert process.sent_at(1.001) == pytest.approx(1.103, abs=0.002)

    def test_streams_that_are_too_many_fall_behind_and_catch_up(self) -> None:
        process = a_process()
        process.load(20_000.0, 1_000, 0.0)  # two seconds of work in a second, as single tokens
        assert process.sent_at(0.1) == pytest.approx(0.202)
        # A round of 0.25 s: 1,000 chunks of 62.5 us, 37.5 us for each token that came meanwhile.
        assert process.sent_at(1.0) == pytest.approx(1.252)
        process.load(5_000.0, 1_000, 1.0)  # half a second of work
        assert process.sent_at(1.1) == pytest.approx(1.302)
        assert process.sent_at(4.0) == pytest.approx(4.002)

    def test_a_loop_behind_a_long_prompt_catches_up_to_one_round(self) -> None:
        process = a_process()
        process.load(20_000.0, 1_000, 0.0)
        process.answer(LONG * 10, 0.0)  # one second
        assert process.sent_at(1.0) == pytest.approx(1.0 + 0.75 + 0.002)
        assert process.sent_at(4.0) == pytest.approx(4.252)

    def test_more_tokens_than_the_loop_can_take_apart_leave_it_behind(self) -> None:
        process = a_process()
        process.load(60_000.0, 1_000, 0.0)
        assert process.sent_at(1.0) == pytest.approx(6.002)

    def test_streams_are_divided_among_the_processes(self) -> None:
        server = ApiServer(TIMES, processes=2)
        server.load(20_000.0, 1_000, 0.0)
        assert server.next_process().sent_at(1.0) == pytest.approx(1.002)


async def first_token_s(client: Client, engine: RunningEngine, prompt: object) -> float:
    """Simulated seconds until the first token of a stream."""
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True,
            "model": "tiny"}  # fmt: skip
    start_s = engine.loop.now()
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                json.loads(line[6:])
                return engine.loop.now() - start_s
    raise AssertionError("no token came")


async def test_the_live_server_makes_a_chat_wait_for_texts_but_not_for_token_ids() -> None:
    """The texts are in the prefix cache, so that the engine has little to do."""

    async with on_server(max_model_len=131_072) as (engine, client):
        text, ids = "word" * 60_000, [7] * 60_000
        waits = []
        for prompt in (text, ids):
            await first_token_s(client, engine, prompt)
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(first_token_s(client, engine, prompt))
                await asyncio.sleep(0.05)
                waits.append(await first_token_s(client, engine, "chat"))
        behind_texts_s, behind_ids_s = waits
    times = ServerTimes()
    assert behind_texts_s > 4 * 60_000 * times.tokenize_token_s
    assert behind_ids_s < 0.7 * behind_texts_s  # reading and decoding the prompts remains
