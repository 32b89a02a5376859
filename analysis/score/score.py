"""Score the answers of a run: ZeroSCROLLS by its own metrics, needles by the number they hide.

`forebay replay --keep-answers` keeps the answers. A request without an answer scores
0, because a server must not look better for answering less.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from forebay.analysis.score.answer_metrics import METRICS, PAIRWISE, rouge
from forebay.replay.results.folder import ANSWERS, RUN, TABLE
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import answers_path
from forebay.traces.synth.prompts.needle import NeedleAnswer

RANDOM_WEIGHTS = (
    "the scores mean nothing: the server says that its model has random weights (as the simulated "
    "engine's has)"
)
FIXED_LENGTHS = (
    "the scores are too low: answers had to go on to the trace's length; replay with --lengths free"
)


@dataclass(frozen=True, slots=True)
class References:
    """Reference answers of a trace, by request id.

    Attributes:
        texts: reference answers of ZeroSCROLLS requests, whose ids are `TASK/ID`.
        needles: numbers hidden in haystacks.
    """

    texts: Mapping[str, Sequence[str]]
    needles: Mapping[str, NeedleAnswer]


def score_run(run: Path, references: Path | None = None) -> dict[str, Any]:
    """Score a run folder. All scores are from 0 to 100.

    Args:
        references: default: the file that was made next to the run's trace.

    Returns:
        `tasks` by name (metric, score, requests, unanswered), `zeroscrolls` (their mean if all ten
        are there, else None), and `warnings` with the reasons why a score means nothing.

    Raises:
        InputError: the run kept no answers, or there are no references for them.
    """
    info = _run_record(run)
    if info.get("merged"):
        raise InputError(f"{run}: the runs merged here share request ids; score each run apart")
    path = references or answers_path(str(info.get("trace", {}).get("path", "")))
    answers = {record["id"]: record["answer"] for _, record in _lines(run / ANSWERS, _KEEP)}
    expected = read_references(path)
    ids = _request_ids(run / TABLE)
    tasks = {
        **_score_texts(ids, answers, expected.texts, path),
        **_judge(ids, answers, expected.needles),
    }
    if not tasks:
        raise InputError(f"{path}: has no reference for any request of {run}; name the right file")
    whole = [tasks[task]["score"] for task in METRICS if task in tasks]
    warnings = [RANDOM_WEIGHTS] if info.get("random_weights") else []
    if info.get("lengths") == "exact":
        warnings.append(FIXED_LENGTHS)
    return {
        "run": str(run),
        "references": str(path),
        "tasks": tasks,
        "zeroscrolls": fmean(whole) if len(whole) == len(METRICS) else None,
        "warnings": warnings,
    }


def read_references(path: Path) -> References:
    """Read the file next to a trace of `traces zeroscrolls` or `traces needle`.

    Raises:
        InputError: an unreadable file or a line that is not a reference.
    """
    texts: dict[str, Sequence[str]] = {}
    needles: dict[str, NeedleAnswer] = {}
    fix = "name the file with --references (the test split of ZeroSCROLLS has none)"
    for number, line in _lines(path, fix):
        if "references" in line:
            texts[line["id"]] = line["references"]
            continue
        try:
            needles[line["id"]] = NeedleAnswer(**line)
        except TypeError as error:
            raise InputError(f"{path}:{number}: not a reference ({error})") from error
    return References(texts, needles)


_KEEP = "repeat the replay with --keep-answers"


def _lines(path: Path, fix: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line, each of which has an id. Raises InputError."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = orjson.loads(raw)
                except orjson.JSONDecodeError as error:
                    raise InputError(f"{path}:{number}: not JSON ({error}); {fix}") from error
                if not isinstance(line, dict) or not isinstance(line.get("id"), str):
                    raise InputError(f"{path}:{number}: not an object with an id; {fix}")
                yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {fix}") from error


def _run_record(run: Path) -> Mapping[str, Any]:
    try:
        info = orjson.loads((run / RUN).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(f"{run}: no run folder with a readable {RUN}; check the path") from error
    if not isinstance(info, dict):
        raise InputError(f"{run / RUN}: not an object; repeat the run")
    return info


def _request_ids(table: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        ids: list[Any] = pyarrow.parquet.read_table(table, columns=["id"])["id"].to_pylist()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise InputError(f"{table}: cannot be read; repeat the run") from error
    return ids


def _score_texts(
    ids: Sequence[str],
    answers: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
    path: Path,
) -> dict[str, dict[str, Any]]:
    by_task: dict[str, list[str]] = defaultdict(list)
    for name in ids:
        if name in texts:
            by_task[name.partition("/")[0]].append(name)
    if unknown := sorted(set(by_task) - set(METRICS)):
        raise InputError(
            f"{path}: {unknown[0]!r} is no task of ZeroSCROLLS; ids are TASK/ID, with one of "
            f"{', '.join(METRICS)}"
        )
    scored = {}
    for task in (task for task in METRICS if task in by_task):
        names = by_task[task]
        try:
            score = task_score(task, [(answers.get(name, ""), texts[name]) for name in names])
        except ValueError as error:
            raise InputError(f"{path}: {task}: {error}") from error
        scored[task] = _result(METRICS[task], score, names, answers)
    return scored


def task_score(task: str, pairs: Sequence[tuple[str, Sequence[str]]]) -> float:
    """Return the score of one task (0 to 100) from each answer and its references.

    Raises:
        ValueError: a reference that the task's metric cannot read, or an answer without any.
    """
    if not all(references for _, references in pairs):
        raise ValueError("an answer has no reference")
    if METRICS[task] == "rouge":
        means = [fmean(each) for each in zip(*(rouge(*pair) for pair in pairs), strict=True)]
        return float(100 * (means[0] * means[1] * means[2]) ** (1 / 3))
    metric = PAIRWISE[METRICS[task]]
    return 100 * fmean(
        max(metric(answer, reference) for reference in references) for answer, references in pairs
    )


def _judge(
    ids: Sequence[str], answers: Mapping[str, str], needles: Mapping[str, NeedleAnswer]
) -> dict[str, dict[str, Any]]:
    """Judge needles by length and depth, since a model may miss them in some places only."""
    groups: dict[tuple[int, float], list[str]] = defaultdict(list)
    for name in ids:
        if name in needles:
            groups[needles[name].haystack_tokens, needles[name].depth].append(name)
    judged = {}
    for (tokens, depth), names in sorted(groups.items()):
        score = 100 * fmean(needles[name].found_in(answers.get(name, "")) for name in names)
        judged[f"needle {tokens} tokens, depth {depth:g}"] = _result(
            "number found", score, names, answers
        )
    return judged


def _result(
    metric: str, score: float, names: Sequence[str], answers: Mapping[str, str]
) -> dict[str, Any]:
    unanswered = sum(name not in answers for name in names)
    return {"metric": metric, "score": score, "requests": len(names), "unanswered": unanswered}
