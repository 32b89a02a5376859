"""The engine core and the tokenizer: pure, no sockets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.tokenizer import (
    WORDS,
    Generation,
    OutputBlocks,
    decode_ids,
    encode_chat,
    encode_ids,
    encode_text,
    hashes_of_ids,
)
from forebay.traces.ground.errors import InputError

MESSAGE_TOKENS = 2  # of a chat message besides its text; a conversation has as many once more


def core(**options: object) -> EngineCore:
    return EngineCore(EngineConfig(**options))  # type: ignore[arg-type]


class TestCore:
    def test_tokens_come_one_a_step_and_the_request_leaves(self) -> None:
        engine = core()
        one = EngineRequest("r", 1_000, 3)
        engine.add(one)
        results = [engine.step(0.0) for _ in range(3)]
        assert [len(result.outputs) for result in results] == [1, 1, 1]
        assert [result.finished for result in results] == [[], [], [one]]
        assert results[0].duration_s > results[1].duration_s > 0
        assert not engine.has_work
        assert engine.kv_usage == 0
        assert (engine.prompt_tokens, engine.generation_tokens) == (1_000, 3)

    def test_arrivals_during_a_step_wait_for_the_next(self) -> None:
        engine = core()
        engine.add(EngineRequest("a", 10, 5))
        engine.start_step(0.0)
        late = EngineRequest("b", 10, 5)
        engine.add(late)
        assert [one.id for one in engine.finish_step().outputs] == ["a"]
        assert [one.id for one in engine.step(0.0).outputs] == ["a", "b"]

    def test_an_abort_during_a_step_takes_its_token_away(self) -> None:
        engine = core()
        engine.add(EngineRequest("a", 10, 5))
        engine.add(EngineRequest("b", 10, 5))
        engine.start_step(0.0)
        assert engine.abort("a")
        assert not engine.abort("a")
        result = engine.finish_step()
        assert [one.id for one in result.outputs] == ["b"]
        assert [one.id for one in result.aborted] == ["a"]
        assert engine.running == 1

    def test_abort_of_the_last_request_during_a_step(self) -> None:
        engine = core()
        engine.add(EngineRequest("a", 10, 5))
        engine.start_step(0.0)
        engine.abort("a")
        assert not engine.has_work
        assert engine.finish_step().outputs == []
        assert engine.kv_usage == 0

    def test_output_stops_at_the_end_of_the_context(self) -> None:
        engine = core(max_model_len=64)
        one = EngineRequest("r", 60, 1_000, finish_reason="stop")
        engine.add(one)
        while engine.has_work:
            engine.step(0.0)
        assert (one.output_tokens, one.finish_reason) == (4, "length")

    @pytest.mark.parametrize(("prompt", "output"), [(0, 1), (64, 1), (10, 0)])
    def test_what_can_never_run_is_refused(self, prompt: int, output: int) -> None:
        with pytest.raises(ValueError, match="<Request r "):
            core(max_model_len=64).add(EngineRequest("r", prompt, output))

    def test_preemption_by_priority_can_leave_a_step_empty(self) -> None:
        engine = core(
            max_model_len=400,
            num_gpu_blocks_override=30,
            max_num_seqs=16,
            scheduling_policy="priority",
        )
        for index in range(12):
            priority = index * 7 % 5
            engine.add(EngineRequest(f"{index}", 100 + index, 60, priority=priority))
        while engine.has_work:
            assert engine.step(0.0).duration_s > 0
        assert engine.preemptions > 0
        assert engine.generation_tokens == 12 * 60


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"gpu": "abacus"}, "--gpu abacus: no such GPU"),
            ({"time_scale": 0.0}, "--time-scale 0.0"),
            ({"time_scale": float("nan")}, "--time-scale nan"),
            ({"max_num_seqs": 0}, "--max-num-seqs 0"),
            ({"max_model_len": 200_000}, "200000: llama-3-8b has a context of 131072"),
            ({"block_size": 5}, "--block-size 5"),
            ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5"),
            ({"gpu_memory_utilization": 0.1}, "the KV cache holds 0 tokens"),
            ({"num_gpu_blocks_override": 100}, "the KV cache holds 1584 tokens"),
            ({"watermark": 1.0}, "--watermark 1.0: give a share"),
            ({"watermark": float("nan")}, "--watermark nan"),
            ({"max_num_active_seqs": 0}, "--max-num-active-seqs 0"),
            ({"max_num_active_seqs": 2_000}, "2000 is more than --max-num-seqs 1024"),
            ({"prefill_schedule_interval": 0}, "--prefill-schedule-interval 0: give a whole"),
            ({"scheduling_policy": "lifo"}, "--scheduling-policy lifo: give fcfs or priority"),
            (
                {"max_num_batched_tokens": 99, "max_num_seqs": 100},
                "99 is less than --max-num-seqs 100",
            ),
            (
                {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
                "is less than --max-model-len 131072",
            ),
        ],
    )
    def test_a_value_that_cannot_work_is_one_clear_line(
        self, options: dict[str, object], says: str
    ) -> None:
        with pytest.raises(InputError, match=says) as caught:
            core(**options)
        assert "\n" not in str(caught.value)

    def test_without_chunks_the_budget_is_a_whole_context(self) -> None:
        assert EngineConfig(enable_chunked_prefill=False).batched_tokens == 131_072


class TestTokenizer:
    @pytest.mark.parametrize(
        ("text", "tokens"), [("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 4, 2), (" abc" * 512, 512)]
    )
    def test_four_bytes_a_token(self, text: str, tokens: int) -> None:
        assert encode_text(text).tokens == tokens

    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    def test_text_survives_token_ids(self, text: str) -> None:
        prompt = encode_text(text)
        assert decode_ids(prompt.token_ids()) == text
        assert encode_ids(prompt.token_ids()) == prompt

    @given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "x"]), st.text(max_size=50))))
    def test_a_message_costs_a_constant(self, messages: list[tuple[str, str]]) -> None:
        body = sum(
            encode_text(text.encode(errors="replace").decode()).tokens for _, text in messages
        )
        clean = [(role, text.encode(errors="replace").decode()) for role, text in messages]
        assert encode_chat(clean).tokens == body + MESSAGE_TOKENS * (len(messages) + 1)

    def test_equal_prefixes_and_nothing_else_share_hashes(self) -> None:
        one = encode_text("x" * 1_000).block_hashes()
        two = encode_text("x" * 640 + "y" * 360).block_hashes()
        assert len(one) == 15
        assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 10 + [False] * 5
        assert len(set(one)) == 15  # equal blocks at different places differ

    @pytest.mark.parametrize("question", ["Hi", "What is a forebay?", "x" * 200])
    @pytest.mark.parametrize("salt", [None, "tenant"])
    def test_an_answer_that_is_sent_back_hits_the_blocks_it_filled(
        self, question: str, salt: str | None
    ) -> None:
        prompt = encode_chat([("user", question)])
        generation = Generation(prompt)
        answer = generation.words(0, 100).decode()
        follow_up = encode_chat([("user", question), ("assistant", answer), ("user", "And?")])
        extend = OutputBlocks(prompt, generation, 16, salt)
        request = EngineRequest(
            "r", prompt.tokens, 100, prompt.block_hashes(16, salt), extend=extend
        )
        full = (prompt.tokens + 100) // 16
        hashes = [request.hash_at(index) for index in range(full)]
        assert hashes == follow_up.block_hashes(16, salt)[:full]

    def test_words_are_one_token_each(self) -> None:
        assert len(set(WORDS)) == 256
        assert all(len(word) == 4 and word.isascii() for word in WORDS)

    def test_answers_repeat_for_a_prompt_and_differ_between_prompts(self) -> None:
        one, two = encode_text("one"), encode_text("two")
        assert Generation(one).words(0, 50) == Generation(one).words(0, 50)
        assert Generation(one).words(0, 50) != Generation(two).words(0, 50)
        assert Generation(one).words(0, 50) != Generation(one, seed=1).words(0, 50)

    @given(st.text(), st.integers(1, 5_000), st.integers(0, 100))
    def test_length_stays_within_its_bounds(self, text: str, most: int, least: int) -> None:
        length = Generation(encode_text(text.encode(errors="replace").decode())).length(most, least)
        assert min(most, max(1, least)) <= length <= min(most, 1_086)

    def test_hashes_from_block_ids_follow_the_ids(self) -> None:
        one = hashes_of_ids([1, 2, 3], 512, 1_200)
        two = hashes_of_ids([1, 2, 4], 512, 1_536)
        assert (len(one), len(two)) == (75, 96)
        assert one[:64] == two[:64]
        assert one[64] != two[64]

    def test_a_block_that_is_larger_than_the_trace_s_needs_all_of_its_ids(self) -> None:
        """Blocks of a hybrid have 1,056 tokens: two whole blocks of 512 and a part of a third."""
        one = hashes_of_ids([1, 2, 3, 4, 5], 512, 2_560, 1_056)
        two = hashes_of_ids([1, 2, 3, 9, 5], 512, 2_560, 1_056)
        three = hashes_of_ids([1, 2, 9, 4, 5], 512, 2_560, 1_056)
        assert len(one) == len(two) == 2
        assert one[0] == two[0] != three[0]
        assert one[1] != two[1]
