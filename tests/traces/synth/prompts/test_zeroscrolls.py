"""ZeroSCROLLS tasks as prompts and as traces."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import SHARED

from forebay.traces.ground.errors import InputError
from forebay.traces.synth.prompts import zeroscrolls
from forebay.traces.synth.prompts.zeroscrolls import (
    TASKS,
    ZeroScrollsSample,
    by_document,
    read_task,
)
from forebay.traces.synth.prompts.zeroscrolls_trace import (
    NO_EXPLANATION,
    ORDERS,
    ordered,
    prompt_form,
    to_trace,
    truncated_prompt,
)
from forebay.traces.tokens import ByteEstimate

FIXTURE = SHARED / "data" / "zero_scrolls_fixture"
needs_data = pytest.mark.skipif(not FIXTURE.is_dir(), reason="no ../shared/data")

INSTRUCTION = "Answer from the article.\n\nArticle:\n"


def row(number: int, document: str, query: str = "Why?", **change: Any) -> dict[str, Any]:
    start = len(INSTRUCTION)
    text = f"{INSTRUCTION}{document}\n\nQuestion:\n{query}\n\nAnswer:\n"
    query_start = start + len(document) + 2
    return {
        "id": f"q{number}",
        "pid": f"q{number}_0",
        "input": text,
        "output": None,
        "document_start_index": start,
        "document_end_index": start + len(document),
        "query_start_index": query_start,
        "query_end_index": query_start + len("Question:\n") + len(query),
        "truncation_seperator": "... [cut]\n\n",
        **change,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


ROWS = [row(1, "Über alles ☃ 𝄞"), row(2, "Other text"), row(3, "Über alles ☃ 𝄞", "Who?")]


def test_zip_directory_and_file_read_alike(tmp_path: Path) -> None:
    file = write(tmp_path / "qasper" / "test.jsonl", ROWS)
    with zipfile.ZipFile(tmp_path / "qasper.zip", "w") as archive:
        archive.write(file, "qasper/test.jsonl")
    bare = write(tmp_path / "bare.jsonl", ROWS)
    ways = [
        read_task(tmp_path / "qasper.zip"),
        read_task(tmp_path / "qasper"),
        read_task(tmp_path, task="qasper"),
        read_task(file),
        read_task(bare, task="qasper"),
    ]
    assert {way.samples for way in ways} == {ways[0].samples}
    assert {(way.task, way.rows) for way in ways} == {("qasper", 3)}
    assert len({way.sha256 for way in ways[1:]}) == 1  # the zip has its own
    assert ways[0].samples[0].document == "Über alles ☃ 𝄞"  # indices count code points
    assert [len(group) for group in by_document(ways[0].samples).values()] == [2, 1]


def test_both_spellings_of_the_separator(tmp_path: Path) -> None:
    other = row(1, "Text")
    other["truncation_separator"] = other.pop("truncation_seperator")
    found = read_task(write(tmp_path / "t.jsonl", [other]), task="qasper")
    assert found.samples[0].separator == "... [cut]\n\n"


def test_rows_of_one_id_become_one_sample_with_every_reference(tmp_path: Path) -> None:
    rows = [row(1, "Text", output="yes"), row(2, "Text"), row(1, "Text", output="no", pid="q1_1")]
    found = read_task(write(tmp_path / "validation.jsonl", rows), task="qasper", split="validation")
    assert (found.rows, len(found.samples)) == (3, 2)
    assert found.samples[0].outputs == ("yes", "no")
    assert found.warnings == ()


def test_many_rows_of_one_id_take_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zip of 0.1 MB took 90 s: each row copied the answers of all rows before it."""
    copied = 0

    def counting(sample: ZeroScrollsSample, **changes: Any) -> ZeroScrollsSample:
        nonlocal copied
        copied += len(changes["outputs"])
        return replace(sample, **changes)

    monkeypatch.setattr(zeroscrolls, "replace", counting)
    rows = [row(1, "x", output=str(number)) for number in range(1000)]
    read = read_task(write(tmp_path / "qasper" / "test.jsonl", rows))
    assert read.samples[0].outputs == tuple(str(number) for number in range(1000))
    assert copied == 1000


def test_what_is_odd_is_a_warning(tmp_path: Path) -> None:
    rows = [
        row(1, "Text", document_end_index=9_999),
        row(2, "Text", inner_docs_start_indices=[0]),
        row(2, "Text but another"),
    ]
    found = read_task(write(tmp_path / "t.jsonl", rows), task="musique")
    assert len(found.samples) == 2
    warnings = [warning.removeprefix(f"{tmp_path}/t.jsonl") for warning in found.warnings]
    assert warnings[0].startswith(":1: indices out of order: document 35:9999, query")
    assert warnings[1] == ":2: inner document starts outside the document: 0"
    assert warnings[2] == ":3: id 'q2' again with another input; kept the first"
    assert warnings[3] == ": 3 rows, the paper's Table 1 has 500"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": 5}, "id and input must be strings"),
        ({"input": None}, "id and input must be strings"),
        ({"query_end_index": "7"}, "query_end_index: '7' is not a whole number"),
        ({"output": 5}, "output is neither a string nor null"),
        ({"truncation_seperator": 5}, "truncation_seperator is not a string"),
        ({"inner_docs_start_indices": ["a"]}, "inner_docs_start_indices is not a list"),
    ],
)
def test_a_bad_row_names_file_and_line_and_can_be_skipped(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", [row(1, "Text"), row(2, "Text", **change)])
    with pytest.raises(InputError) as error:
        read_task(path, task="qasper")
    assert str(error.value).startswith(f"{path}:2: {says}")
    found = read_task(path, task="qasper", skip_bad=True)
    assert (found.rows, found.skipped) == (1, 1)


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path / "qasper" / "test.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04 and no more")
    with zipfile.ZipFile(tmp_path / "qmsum.zip", "w") as archive:
        archive.writestr("qmsum/test.jsonl", "{}\n")
    for path, task, split, says in (
        ("none.zip", None, "test", "no such file"),
        ("empty.jsonl", None, "test", "unknown task; give --task"),
        ("empty.jsonl", "qasper", "test", "no rows in this file"),
        ("empty.jsonl", "quasper", "test", "'quasper' is not one"),
        ("qasper", None, "train", "--split train: not a split"),
        ("qasper", None, "validation", "holds no validation.jsonl"),
        (
            ".",
            None,
            "test",
            "holds no test.jsonl; name one of its tasks with --task: qmsum, qasper",
        ),
        ("cut.zip", "qasper", "test", "not JSON"),
        ("qmsum.zip", None, "validation", "needs one validation.jsonl inside, has none"),
        ("qmsum.zip", None, "test", "qmsum.zip(qmsum/test.jsonl):1: id and input"),
    ):
        with pytest.raises(InputError) as error:
            read_task(tmp_path / path, task=task, split=split)
        assert says in str(error.value)


def test_a_damaged_zip_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "qasper.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("qasper/test.jsonl", "".join(json.dumps(one) + "\n" for one in ROWS) * 9)
    content = bytearray(path.read_bytes())
    content[60:120] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged zip"):
        read_task(path)


def sample(
    task: str = "qasper", document: str = "Text", inner: tuple[int, ...] = ()
) -> ZeroScrollsSample:
    one = row(1, document)
    return ZeroScrollsSample(
        task,
        one["id"],
        one["input"],
        one["document_start_index"],
        one["document_end_index"],
        one["query_start_index"],
        one["query_end_index"],
        one["truncation_seperator"],
        inner,
    )


def test_completions_sends_the_input_unchanged() -> None:
    assert prompt_form(sample(), "completions") == sample()


@pytest.mark.parametrize("task", list(TASKS))
def test_the_chat_form_ends_with_the_query_and_keeps_its_indices_true(task: str) -> None:
    before = sample(task, inner=(len(INSTRUCTION), len(INSTRUCTION) + 2))
    after = prompt_form(before, "chat")
    told = task in (
        "qasper",
        "narrative_qa",
        "quality",
        "musique",
        "space_digest",
        "book_sum_sort",
    )
    added = 32 if told else 0
    start = f"Answer from the article.{NO_EXPLANATION if told else ''}\n\nArticle:\n"
    assert after.input == f"{start}Text\n\nQuestion:\nWhy?"
    assert after.document == "Text"
    assert after.input[after.query_start : after.query_end] == "Question:\nWhy?"
    assert after.inner_starts == tuple(one + added for one in before.inner_starts)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match="--form prose: not a form; one of: completions, chat"):
        prompt_form(sample(), "prose")


@given(st.text(max_size=400), st.integers(1, 300), st.integers(1, 60))
def test_cutting_keeps_the_prefix_and_everything_from_the_query_on(
    document: str, context: int, new: int
) -> None:
    counter = ByteEstimate()
    whole = sample(document=document)
    suffix = whole.input[whole.query_start :]
    try:
        prompt = truncated_prompt(whole, counter, context, new)
    except InputError as error:
        assert "--context" in str(error)  # noqa: PT017  (hypothesis reaches both outcomes)
        assert counter.count(whole.separator + suffix) + new >= context - 1
        return
    assert counter.count(prompt) + new <= context
    if prompt != whole.input:
        head = prompt.removesuffix(whole.separator + suffix)
        assert head != prompt
        assert whole.input.startswith(head)
        # As much as fits: another two tokens would not (the seam may cost one).
        assert counter.count(prompt) + new >= context - 2
    assert prompt == whole.input or counter.count(whole.input) + new > context


class SeamCounter(ByteEstimate):
    """A tokenizer to which a prompt is three tokens more than its parts."""

    def count(self, text: str) -> int:
        return super().count(text) + (3 if "[cut]" in text and "Article" in text else 0)


def test_tokens_that_appear_at_the_seam_are_cut_too() -> None:
    counter = SeamCounter()
    prompt = truncated_prompt(sample(document="word " * 500), counter, 200, 10)
    assert counter.count(prompt) == 190


def samples() -> list[ZeroScrollsSample]:
    return [replace(sample(document=f"Text {number % 3}"), id=str(number)) for number in range(12)]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_has_each_sample_once_and_is_repeatable(order: str) -> None:
    one = ordered(samples(), order, seed=4)
    assert sorted(one, key=lambda each: int(each.id)) == samples()
    assert one == ordered(samples(), order, seed=4)
    if order in ("shuffled", "zipf"):
        assert one != ordered(samples(), order, seed=5)


def test_grouped_keeps_a_document_together_and_zipf_favours_one() -> None:
    names = [each.document for each in ordered(samples(), "grouped", seed=0)]
    assert names == ["Text 0"] * 4 + ["Text 1"] * 4 + ["Text 2"] * 4
    assert [each.id for each in ordered(samples(), "grouped", seed=0)][:4] == ["0", "3", "6", "9"]
    steep = [each.document for each in ordered(samples(), "zipf", seed=0, zipf_s=10)]
    assert len(set(steep[:4])) == 1
    with pytest.raises(InputError, match="--order best: not an order"):
        ordered(samples(), "best", seed=0)
    with pytest.raises(InputError, match="--zipf -1"):
        ordered(samples(), "zipf", seed=0, zipf_s=-1)


def test_samples_become_requests() -> None:
    made = list(
        to_trace(samples()[:3], ByteEstimate(), arrivals="constant", rate_per_s=2, form="chat")
    )
    assert [one.id for one in made] == ["qasper/0", "qasper/1", "qasper/2"]
    assert [one.arrival_s for one in made] == [0.0, 0.5, 1.0]
    assert {one.output_tokens for one in made} == {128}
    assert made[0].text is not None
    assert made[0].text.endswith("Why?")
    assert made[0].input_tokens == ByteEstimate().count(made[0].text)
    assert made[0].document == samples()[0].document_sha256()[:16]


@needs_data
@pytest.mark.parametrize(
    ("task", "split", "rows", "documents"),
    [
        ("squality", "validation", 20, 4),
        ("squality", "test", 10, 2),
        ("qmsum", "validation", 20, 4),
        ("qmsum", "test", 10, 3),
    ],
)
def test_the_official_layout(task: str, split: str, rows: int, documents: int) -> None:
    found = read_task(FIXTURE / f"{task}.zip", split=split)
    assert (found.task, found.rows, len(found.samples)) == (task, rows, rows)
    assert len(by_document(found.samples)) == documents
    table = [f"{rows} rows, the paper's Table 1 has {TASKS[task].rows}"] if split == "test" else []
    assert [warning.rpartition(": ")[2] for warning in found.warnings] == table
    assert all(one.outputs for one in found.samples) == (split == "validation")
    for one in found.samples:
        assert one.input[one.query_start :].startswith(("Question:\n", "Query:\n"))
        assert one.input[one.query_end :].strip() == "Answer:"
        assert len(one.document) > 10_000


def test_a_zip_that_gets_too_long_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeroscrolls, "MOST_TASK_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "squality.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("squality/test.jsonl", bytes(3 << 20))
    with pytest.raises(InputError, match="3 MiB when it is unpacked, over the limit of 1 MiB"):
        read_task(tmp_path / "squality.zip")
