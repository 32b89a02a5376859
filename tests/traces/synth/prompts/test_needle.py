"""Needle-in-a-haystack prompts and the judgement of their answers."""

import json
from pathlib import Path

import orjson
import pytest
from common_start import common_length
from paths import SHARED

from forebay.traces.edit.describe import describe
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.reading.jsonl import parse_row
from forebay.traces.synth.prompts.needle import (
    NeedleAnswer,
    answer_line,
    generated_haystack,
    load_haystack,
    needle_requests,
)
from forebay.traces.tokens import ByteEstimate

DOCUMENTS = SHARED / "data" / "docs"
COUNTER = ByteEstimate()
HAYSTACK = generated_haystack(4_000, seed=1)


def make(**change: object) -> list[tuple[TraceRequest, NeedleAnswer]]:
    settings: dict[str, object] = {
        "lengths": [1_000, 3_000],
        "depths": [0.0, 0.5, 1.0],
        "questions": 10,
        **change,
    }
    return list(needle_requests(HAYSTACK, COUNTER, **settings))  # type: ignore[arg-type]


def test_each_prompt_hides_its_answer_once_and_has_the_length_asked_for() -> None:
    made = make()
    assert len(made) == 2 * 3 * 10
    assert len({request.id for request, _ in made}) == len(made)
    for request, answer in made:
        assert request.text is not None
        assert request.id == answer.id
        assert request.text.count(answer.answer) == 1
        assert answer.question in request.text
        assert request.input_tokens == COUNTER.count(request.text)
        assert answer.haystack_tokens - 40 <= request.input_tokens <= answer.haystack_tokens
        assert parse_row(row_bytes(request)) == request


@pytest.mark.parametrize(
    ("depth", "least", "most"), [(0.0, 0, 0.1), (0.5, 0.45, 0.6), (1.0, 0.9, 1)]
)
def test_the_needle_stands_at_its_depth(depth: float, least: float, most: float) -> None:
    for request, answer in make(depths=[depth], lengths=[3_000]):
        text = request.text or ""
        assert least <= text.index(answer.answer) / len(text) <= most


def test_questions_about_a_haystack_differ_and_share_all_but_their_ends() -> None:
    made = make(lengths=[3_000], depths=[0.5])
    assert len({answer.question for _, answer in made}) == 10  # more than there are phrasings
    assert len({answer.answer for _, answer in made}) == 1
    assert len({request.document for request, _ in made}) == 1
    texts = [request.text or "" for request, _ in made]
    assert all(common_length(texts[0], text) > 0.95 * len(text) for text in texts)
    assert describe(request for request, _ in made).ideal_hit_ratio > 0.85


def test_depths_share_only_what_comes_before_the_needle() -> None:
    shallow, deep = make(lengths=[3_000], depths=[0.2, 0.8], questions=1)
    texts = [shallow[0].text or "", deep[0].text or ""]
    assert shallow[1].answer == deep[1].answer
    common = common_length(*texts) / len(texts[0])
    assert common == pytest.approx(0.2, abs=0.06)


def test_equal_seeds_make_equal_needles() -> None:
    assert make(seed=3) == make(seed=3)
    assert make(seed=3) != make(seed=4)


@pytest.mark.parametrize(
    ("output", "right"),
    [("It is 1234567.", True), ("1,234,567", True), ("1 234 567", True), ("7654321", False)],
)
def test_an_answer_is_found_however_its_digits_are_grouped(output: str, right: bool) -> None:
    assert NeedleAnswer("a", "1234567", "?", 1_000, 0.5).found_in(output) is right


def test_answers_survive_the_round_trip(tmp_path: Path) -> None:
    answers = [answer for _, answer in make()]
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(map(answer_line, answers)))
    lines = map(orjson.loads, path.read_bytes().splitlines())
    assert [NeedleAnswer(**line) for line in lines] == answers


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": []}, "--lengths and --depths: give at least one"),
        ({"lengths": [100]}, "--lengths 100: too short"),
        ({"lengths": [10**6]}, "--lengths 1000000: the haystack has"),
        ({"depths": [1.5]}, "--depths 1.5"),
        ({"depths": [float("nan")]}, "--depths nan"),
        ({"questions": 0}, "--questions 0"),
        ({"output_tokens": 0}, "--output-tokens 0"),
        ({"rate_per_s": 0.0}, "--rate 0"),
    ],
)
def test_what_cannot_be_names_the_option(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make(**change)


def test_a_haystack_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "stories.jsonl"
    path.write_text(json.dumps({"doc_id": "a", "text": "One."}) + "\n\n" + '{"text": "Two."}\n')
    assert load_haystack([path, path]) == "One.\n\nTwo.\n\nOne.\n\nTwo."
    path.write_text('{"doc_id": "a"}\n')
    with pytest.raises(InputError, match=r'stories\.jsonl:1: no string under "text"'):
        load_haystack([path])
    path.write_text("")
    with pytest.raises(InputError, match="no text in the haystack"):
        load_haystack([path])


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="no ../shared/data")
def test_the_gutenberg_haystack_reaches_128k() -> None:
    haystack = load_haystack([DOCUMENTS / "haystack_gutenberg.jsonl"])
    (request, answer), *_ = needle_requests(haystack, COUNTER, lengths=[131_072], depths=[0.5])
    assert 131_072 - 40 <= request.input_tokens <= 131_072
    assert (request.text or "").count(answer.answer) == 1
