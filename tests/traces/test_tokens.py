"""Token counts of text, with and without the tokenizer files."""

import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import prompt_text
from forebay.traces.tokens import ByteEstimate, counter

O200K_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"  # the name tiktoken caches o200k_base under


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("token counting touched the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No vocabulary anywhere; the folder is where tiktoken would look."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("forebay.traces.tokens.find_spec", lambda _: None)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("estimate", "estimate of bytes/4"),
        ("o200k_base", "the o200k_base vocabulary is not on this machine"),
        ("o200k_harmony", "the o200k_harmony vocabulary is not on this machine"),
        ("gpt-4", "the cl100k_base vocabulary is not on this machine"),
        ("gpt2", "no vocabulary for 'gpt2' here"),
        ("Qwen/Qwen2.5-14B", "no vocabulary for 'Qwen/Qwen2.5-14B' here"),
    ],
)
@pytest.mark.usefixtures("bare_machine")
def test_without_a_vocabulary_the_estimate_says_so(name: str, says: str) -> None:
    count = counter(name)
    assert not count.exact
    assert count.name.startswith("estimate of bytes/4")
    assert says in count.name


def test_a_damaged_vocabulary_is_neither_used_nor_removed(bare_machine: Path) -> None:
    """tiktoken would delete it and fetch another."""
    damaged = bare_machine / O200K_FILE
    damaged.write_bytes(b"IQ== 0\n")
    assert not counter("o200k_base").exact
    assert damaged.exists()


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("ßßß", 2)]
)
def test_the_estimate_is_four_bytes_a_token_rounded_up(text: str, tokens: int) -> None:
    assert ByteEstimate().count(text) == tokens


@given(st.text(max_size=200), st.integers(-1, 60))
def test_a_head_is_a_start_of_at_most_so_many_tokens(text: str, tokens: int) -> None:
    head = ByteEstimate().head(text, tokens)
    assert text.startswith(head)
    assert ByteEstimate().count(head) <= max(tokens, 0)
    assert ByteEstimate().head(text, ByteEstimate().count(text)) == text


def test_the_trace_and_the_estimate_count_block_text_alike() -> None:
    request = TraceRequest("a", 0, 1_234, 1, blocks=(3, 1, 4))
    assert ByteEstimate().count(prompt_text(request, "salt")) == 1_234


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_with_a_vocabulary_counts_are_exact_and_block_text_is_a_token_a_word(name: str) -> None:
    before = dict(os.environ)
    count = counter(name)
    if not count.exact:
        pytest.skip(f"no {name} vocabulary on this machine")
    assert count.name == name
    assert count.count("hello world<|endoftext|>") > 3  # plain text, not one special token
    assert count.head("hello world", 1) == "hello"
    request = TraceRequest("a", 0, 1_234, 1, blocks=(3, 1, 4))
    assert count.count(prompt_text(request, "salt")) == 1_234
    assert dict(os.environ) == before
