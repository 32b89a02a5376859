"""A model's own tokenizer.json counts tokens, without the network."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.proxy.cli import main
from forebay.traces.ground.errors import InputError
from forebay.traces.tokenizer_file import _letters
from forebay.traces.tokens import counter

BYTE_LEVEL = {"type": "ByteLevel"}


def tokenizer(**more: Any) -> dict[str, Any]:
    """All bytes, and the words `he`, `llo` and `hello`."""
    vocab = {letter: number for number, letter in enumerate(_letters())}
    for word in ("he", "ll", "llo", "hello"):
        vocab[word] = len(vocab)
    merges = ["h e", "l l", "ll o", "he llo"]
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {
        "model": model,
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "added_tokens": [{"id": 260, "content": "<s>"}],
    } | more


def written(folder: Path, body: object) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(body), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "tokens"), [("hello", 1), ("hell", 2), ("hello hello", 3), ("é", 2), ("<s>", 3)]
)
def test_tokens_are_those_of_the_file(text: str, tokens: int, tmp_path: Path) -> None:
    file = written(tmp_path, tokenizer())
    for path in (file, tmp_path):  # the file, or the folder of a model
        found = counter(str(path))
        assert found.exact
        assert found.count(text) == tokens
    assert counter(str(file)).head("hello hello", 2) == "hello "


@pytest.mark.parametrize(
    "body",
    [
        tokenizer(pre_tokenizer={"type": "Metaspace"}),  # SentencePiece
        tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}]}),
        tokenizer(normalizer={"type": "Lowercase"}),
        tokenizer(model={"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["b a"]}),
        tokenizer(model={"type": "Unigram", "vocab": [["a", -1.0]]}),
        [],
        {},
    ],
)
def test_another_kind_is_refused(body: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a byte-level BPE tokenizer\.json"):
        counter(str(written(tmp_path, body)))


def test_texts_are_composed_where_the_file_says_so(tmp_path: Path) -> None:
    """Qwen 2.5 normalises to NFC: `e` and a combining accent are the two bytes of `é`."""
    plain = counter(str(written(tmp_path, tokenizer())))
    assert plain.count("e\u0301") == 3
    composed = counter(str(written(tmp_path, tokenizer(normalizer={"type": "NFC"}))))
    assert composed.count("e\u0301") == 2


@pytest.mark.parametrize(
    ("text", "tokens"), [("12", 2), ("hello12", 3), ("  1", 2), (" 1", 2), ("hello  hello", 3)]
)
def test_digits_may_stand_alone(text: str, tokens: int, tmp_path: Path) -> None:
    """SmolLM2 cuts out each digit before all else, so that no token crosses its sides."""
    digits = {"type": "Digits", "individual_digits": True}
    body = tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, BYTE_LEVEL]})
    space = _letters()[ord(" ")]
    for pair in ("12", space * 2, space + "1", space + "hello"):
        body["model"]["vocab"][pair] = len(body["model"]["vocab"])
        body["model"]["merges"].append([pair[0], pair[1:]])
    assert counter(str(written(tmp_path, body))).count(text) == tokens


def test_a_byte_that_the_vocabulary_lacks_is_a_token(tmp_path: Path) -> None:
    """SmolLM2's lacks some control characters."""
    body = tokenizer()
    del body["model"]["vocab"][_letters()[4]]
    assert counter(str(written(tmp_path, body))).count("hello\x04\x04") == 3


def test_a_token_may_have_several_merges(tmp_path: Path) -> None:
    """Llama 3's file lists every way to a token, one after the other."""
    body = tokenizer()
    body["model"]["merges"].append("hel lo")
    assert counter(str(written(tmp_path, body))).count("hello") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        counter(str(tmp_path / "none.json"))


def test_needles_are_counted_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, tokenizer())
    words = ("--lengths", "2000", "--depths", "0.5", "--tokenizer", str(file))
    assert main(["traces", "needle", *words, "-o", str(tmp_path / "needle.jsonl")]) == 0
    assert str(file) in capsys.readouterr().err
