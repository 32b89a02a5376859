"""Replays of sessions: turn order, think times, history, and the engine's hit ratio."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes.session_trace import sessions
from stages.replay_server import Server, answer, event, on_engine, run_one, stream, text, usage

from forebay.replay.plan.agenda import link
from forebay.replay.plan.schedule import Arrivals, parse_arrivals
from forebay.traces.edit.describe import describe
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / "requests.parquet").to_pylist()
    return {row["id"]: row for row in rows}


def before(row: TraceRequest) -> list[str]:
    return [name for name in (row.parent, *row.waits_for) if name is not None]


@pytest.mark.parametrize("first_s", [0.01, 3.0])  # a fast server, and one slower than the trace
def test_turns_wait_for_answers_and_think_times(tmp_path: Path, first_s: float) -> None:
    trace = list(sessions(6))
    summary, _ = run_one(tmp_path / "run", trace, Server(first_s=first_s))
    assert summary.values["completed"] == len(trace)
    assert summary.values["verdict"] == "valid"
    found = kept(tmp_path / "run")
    for row in trace:
        if not before(row):
            assert found[row.id]["intended_s"] == pytest.approx(row.arrival_s)
            continue
        answered_s = max(found[name]["done_s"] for name in before(row))
        assert row.think_s is not None
        assert found[row.id]["intended_s"] == pytest.approx(answered_s + row.think_s)
        assert found[row.id]["sent_s"] == pytest.approx(answered_s + row.think_s, abs=1e-3)


def test_sub_agents_run_side_by_side(tmp_path: Path) -> None:
    run_one(tmp_path / "run", list(sessions(2)), Server(first_s=2.0))
    found = kept(tmp_path / "run")
    one, other = found["s1-helper0-0"], found["s1-helper1-0"]
    assert one["intended_s"] == other["intended_s"] < one["done_s"]


def test_turns_at_their_times_do_not_wait(tmp_path: Path) -> None:
    trace = list(sessions(4))
    run_one(tmp_path / "run", trace, Server(first_s=3.0), turns="trace")
    found = kept(tmp_path / "run")
    assert [found[row.id]["intended_s"] for row in trace] == pytest.approx(
        [row.arrival_s for row in trace]
    )


def test_a_turn_without_a_think_time_keeps_its_distance_but_waits(tmp_path: Path) -> None:
    first = TraceRequest("a", 0.0, 32, 4)
    trace = [first, TraceRequest("b", 1.0, 64, 4, parent="a"),
             TraceRequest("c", 9.0, 96, 4, parent="b")]  # fmt: skip
    run_one(tmp_path / "run", trace, Server(first_s=2.0), speed=2.0)
    found = kept(tmp_path / "run")
    assert found["b"]["intended_s"] == pytest.approx(found["a"]["done_s"])  # it was 0.5 s
    assert found["c"]["intended_s"] == pytest.approx(4.5)  # 9 s at twice the pace


def test_a_turn_after_a_rejected_one_is_still_an_arrival(tmp_path: Path) -> None:
    from aiohttp import web

    async def refuse_roots(server: Server, request: Any, body: Any) -> web.StreamResponse:
        if len(server.bodies) <= 2:
            error = {"error": {"message": "", "type": "", "param": None, "code": "queue_full"}}
            return web.json_response(error, status=429)
        return await answer(server, request, body)

    trace = list(sessions(2, turns=2))
    summary, _ = run_one(tmp_path / "run", trace, Server(behaviour=refuse_roots))
    assert summary.values["requests"] == len(trace)
    assert summary.values["rejected"] == {"queue_full": 2}
    assert summary.values["completed"] == len(trace) - 2


def test_a_rate_counts_all_requests_of_sessions(tmp_path: Path) -> None:
    trace = list(sessions(60, turns=3, gap_s=1.0))
    _, _ = run_one(tmp_path / "run", trace, arrivals=parse_arrivals("constant"), rate_per_s=12.0)
    found = kept(tmp_path / "run")
    roots = sorted(found[row.id]["intended_s"] for row in trace if not before(row))
    assert (len(roots) - 1) / (roots[-1] - roots[0]) == pytest.approx(12 * 60 / len(trace))


def test_a_closed_loop_keeps_so_many_sessions_and_pauses_between_them(tmp_path: Path) -> None:
    trace = list(sessions(9, turns=3))
    run_one(tmp_path / "run", trace, Server(first_s=1.0), arrivals=Arrivals("closed", 3),
            think_s=5.0)  # fmt: skip
    found = kept(tmp_path / "run")
    spans = []
    for number in range(9):
        own = [row for row in found.values() if row["session"] == f"s{number}"]
        spans.append((min(row["intended_s"] for row in own), max(row["done_s"] for row in own)))
    spans.sort()
    for start_s, _ in spans:
        assert sum(begin <= start_s < end for begin, end in spans) <= 3
    ends = sorted(end for _, end in spans)
    for start_s, _ in spans[3:]:
        assert min(abs(start_s - end - 5.0) for end in ends) < 1e-6


def test_a_closed_loop_of_single_requests_pauses_too(tmp_path: Path) -> None:
    trace = [TraceRequest(f"r{at}", 0.0, 32, 1) for at in range(6)]
    run_one(tmp_path / "run", trace, Server(first_s=1.0), arrivals=Arrivals("closed", 2),
            think_s=4.0)  # fmt: skip
    found = kept(tmp_path / "run")
    assert [found[f"r{at}"]["intended_s"] for at in range(6)] == pytest.approx(
        [0, 0, 5, 5, 10, 10], abs=0.01
    )


def test_a_row_that_waits_for_none_is_an_error() -> None:
    rows = [TraceRequest("a", 0.0, 9, 1, parent="b"), TraceRequest("b", 1.0, 9, 1)]
    with pytest.raises(InputError, match=r"t\.jsonl: row 1 \(id 'a'\) waits for 'b'"):
        link(rows, "t.jsonl")
    assert link(rows, "t.jsonl", lenient=True).roots == [0, 1]


async def words(server: Server, request: Any, body: Any) -> Any:
    """Answer `word-N` in two pieces; N counts the requests."""
    response = await stream(request)
    number = len(server.bodies)
    if "messages" in body:
        for piece in ("word-", str(number)):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            await response.write(event({"choices": [choice]}))
    else:
        await response.write(text(f" word-{number}"))
    await response.write(usage(9, 2) + event(b"[DONE]"))
    return response


def chat(*words: str) -> tuple[dict[str, str], ...]:
    roles = ("user", "assistant")
    return tuple({"role": roles[at % 2], "content": word} for at, word in enumerate(words))


CHAT = [
    TraceRequest("a", 0.0, 9, 2, messages=chat("hi"), session="s"),
    TraceRequest("b", 1.0, 9, 2, messages=chat("hi", "old", "more"), parent="a", think_s=0.1),
    TraceRequest(
        "c", 2.0, 9, 2, messages=chat("hi", "old", "more", "older", "end"), parent="b", think_s=0.1
    ),
]


def test_history_with_the_real_answers_of_a_chat(tmp_path: Path) -> None:
    _, server = run_one(tmp_path / "run", CHAT, Server(behaviour=words), history="answers")
    told = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert told == [
        ["hi"],
        ["hi", "word-1", "more"],
        ["hi", "word-1", "more", "word-2", "end"],
    ]


def test_history_as_in_the_trace(tmp_path: Path) -> None:
    _, server = run_one(tmp_path / "run", CHAT, Server(behaviour=words))
    assert [message["content"] for message in server.bodies[2]["messages"]] == [
        *("hi", "old", "more", "older", "end")
    ]


def test_history_with_the_real_answers_of_prompts_made_of_blocks(tmp_path: Path) -> None:
    trace = list(sessions(1, turns=3))
    _, server = run_one(tmp_path / "run", trace, Server(behaviour=words), history="answers")
    first, second, third = (body["prompt"] for body in server.bodies)
    assert second.startswith(first + " word-1")
    assert third.startswith(second + " word-2")
    added = trace[1].input_tokens - trace[0].input_tokens - trace[0].output_tokens
    assert len(second) == len(first + " word-1") + 4 * added


LLAMA = {"model": "llama-3-8b", "gpu": "h200"}


def test_sessions_hit_what_the_trace_can_hit_at_best(tmp_path: Path) -> None:
    """A turn that comes before the answer to the last one misses what is not computed yet."""
    trace = list(sessions(40, turns=6, gap_s=0.05))
    # One request at a time: far slower than the trace's own times.
    (waited,) = on_engine(tmp_path, trace, {}, **LLAMA, max_num_seqs=2)
    ideal = describe(trace).ideal_hit_ratio
    assert waited.values["completed"] == len(trace)
    assert waited.values["hit_ratio"] == pytest.approx(ideal, rel=0.01)


def test_real_answers_are_hits_of_the_next_turn(tmp_path: Path) -> None:
    trace = list(sessions(4, turns=4, output=128))
    (as_traced,) = on_engine(tmp_path / "trace", trace, {}, **LLAMA)
    (answered,) = on_engine(tmp_path / "real", trace, {"history": "answers"}, **LLAMA)
    # A real answer is in the engine's cache already.
    assert answered.values["hit_ratio"] > as_traced.values["hit_ratio"]


def test_interrupted_sessions_count_what_was_never_sent(tmp_path: Path) -> None:
    trace = list(sessions(6))
    summary, _ = run_one(tmp_path / "run", trace, Server(first_s=0.5), stop_at_s=(3.0,))
    values = summary.values
    assert values["ended"] == "interrupted"
    assert values["requests"] == len(trace)
    assert values["failed"]["never_sent"] == len(trace) - values["completed"] > 0


def test_a_duration_ends_sessions_without_a_word(tmp_path: Path) -> None:
    trace = list(sessions(6))
    summary, _ = run_one(tmp_path / "run", trace, duration_s=2.0)
    found = kept(tmp_path / "run")
    assert summary.values["failed"] == {}
    assert 0 < len(found) < len(trace)
    assert all(row["intended_s"] < 2.0 for row in found.values())


def test_run_json_says_how_turns_were_sent(tmp_path: Path) -> None:
    run_one(tmp_path / "run", list(sessions(2)))
    record = orjson.loads((tmp_path / "run" / "run.json").read_bytes())
    assert (record["turns"], record["history"], record["lengths"]) == ("wait", "trace", "exact")
    single = [replace(row, parent=None, waits_for=(), think_s=None) for row in sessions(2)]
    run_one(tmp_path / "other", single)
    record = orjson.loads((tmp_path / "other" / "run.json").read_bytes())
    assert record["turns"] == "trace"
