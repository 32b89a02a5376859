"""Agents' tasks whose turns wait for answers, in virtual time: the mean time to the end of a task.

A trace with set times cannot show it: there, turns come although their last answers are missing.
Here a turn comes when the answers that it waits for have ended, plus the trace's pause. A rejected
client comes back at its Retry-After, and its task's time goes on meanwhile.

    python tests/bench/agent_tasks.py --policy forebay --policy cache_aware --load 2.5

The load is a share of what two engines complete when all requests are there at once and handed out
in turn, which finds little in caches. With warm caches they sustain a load of about 1.5.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import fsum, inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_policies import FOREBAY, MODELS, new_policy
from arena_workloads import ENGINE, Load, Rows
from guard_workloads import AGENTS

from forebay.replay.plan.agenda import link
from forebay.replay.plan.tasks import TaskTimes
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome, proxy_request
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.agents import agent_sessions, answer_s

ENGINES = 2
SESSIONS_PER_S = 0.2  # before they are brought to the load
LONGEST_S = 3_000.0  # more than any session takes in the trace
LONGEST_RETRY_S = 60.0


def linked(rows: Rows) -> Rows:
    """Link the turns of a trace that has only times, by the ids that `agent_sessions` gives."""
    by_id = {row.id: row for row in rows}
    helpers: dict[str, dict[str, str]] = defaultdict(dict)  # last request of each, by their starter
    for row in rows:
        starter, _, turn = row.id.rpartition("-")
        if starter.count("-") == 3:
            helpers[starter.rpartition("-")[0]][starter] = row.id
    found = Rows()
    for row in rows:
        agent, _, turn = row.id.rpartition("-")
        parent = f"{agent}-{int(turn) - 1}" if int(turn) else None
        waits_for = tuple(helpers[parent].values()) if parent in helpers else ()
        if parent is None and agent.count("-") == 3:
            waits_for = (agent.rpartition("-")[0],)
        before = [by_id[name] for name in (parent, *waits_for) if name]
        ends_s = [one.arrival_s + answer_s(one.output_tokens) for one in before]
        think_s = max(0.0, row.arrival_s - max(ends_s)) if before else None
        found.append(replace(row, parent=parent, waits_for=waits_for, think_s=think_s))
    return found


def tasks(load: float, sessions: int, seed: int) -> Rows:
    """Make whole sessions that begin so often that their requests come at the load."""
    spec = replace(
        AGENTS, session_rate_per_s=SESSIONS_PER_S, seed=seed,
        duration_s=sessions / SESSIONS_PER_S + LONGEST_S,
    )  # fmt: skip
    made = (row for row in agent_sessions(spec) if int(row.id.split("-")[1]) < sessions)
    rows = linked(list(made))
    starts_s: dict[str | None, float] = {}
    for row in rows:
        starts_s.setdefault(row.session, row.arrival_s)
    rate = len(rows) / max(starts_s.values())
    factor = rate / (load * capacity_per_s(rows, ENGINE, ENGINES))
    later = [
        replace(row, arrival_s=row.arrival_s - starts_s[row.session] * (1 - factor)) for row in rows
    ]
    return sorted(later, key=lambda row: row.arrival_s)


class TaskFleet(Fleet):
    """A fleet whose turns wait for answers."""

    def play(self, rows: Rows) -> None:
        self.rows, self._agenda = rows, link(rows, "tasks")
        self._places = {row.id: place for place, row in enumerate(rows)}
        self._due: list[tuple[float, int, int, str]] = []
        self._numbers = count()
        self._on_end = self._ended
        self.first_due_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.prompt_tokens = self.cached_tokens = self.rejections = 0
        for name, engine in self.engines.items():
            self._carry_out(self.policy.backend_up(name, 0.0, float(engine.kv_tokens)), 0.0)
        for root in self._agenda.roots:
            self._plan(rows[root].arrival_s, root, rows[root].id)
        self._play_events()
        while self._due:
            now, _, place, name = heappop(self._due)
            self._now = now
            self._arrive(replace(self.rows[place], id=name, arrival_s=now), place)
            self._play_events()

    def _plan(self, due_s: float, place: int, name: str) -> None:
        heappush(self._due, (due_s, next(self._numbers), place, name))

    def _arrive(self, row: TraceRequest, place: int) -> None:
        now = row.arrival_s
        self.first_due_s.setdefault(place, now)
        self._places[row.id] = place
        self._outcomes[row.id] = SimOutcome(row)
        self._carry_out(self.policy.arrive(proxy_request(row), now), now)

    def _ended(self, outcome: SimOutcome) -> None:
        place = self._places[outcome.request.id]
        if outcome.reject is not None:
            self.rejections += 1
            after_s = max(0.5, min(outcome.reject.retry_after_s, LONGEST_RETRY_S))
            self._plan(self._now + after_s, place, f"{self.rows[place].id} {self.rejections}")
            return
        end_s = outcome.finished_s
        assert end_s is not None
        self.end_s[place] = end_s
        self.prompt_tokens += outcome.request.input_tokens
        self.cached_tokens += outcome.cached_tokens
        for due_s, follower in self._agenda.ended(place, end_s):
            self._plan(max(due_s, self._now), follower, self.rows[follower].id)

    def _play_events(self) -> None:
        """Play all events before the next arrival, which an event can bring forward."""
        while True:
            until = self._due[0][0] if self._due else inf
            timer, wake = self._rounds[1], max(self.policy.wake_at(), self._now)
            if until <= min(timer.due, wake):
                return
            self._now = min(timer.due, wake)
            if wake < timer.due:
                self._carry_out(self.policy.wake(wake), wake)
            else:
                self._advance(timer, timer.due)


def play(policy: str, rows: Rows) -> dict[str, float]:
    """Play the tasks; returns seconds, shares and counts."""
    names = [f"gpu{number}" for number in range(ENGINES)]
    load = Load("agents", lambda seed, data: Rows(), 1.0)
    with new_policy(policy, load, ENGINE, names) as chosen:
        fleet = TaskFleet(chosen, {name: served_engine(ENGINE) for name in names})
        fleet.play(rows)
    times = TaskTimes()
    for place, row in enumerate(rows):
        times.add(row.session, fleet.first_due_s.get(place), fleet.end_s.get(place))
    seconds = sorted(times.seconds().values())
    return {
        "tasks": len(seconds),
        "mean_s": round(fsum(seconds) / len(seconds), 1),
        "p50_s": round(seconds[len(seconds) // 2], 1),
        "hit_ratio": round(fleet.cached_tokens / fleet.prompt_tokens, 3),
        "rejections": fleet.rejections,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", choices=(FOREBAY, *MODELS))
    parser.add_argument("--load", type=float, default=2.5)
    parser.add_argument("--sessions", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = tasks(options.load, options.sessions, options.seed)
    for policy in options.policy or (FOREBAY, *MODELS):
        print(json.dumps({"policy": policy, **play(policy, rows)}), flush=True)


if __name__ == "__main__":
    main()
