"""Find the tasks of a trace, and how long each took: `session.e2e`. Pure.

A task is a session with the sessions of its sub-agents. Its time is from when its first request was
due to the last output of its last answer. A task of which a request was rejected, failed or was
never sent has no time. A request without a session is part of no task.
"""

from collections.abc import Iterable, Mapping
from math import inf, nan

from forebay.traces.ground.schema import TraceRequest


class TaskNames:
    """Names the task of each request, asked in the order of the trace.

    A session whose first request waits for a request of another session belongs to that task.
    """

    def __init__(self) -> None:
        self._task_of: dict[str, str] = {}  # by session
        self._session_of: dict[str, str] = {}  # by request

    def name(self, row: TraceRequest) -> str | None:
        """Return the name of the session that the task began with, or None without a session."""
        session = row.session
        if session is None:
            return None
        self._session_of[row.id] = session
        if session not in self._task_of:
            awaited = (row.parent, *row.waits_for)
            starters = (self._session_of[id_] for id_ in awaited if id_ in self._session_of)
            starter = next(starters, session)
            self._task_of[session] = self._task_of.get(starter, session)
        return self._task_of[session]


def other_tasks(rows: Iterable[TraceRequest]) -> dict[str, str]:
    """Return the tasks by request id, of the requests whose task has not their session's name."""
    names, tasks = TaskNames(), dict[str, str]()
    for row in rows:
        task = names.name(row)
        if task is not None and task != row.session:
            tasks[row.id] = task
    return tasks


class TaskTimes:
    """The times of tasks, from requests in any order."""

    def __init__(self) -> None:
        self._first_due_s: dict[str, float] = {}
        self._last_end_s: dict[str, float] = {}

    def add(self, task: str | None, due_s: float | None, end_s: float | None) -> None:
        """Count a request.

        Args:
            due_s: second at which it was due; None if it never was.
            end_s: second of its last output; None if it has no complete answer.
        """
        if task is None:
            return
        self._first_due_s[task] = min(
            self._first_due_s.get(task, inf), inf if due_s is None else due_s
        )
        self._last_end_s[task] = max(
            self._last_end_s.get(task, -inf), inf if end_s is None else end_s
        )

    def seconds(self) -> dict[str, float]:
        """Return the time of each task, infinite without one."""
        dues_s = self._first_due_s
        return {
            task: inf if end_s == inf else end_s - dues_s[task]
            for task, end_s in self._last_end_s.items()
        }


def seconds_of_each(tasks: Iterable[str | None], times_s: Mapping[str, float]) -> list[float]:
    """Return for each request the time of its task, NaN if it is part of none."""
    return [nan if task is None else times_s[task] for task in tasks]
