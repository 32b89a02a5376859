"""The bytes of a prompt, and the work and memory that one request may take."""

import asyncio
import json
import tracemalloc
from typing import Any

import orjson
import pytest
from body_reading import read_body

from forebay.proxy.api import json_body
from forebay.proxy.api import media_tokens as media
from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Dialect
from forebay.proxy.api.json_body import parse_any
from forebay.proxy.api.prompt_text import MOST_ITEMS
from forebay.proxy.http1.errors import ApiError

BLOCK_BYTES = 64
RECORDED = ["21aaf4d6cc6f26dc", "902a97e1957a81f3", "8cc3fafc2cdff0a7"]


def understood(body: bytes, chat: bool = True) -> ParsedBody:
    fields = asyncio.run(parse_any(body))
    return read_body(fields, CHAT if chat else COMPLETIONS, body=body, block_bytes=BLOCK_BYTES)


def refused(body: bytes, chat: bool = True) -> ApiError:
    with pytest.raises(ApiError) as error:
        understood(body, chat)
    assert error.value.status == 400
    return error.value


def many(item: bytes, size: int = 1 << 20) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


class TestBytes:
    """Recorded: another byte would part every prompt from what the caches hold of it."""

    def test_of_a_chat(self) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        fields = chat(
            {"role": "system", "content": "Be brief. é"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}, "c"]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "refusal", "refusal": "no"}]},
            tools=[{"type": "function"}],
        )
        assert CHAT.prompt_text(fields).data == (
            b'[{"type":"function"}]\0system\0Be brief. \xc3\xa9\0user\0ab"c"\0assistant\0'
            + orjson.dumps([call])
            + b'\0tool\0{"type":"refusal","refusal":"no"}'
        )

    def test_of_a_chain(self) -> None:
        fields = chat({"role": "user", "content": "word " * 40}, {"role": "assistant"})
        blocks = understood(orjson.dumps(fields)).request.blocks
        assert [f"{block:016x}" for block in blocks] == RECORDED


class TestTooMuch:
    @pytest.mark.parametrize("part", [b"1", b"null", b"true", b"[]", b"1.5"])
    def test_parts_are_strings_or_objects(self, part: bytes) -> None:
        error = refused(b'{"messages":[{"role":"user","content":["a",' + part + b"]}]}")
        assert (error.code, error.param) == ("invalid_type", "messages")

    @pytest.mark.parametrize(
        ("body", "is_chat", "param"),
        [
            (b'{"messages":[{"role":"user","content":' + many(b"1") + b"}]}", True, "messages"),
            (b'{"messages":[{"content":' + many(b'"a"', 300_000) + b"}]}", True, "messages"),
            (b'{"messages":[{"tool_calls":' + many(b"1") + b"}]}", True, "messages"),
            (b'{"messages":' + many(b"null") + b"}", True, "messages"),
            (b'{"messages":' + many(b'{"content":["a"]}', 300_000) + b"}", True, "messages"),
            (b'{"prompt":' + many(b'"a"', 300_000) + b"}", False, "prompt"),
            (b'{"prompt":' + many(b"[1]", 300_000) + b"}", False, "prompt"),
            (b'{"messages":' + many(b"{}") + b"}", True, None),
            (b'{"prompt":' + many(b"[]") + b"}", False, None),
            (b'{"messages":' + many(b"{}", 16 << 20) + b"}", True, None),
            (b'{"prompt":' + many(b"1", 16 << 20) + b"}", False, None),
            (b'{"prompt":' + many(b'"a"', 4 << 20) + b"}", False, None),
            (b'{"prompt":"x","metadata":{' + b'"k":"v",' * 200_000 + b'"k":1}}', False, None),
        ],
        ids=lambda value: value[:40].decode() if isinstance(value, bytes) else "",
    )
    def test_items_are_counted_before_they_are_read(
        self, body: bytes, is_chat: bool, param: str | None
    ) -> None:
        error = refused(body, is_chat)
        assert (error.code, error.param) == ("too_many_items", param)
        assert "more than" in error.message

    def test_a_dense_body_is_refused_before_it_is_parsed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(data: bytes) -> Any:
            raise AssertionError(f"parsed {len(data)} bytes")

        monkeypatch.setattr(orjson, "loads", never)
        for body in (many(b"{}"), many(b"[]"), many(b"1", 16 << 20), b"[" * (16 << 20)):
            assert refused(b'{"prompt":' + body + b"}").code == "too_many_items"

    def test_short_items_take_little_memory(self) -> None:
        messages = [{"tool_calls": [1], "content": [{"a": 1}]}] * (MOST_ITEMS // 3)
        tracemalloc.start()
        try:
            assert len(CHAT.prompt_text({"messages": messages}).data) == len(messages) * 12
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 40 * len(messages)


class TestEnough:
    """Legitimate requests of unusual size."""

    def test_token_ids(self) -> None:
        ids = list(range(131_072))
        asked = understood(json.dumps({"prompt": ids}).encode(), chat=False)
        assert asked.request.prompt_tokens == 131_072
        asked = understood(json.dumps({"prompt": [ids, ids]}).encode(), chat=False)
        assert asked.request.prompt_tokens == 2 * 131_072

    def test_a_body_full_of_token_ids(self) -> None:
        asked = understood(b'{"prompt":' + many(b"12345", (16 << 20) - 20) + b"}", chat=False)
        assert asked.request.prompt_tokens > 2_700_000

    def test_sixteen_parts(self) -> None:
        parts = [{"type": "text", "text": "x" * 1000}] * 16
        asked = understood(orjson.dumps(chat({"role": "user", "content": parts})))
        assert asked.prompt_bytes == 16_000 + len("\0user\0")

    def test_as_many_messages_as_are_allowed(self) -> None:
        message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        fields = chat(*[message] * (MOST_ITEMS // 2))
        assert understood(orjson.dumps(fields)).prompt_bytes == MOST_ITEMS // 2 * 7
        fields["messages"].append(message)
        assert refused(orjson.dumps(fields)).code == "too_many_items"

    @pytest.mark.parametrize("size", [900_000, 3_000_000])
    def test_brackets_and_quotes_in_a_text_do_not_count(self, size: int) -> None:
        text = '[{"a":[1,2]},' * (size // 13)
        assert text.count("[") > json_body.MOST_CONTAINERS
        body = orjson.dumps(chat({"role": "user", "content": text}))
        assert understood(body).prompt_bytes == len(text) + len("\0user\0")


class TestMedia:
    PICTURE = "data:image/png;base64," + "iVBORw0K" * 75_000
    HOLDERS = (
        ({"type": "image_url", "image_url": {"url": PICTURE}}, media.IMAGE_TOKENS),
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, media.IMAGE_TOKENS),
        ({"image_url": {"url": PICTURE}}, media.IMAGE_TOKENS),
        ({"type": "input_audio", "input_audio": {"data": PICTURE}}, media.SOUND_TOKENS),
        ({"type": "video_url", "video_url": {"url": PICTURE}}, media.VIDEO_TOKENS),
        ({"type": "file", "file": {"file_data": PICTURE}}, media.IMAGE_TOKENS),
    )

    @pytest.mark.parametrize(("part", "tokens"), HOLDERS, ids=lambda v: str(v)[:30])
    def test_are_a_few_tokens_and_teach_nothing(self, part: dict[str, Any], tokens: int) -> None:
        text = {"type": "text", "text": "What is this? " * 100}
        plain = understood(orjson.dumps(chat({"role": "user", "content": [text]})))
        asked = understood(orjson.dumps(chat({"role": "user", "content": [text, part]})))
        more = asked.request.prompt_tokens - plain.request.prompt_tokens
        assert tokens <= more <= tokens + 16  # the digest's own bytes
        assert (asked.prompt_bytes, asked.token_ids) == (0, False)
        assert plain.prompt_bytes > 1400

    def test_of_another_picture_the_chain_parts(self) -> None:
        def blocks(picture: str) -> tuple[int, ...]:
            part = {"type": "image_url", "image_url": {"url": picture}}
            parts = [{"type": "text", "text": "x" * 1000}, part, {"text": "y" * 1000}]
            return understood(orjson.dumps(chat({"role": "user", "content": parts}))).request.blocks

        one, other = blocks(self.PICTURE), blocks(self.PICTURE + "AA==")
        assert one == blocks(self.PICTURE)
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert same == [True] * (1006 // BLOCK_BYTES) + [False] * (len(one) - 1006 // BLOCK_BYTES)

    BASE64 = "iVBORw0K" * 350_000  # 2.8 MB
    ITEMS = (  # of /v1/responses, with the tokens of what is not text in them
        ({"type": "function_call_output", "call_id": "1",
          "output": [{"type": "input_image", "image_url": "data:image/png;base64," + BASE64}]}, 1),
        ({"type": "custom_tool_call_output", "call_id": "1",
          "output": [{"type": "input_file", "file_data": BASE64}]}, 1),
        ({"type": "computer_call_output", "call_id": "1",
          "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64," + BASE64}
          }, 1),
        ({"type": "image_generation_call", "id": "1", "result": BASE64}, 1),
        ({"type": "code_interpreter_call", "code": "x", "outputs": [
            {"type": "image", "url": "data:image/png;base64," + BASE64}]}, 1),
        ({"type": "reasoning", "summary": [], "encrypted_content": BASE64}, 0),
        ({"type": "compaction", "encrypted_content": BASE64}, 0),
        ({"type": "new", "of": {"some": [BASE64]}}, 1),
    )  # fmt: skip
    BLOCKS = (  # of /v1/messages
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
         1),
        ({"type": "document", "source": {"type": "base64", "data": BASE64}}, 1),
        ({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": BASE64}}]}, 1),
        ({"type": "redacted_thinking", "data": BASE64}, 0),
        ({"type": "thinking", "thinking": "so", "signature": BASE64}, 0),
        ({"type": "web_search_tool_result", "content": [
            {"type": "web_search_result", "encrypted_content": BASE64}]}, 0),
    )  # fmt: skip
    PARTS = (  # of /v1/chat/completions
        ({"type": "file", "file": {"file_data": BASE64}}, 1),
        ({"type": "image_embeds", "image_embeds": BASE64}, 1),
        ({"type": "new", "data": {"b64": BASE64}}, 1),
    )

    @pytest.mark.parametrize("in_pieces", [False, True])
    @pytest.mark.parametrize(
        ("dialect", "item", "media_count"),
        [*((RESPONSES, *one) for one in ITEMS), *((MESSAGES, *one) for one in BLOCKS),
         *((CHAT, *one) for one in PARTS)],
        ids=lambda v: str(v)[:40],
    )  # fmt: skip
    def test_base64_is_no_text_in_any_api(
        self, dialect: Dialect, item: dict[str, Any], media_count: int, in_pieces: bool
    ) -> None:
        message = item if dialect is RESPONSES else {"role": "user", "content": [item]}
        body = orjson.dumps({dialect.prompt_field: [{"role": "user", "content": "hi"}, message]})
        fields = asyncio.run(parse_any(body, in_pieces=in_pieces))
        asked = read_body(fields, dialect, body=body, block_bytes=BLOCK_BYTES, most_tokens=131_072)
        tokens = asked.request.prompt_tokens
        assert media_count * media.IMAGE_TOKENS < tokens < media_count * media.IMAGE_TOKENS + 100

    @pytest.mark.parametrize(
        "item",
        [
            {"type": "function_call", "name": "f", "arguments": BASE64},
            {"type": "function_call_output", "call_id": "1", "output": BASE64},
            {"type": "custom_tool_call", "name": "f", "input": BASE64},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": BASE64}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": BASE64}]},
            {"type": "code_interpreter_call", "outputs": [{"type": "logs", "logs": BASE64}]},
        ],
        ids=lambda v: str(v)[:40],
    )
    def test_text_that_looks_like_base64_is_text(self, item: dict[str, Any]) -> None:
        text = RESPONSES.prompt_text({"input": [item]})
        assert text.data == orjson.dumps(item)
        assert not text.media_tokens

    @pytest.mark.parametrize("given", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
    @pytest.mark.parametrize("embeds", ["A" * 109_000, ["A" * 54_500, "B" * 54_500]])
    def test_embeddings_in_place_of_a_prompt(self, given: dict[str, Any], embeds: Any) -> None:
        """vLLM takes such a body: with a null prompt, an empty one, or none."""
        asked = understood(orjson.dumps({**given, "prompt_embeds": embeds}), chat=False)
        assert 10 <= asked.request.prompt_tokens < 20
        assert asked.request.sequences == (len(embeds) if isinstance(embeds, list) else 1)
        assert (asked.prompt_bytes, asked.request.pure) == (0, False)
        assert refused(b'{"prompt_embeds": [7]}', chat=False).param == "prompt_embeds"

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "text", "text": PICTURE},
            {"text": PICTURE, "image_url": {}},
            {"type": "refusal", "refusal": PICTURE},
            {"type": "new", "of": ["short", "data:"]},
            {"type": "new", "of": ["long " * 1000]},
        ],
        ids=lambda v: str(v)[:30],
    )
    def test_text_is_text_whatever_it_says(self, part: dict[str, Any]) -> None:
        asked = understood(orjson.dumps(chat({"role": "user", "content": [part]})))
        assert asked.prompt_bytes >= max(len(value) for value in part.values())
        assert asked.request.prompt_tokens == round(asked.prompt_bytes / 4)


class TestRendered:
    """Parts of a prompt that chat templates add to the contents."""

    LONG = "think " * 100

    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
    def test_reasoning_stands_before_the_content(self, name: str) -> None:
        fields = chat({"role": "assistant", name: self.LONG, "content": "So."})
        assert CHAT.prompt_text(fields).data == b"\0assistant\0" + self.LONG.encode() + b"So."
        fields = chat({"role": "assistant", name: ["a"]})
        assert CHAT.prompt_text(fields).data == b'\0assistant\0["a"]'

    @pytest.mark.parametrize(
        ("name", "value"),
        [("documents", [{"text": LONG}]), ("chat_template_kwargs", {"hint": LONG})],
    )
    def test_documents_and_options_stand_before_the_messages(self, name: str, value: Any) -> None:
        message, tools = {"role": "user", "content": "Why?"}, [{"type": "function"}]
        assert CHAT.prompt_text(chat(message, tools=tools, **{name: value})).data == (
            orjson.dumps(tools) + orjson.dumps(value) + b"\0user\0Why?"
        )

    @pytest.mark.parametrize(
        "more",
        [
            {"documents": None, "chat_template_kwargs": None},
            {"documents": [], "chat_template_kwargs": {}},
            {"documents": "x", "chat_template_kwargs": [1]},
        ],
        ids=str,
    )
    def test_empty_options_and_those_that_no_template_reads_change_nothing(
        self, more: dict[str, Any]
    ) -> None:
        message = {"role": "user", "content": "Why?", "reasoning": None, "reasoning_content": ""}
        assert CHAT.prompt_text(chat(message, **more)).data == b"\0user\0Why?"

    @pytest.mark.parametrize("name", ["tools", "documents", "chat_template_kwargs"])
    def test_deeply_nested_options_are_text_without_their_brackets(self, name: str) -> None:
        """vLLM takes 600 levels, more than can be written again."""
        deep: Any = {"a": 1.5, "b": ["deep text", None]}
        for _ in range(600):
            deep = [deep]
        value = {"x": deep} if name == "chat_template_kwargs" else [deep]
        data = CHAT.prompt_text(chat({"role": "user", "content": "Why?"}, **{name: value})).data
        assert isinstance(data, bytes)
        assert data.endswith(b"a 1.5 b deep text None\0user\0Why?")


class TestAnswers:
    @pytest.mark.parametrize(
        ("more", "is_chat", "output_tokens"),
        [
            ({}, True, 512),
            ({"n": 4}, True, 2048),
            ({"n": 4, "max_tokens": 10}, True, 40),
            ({"n": 4, "best_of": 8, "max_tokens": 10}, True, 40),
            ({"n": 4, "best_of": 8, "max_tokens": 10}, False, 40),  # vLLM has no best_of
            ({"best_of": 1, "n": 2, "max_tokens": 10}, False, 20),
            ({"n": 1 << 60, "max_tokens": 10}, True, 1 << 20),
            ({"n": 3, "max_tokens": 0}, True, 0),
            ({"n": 0, "max_tokens": 10}, True, 10),
            ({"n": -3, "max_tokens": 10}, True, 10),
            ({"n": "4", "max_tokens": 10}, False, 40),
            ({"n": "four", "max_tokens": 10}, False, 10),
            ({"n": 3.0, "max_tokens": 10}, False, 30),
        ],
    )
    def test_room_is_reserved_for_each(
        self, more: dict[str, Any], is_chat: bool, output_tokens: int
    ) -> None:
        prompt = chat({"role": "user", "content": "x"}) if is_chat else {"prompt": "x"}
        asked = understood(orjson.dumps(prompt | more), is_chat)
        assert asked.request.output_tokens == output_tokens

    def test_the_end_of_one_token_is_its_beginning_for_many_answers_too(self) -> None:
        def streams(**more: int) -> bool:
            return understood(orjson.dumps({"prompt": "x", **more}), chat=False).request.streams

        assert streams(max_tokens=1, n=4)
        assert not streams(max_tokens=2, n=1)
