"""A model's own tokenizer.json counts tokens, without the network.

The files are trained here: SentencePiece's kind as Llama 2 and Phi-3 have it (spaces are a letter,
no words, bytes for letters that are unknown), and the byte-level kind of Llama 3 and Qwen 2.5.
"""

import json
import sys
from pathlib import Path

import pytest
from commands import printed, refusal
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forebay.traces.ground.errors import InputError
from forebay.traces.tokens import TokenizerFile, counter

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'forebay[tokenizers]'")
WORDS = ["hello world, hello again", "a word is a part of a text", "hello 12 times"]
KINDS = ("sentencepiece", "byte-level")


def write_tokenizer(kind: str, folder: Path) -> Path:
    """Train a small tokenizer and write its tokenizer.json."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    path = folder / "tokenizer.json"
    special = ["<unk>", "<s>"]
    if kind == "byte-level":
        made = tokenizers.Tokenizer(models.BPE())
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=letters
        )
        made.train_from_iterator(WORDS, trainer)
        made.save(str(path))
        return path
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[*special, *bytes_])
    made.train_from_iterator(WORDS, trainer)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    body = json.loads(made.to_str())
    # Such a file has no words, its bytes are no special tokens, and some cut long texts.
    body["pre_tokenizer"] = None
    body["added_tokens"] = [t for t in body["added_tokens"] if t["content"] in special]
    body["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(body))
    return path


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer("sentencepiece", tmp_path_factory.mktemp("phi"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("hello", 1),  # with the space that the file puts first
        ("hello hello", 2),
        ("hello hello hello hello hello hello", 6),  # the file cuts at 4, a server does not
        ("€", 4),  # the space, and three bytes
        ("<s>", 1),
    ],
)
def test_phi_3s_kind_counts_as_its_server(phi: Path, text: str, tokens: int) -> None:
    for path in (phi, phi.parent):  # the file, or the folder of a model
        found = counter(str(path))
        assert found.exact
        assert found.count(text) == tokens


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text("hel o12€é\u0301\n,", max_size=40), st.integers(-1, 60))
@example("hello hello", 1)
@example("€ hello", 2)
def test_a_head_is_a_start_of_at_most_so_many_tokens(file: Path, text: str, tokens: int) -> None:
    count = TokenizerFile(file)
    head = count.head(text, tokens)
    assert text.startswith(head)
    assert count.count(head) <= max(tokens, 0)
    assert count.head(text, count.count(text)) == text


def test_texts_are_composed_where_the_file_says_so(tmp_path: Path) -> None:
    """Qwen 2.5 normalises to NFC: `e` and a combining accent are the two bytes of `é`."""
    assert counter(str(write_tokenizer("byte-level", tmp_path))).count("e\u0301") == 2


@pytest.mark.parametrize("body", ["[]", "{}", "not JSON", '{"model": {"type": "Magic"}}'])
def test_another_file_is_refused(body: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(body)
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        counter(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        counter(str(tmp_path / "none.json"))


def test_without_the_library_the_extra_is_named(
    phi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = refusal("traces", "needle", "--tokens", phi, "-o", tmp_path / "needle.jsonl")
    assert said == (
        "forebay traces: tokenizers is not installed: pip install 'forebay[tokenizers]'"
    )


def test_needles_are_counted_by_it(file: Path, tmp_path: Path) -> None:
    words = ("--lengths", "2000", "--depths", "0.5", "--tokenizer", file)
    trace = tmp_path / "needle.jsonl"
    printed("traces", "needle", *words, "-o", trace)
    count = TokenizerFile(file)
    for row in map(json.loads, trace.read_text().splitlines()):
        assert row["input_tokens"] == count.count(row["text"])
        assert 1_900 < row["input_tokens"] <= 2_000
