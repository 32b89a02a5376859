"""The time of a task: from the first request of a session to the end of its last answer."""

from math import inf, isnan

import pytest

from forebay.replay.plan.slo import SESSION, Slo, meets, parse_slos
from forebay.replay.plan.tasks import TaskNames, TaskTimes, other_tasks, seconds_of_each
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest


def row(name: str, session: str | None, **links: object) -> TraceRequest:
    return TraceRequest(name, 0.0, 10, 10, session=session, **links)  # type: ignore[arg-type]


def test_a_task_lasts_to_the_end_of_its_last_answer() -> None:
    times = TaskTimes()
    times.add("a", 10.0, 12.0)
    times.add("a", 4.0, 5.5)  # in any order
    times.add("b", 1.0, 2.0)
    times.add(None, 0.0, 99.0)
    assert times.seconds() == {"a": 8.0, "b": 1.0}


def test_an_unanswered_request_leaves_its_task_without_a_time() -> None:
    times = TaskTimes()
    times.add("a", 1.0, 2.0)
    times.add("a", 3.0, None)
    times.add("b", None, None)  # never due
    assert times.seconds() == {"a": inf, "b": inf}
    of_each = seconds_of_each(["a", None, "b"], times.seconds())
    assert of_each[0] == of_each[2] == inf
    assert isnan(of_each[1])


def test_sessions_of_sub_agents_belong_to_the_task_that_started_them() -> None:
    rows = [
        row("1", "main"),
        row("2", "helper", waits_for=("1",)),
        row("3", "helper's", waits_for=("2",)),
        row("4", "main", parent="1", waits_for=("2",)),
        row("5", "other"),
        row("6", None),
    ]
    names = TaskNames()
    assert [names.name(one) for one in rows] == ["main", "main", "main", "main", "other", None]
    assert other_tasks(rows) == {"2": "main", "3": "main"}


def test_the_target_is_read_and_written() -> None:
    (slo,) = parse_slos("session.e2e=5m", ["chat"])
    assert slo == Slo(None, SESSION, 300.0)
    assert parse_slos(str(slo), []) == (slo,)
    assert meets([slo], "chat", {"ttft": 9.0})  # the task is judged, not its request


@pytest.mark.parametrize("text", ["session.ttft=2s", "e2e.session=2s", "chat.session.e2e=2s"])
def test_no_other_target_is_of_sessions(text: str) -> None:
    with pytest.raises(InputError, match="--slo: no "):
        parse_slos(text, ["chat"])
