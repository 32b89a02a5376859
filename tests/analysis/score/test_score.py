"""Scores of answers: the metrics of ZeroSCROLLS as its scorer defines them, and needles."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from commands import forebay, printed, refusal
from stages.replay_server import Server, event, on_engine, run_one, stream, usage

from forebay.analysis.score.answer_metrics import METRICS, concordance_index, f1
from forebay.analysis.score.score import (
    FIXED_LENGTHS,
    RANDOM_WEIGHTS,
    read_references,
    score_run,
    task_score,
)
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import answers_path
from forebay.traces.synth.prompts.needle import answer_line, generated_haystack, needle_requests
from forebay.traces.synth.prompts.zeroscrolls import TASKS
from forebay.traces.tokens import ByteEstimate

# Computed by hand from the definitions of the official scorer (tau/zero_scrolls, metrics/).
CAT = ("The cat sat.", ["the cat ran"])  # 2 of 3 words, 1 of 2 pairs, longest common part 2 of 3
CAT_SCORE = 100 * (2 / 3 * 1 / 2 * 2 / 3) ** (1 / 3)
PLANTED: dict[str, tuple[list[tuple[str, list[str]]], float]] = {
    "gov_report": ([CAT], CAT_SCORE),
    # Means over answers come before the geometric mean: (1 + 0) / 2 of each of the three.
    "summ_screen_fd": ([("a b", ["a b"]), ("x y", ["a b"])], 50.0),
    # The best reference counts, separately for each of the three.
    "qmsum": ([(CAT[0], ["nothing of it", CAT[1][0]])], CAT_SCORE),
    # Of 4 and 5 words all 4 are shared, of 3 and 4 pairs 2; the longest common part has 2.
    "squality": ([("c d a b", ["a b x c d"])], 100 * (8 / 9 * 4 / 7 * 4 / 9) ** (1 / 3)),
    # Articles and punctuation do not count: {cat, sat} of {cat, sat, down}.
    "qasper": ([("The cat sat!", ["a cat sat down"])], 100 * 4 / 5),
    "narrative_qa": ([("In Malmø", ["Malmo"]), ("", ["Paris"])], 100 * (2 / 3 + 0) / 2),
    "musique": ([("1,912", ["1912", "never"])], 100.0),
    # The first of A to D that stands alone: "A" is one wherever it is.
    "quality": ([("I think (B).", ["(B) rain"]), ("A car: (B)", ["(B) rain"])], 50.0),
    # 20 points away is a quarter; no percentage is 0.
    "space_digest": ([("60% of them", ["80%"]), ("most", ["80%"])], 100 * (0.25 + 0) / 2),
    # 2,1,3: two of three pairs in order; other numbers than those of the reference: 0.
    "book_sum_sort": ([("2, 1, 3", ["1, 2, 3"]), ("1, 2", ["1, 2, 3"])], 100 * (2 / 3) / 2),
}


@pytest.mark.parametrize("task", TASKS)
def test_planted_answers_score_as_the_official_scorer_defines(task: str) -> None:
    pairs, score = PLANTED[task]
    assert task_score(task, pairs) == pytest.approx(score)


def test_each_task_has_a_metric() -> None:
    assert METRICS.keys() == TASKS.keys() == PLANTED.keys()


def test_strange_answers_score_and_strange_references_are_errors() -> None:
    assert concordance_index("9" * 10_000, "1, 2") == 0.0
    assert concordance_index("02, 01", "1, 2") == 0.0  # as numbers these are the reference's
    assert f1("à la carte", "a la carte") == pytest.approx(0.8)  # "a" is an article, "à" is none
    assert task_score("space_digest", [("99999999%", ["1%"])]) == 0.0
    for task, reference in (("quality", "none"), ("space_digest", "80"), ("book_sum_sort", "1")):
        with pytest.raises(ValueError, match="the reference"):
            task_score(task, [("x", [reference])])


def saying(answers: dict[str, str]) -> Server:
    """A server that answers each prompt with its text in `answers`, an error if it has none."""

    async def behaviour(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        said = answers.get(body["prompt"])
        if said is None:
            return web.Response(status=500)
        response = await stream(request)
        await response.write(event({"choices": [{"index": 0, "text": said}]}) + usage(8, 4))
        await response.write(event(b"[DONE]"))
        return response

    return Server(behaviour)


def a_run(folder: Path, pairs: dict[str, tuple[str | None, list[str]]], **options: Any) -> Path:
    """A run of requests `TASK/ID` that got these answers; references are beside its trace."""
    trace = [TraceRequest(name, 0.0, 8, 4, text=name) for name in pairs]
    said = {name: answer for name, (answer, _) in pairs.items() if answer is not None}
    run_one(folder / "run", trace, saying(said), keep_answers=True, lengths="free", **options)
    lines = [orjson.dumps({"id": name, "references": pairs[name][1]}) for name in pairs]
    (folder / "t.answers.jsonl").write_bytes(b"\n".join(lines))
    return folder / "run"


def test_a_run_is_scored_and_a_request_without_answer_counts_as_wrong(tmp_path: Path) -> None:
    pairs: dict[str, tuple[str | None, list[str]]] = {
        f"{task}/{at}": (answer, references)
        for task, (planted, _) in PLANTED.items()
        for at, (answer, references) in enumerate(planted)
    }
    pairs["musique/lost"] = (None, ["x"])
    pairs["narrative_qa/1"] = (None, ["Paris"])
    run = a_run(tmp_path, pairs)
    result = score_run(run, tmp_path / "t.answers.jsonl")
    for task, (planted, score) in PLANTED.items():
        if task != "musique":
            assert result["tasks"][task]["score"] == pytest.approx(score)
            assert result["tasks"][task]["requests"] == len(planted)
    assert result["tasks"]["musique"] == {
        "metric": "f1", "score": 50.0, "requests": 2, "unanswered": 1,
    }  # fmt: skip
    scores = [one["score"] for one in result["tasks"].values()]
    assert result["zeroscrolls"] == pytest.approx(sum(scores) / 10)
    assert result["warnings"] == []


def test_needles_are_judged_by_length_and_depth_on_an_oracle(tmp_path: Path) -> None:
    haystack = generated_haystack(800, seed=1)
    made = list(
        needle_requests(haystack, ByteEstimate(), lengths=[600], depths=[0.1, 0.9], questions=2)
    )
    said = {str(row.text): f"It is {answer.answer}." for row, answer in made}
    forgotten = made[-1][0]
    said[str(forgotten.text)] = "1234567"
    trace = tmp_path / "needle.jsonl"
    trace.write_bytes(b"".join(orjson.dumps(row_dict(row)) + b"\n" for row, _ in made))
    answers_path(str(trace)).write_bytes(b"".join(answer_line(answer) for _, answer in made))
    run_one(tmp_path / "run", trace, saying(said), keep_answers=True, lengths="exact")
    done = forebay("runs", "score", tmp_path / "run", "--json")
    result = json.loads(done.stdout)
    assert {task: one["score"] for task, one in result["tasks"].items()} == {
        "needle 600 tokens, depth 0.1": 100.0,
        "needle 600 tokens, depth 0.9": 50.0,
    }
    assert result["zeroscrolls"] is None
    assert FIXED_LENGTHS in done.stderr
    assert "50.00" in printed("runs", "score", tmp_path / "run")


def row_dict(row: TraceRequest) -> dict[str, Any]:
    counts = {"input_tokens": row.input_tokens, "output_tokens": row.output_tokens}
    return {"id": row.id, "arrival_s": row.arrival_s, "text": row.text, **counts}


def test_a_score_of_random_weights_says_that_it_means_nothing(tmp_path: Path) -> None:
    """The whole way: task file, trace with references beside it, simulated engine, score."""
    rows = [
        {"id": name, "input": "Text\nGo?", "output": output, "document_start_index": 0,
         "document_end_index": 4, "query_start_index": 5, "query_end_index": 8}
        for name, output in (("1", "yes"), ("1", "so"), ("2", "no"))
    ]  # fmt: skip
    (tmp_path / "qasper").mkdir()
    source = tmp_path / "qasper" / "validation.jsonl"
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    trace = tmp_path / "t.jsonl"
    made = ("traces", "zeroscrolls", source, "--split", "validation", "-o", trace)
    printed(*made, "--tokens", "estimate")
    refusal(*made, "--tokens", "estimate")  # its files are there

    (run,) = on_engine(tmp_path, trace, {"keep_answers": True, "lengths": "free"})
    assert read_references(answers_path(str(trace))).texts == {
        "qasper/1": ["yes", "so"], "qasper/2": ["no"],
    }  # fmt: skip
    result = score_run(run.folder)
    assert result["tasks"]["qasper"]["unanswered"] == 0
    assert result["warnings"] == [RANDOM_WEIGHTS]


def test_bad_input_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    run = a_run(tmp_path, {"qasper/1": ("yes", ["yes"])})
    references = tmp_path / "t.answers.jsonl"
    for content, message in (
        (b"{", "t.answers.jsonl:1: not JSON"),
        (b"[]", "not an object with an id"),
        (b'{"id": "x"}', "not a reference"),
        (b'{"id": "other", "references": ["x"]}', "has no reference for any request"),
        (b'{"id": "qasper/1", "references": []}', "qasper: an answer has no reference"),
    ):
        references.write_bytes(content)
        with pytest.raises(InputError, match=message):
            score_run(run, references)
    (run / "answers.jsonl").unlink()
    with pytest.raises(InputError, match="--keep-answers"):
        score_run(run, references)
    with pytest.raises(InputError, match="no run folder"):
        score_run(tmp_path / "nowhere", references)
