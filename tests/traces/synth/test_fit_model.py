"""A trace made from a model has the rate, length, hits and lengths of the fitted one."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from forebay.traces.edit.describe import Description, describe
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload, workload
from forebay.traces.synth.fit_model import fit
from forebay.traces.synth.from_model import synthesise
from forebay.traces.synth.lengths import Fixed
from forebay.traces.synth.model import TrafficModel, read_model, write_model

Trace = list[TraceRequest]


def chat_and_documents() -> Trace:
    return list(chat_beside_documents(ChatBesideDocuments(duration_s=300.0)))


def users_with_documents() -> Trace:
    spec = Workload(
        users=20,
        think_s=60.0,
        arrivals="poisson",
        chat_share=0.3,
        document_tokens=Fixed(20_000),
        duration_s=7_200.0,
        requests=None,
    )
    return list(workload(spec))


def table_of_users() -> Trace:
    """Make 20 users, some of whom ask ten times as often as others, and no block ids."""
    dice = Random(1)
    rows = []
    for user in range(20):
        rate = 0.33 / 20 * dice.lognormvariate(0, 0.7)
        at_s = dice.expovariate(rate)
        while at_s < 7_200:
            rows.append((at_s, dice.randint(100, 3_000), dice.randint(10, 400), f"user-{user}"))
            at_s += dice.expovariate(rate)
    return [
        TraceRequest(f"r{at}", when, input_tokens, output_tokens, session=user)
        for at, (when, input_tokens, output_tokens, user) in enumerate(sorted(rows))
    ]


def agents() -> Trace:
    return list(agent_sessions(AgentSessions(session_rate_per_s=0.02, duration_s=3_600.0)))


LONG_LIVED = (chat_and_documents, users_with_documents, table_of_users, agents)


@cache
def known(make: Callable[[], Trace]) -> tuple[Trace, TrafficModel, Description]:
    """Return a trace, its model and its description."""
    rows = make()
    return rows, fit(rows), describe(rows)


def saved(model: TrafficModel, folder: Path) -> TrafficModel:
    path = folder / "model.json"
    path.write_bytes(write_model(model))
    return read_model(path)


@pytest.mark.parametrize("make", LONG_LIVED)
@pytest.mark.parametrize("repetitions", [1, 5])
def test_traffic_of_long_lived_sessions_is_made_again(
    make: Callable[[], Trace], repetitions: int, tmp_path: Path
) -> None:
    rows, fitted, wanted = known(make)
    model = saved(fitted, tmp_path)
    duration_s = None if repetitions == 1 else repetitions * model.duration_s
    found = describe(synthesise(model, duration_s=duration_s, seed=1))
    assert found.requests == pytest.approx(repetitions * len(rows), rel=0.04)
    assert found.duration_s == pytest.approx(repetitions * wanted.duration_s, rel=0.03)
    assert found.ideal_hit_ratio == pytest.approx(wanted.ideal_hit_ratio, abs=0.02)
    assert found.input_tokens.mean == pytest.approx(wanted.input_tokens.mean, rel=0.04)
    assert found.output_tokens.mean == pytest.approx(wanted.output_tokens.mean, rel=0.04)
    assert found.sessions == pytest.approx(repetitions * wanted.sessions, rel=0.15)


def test_a_number_of_requests_keeps_the_rate() -> None:
    rows = table_of_users()
    found, wanted = describe(synthesise(fit(rows), requests=4_000)), describe(rows)
    assert found.requests == 4_000
    assert found.rate_per_s == pytest.approx(wanted.rate_per_s, rel=0.05)


@pytest.mark.parametrize("speed", [0.5, 3.0])
def test_speed_changes_the_number_of_long_lived_sessions(speed: float) -> None:
    rows = users_with_documents()
    made = list(synthesise(fit(rows), speed=speed))
    assert len(made) == pytest.approx(speed * len(rows), rel=0.05)
    assert len({one.session for one in made}) == 20 * speed


def test_users_who_are_there_all_day_keep_its_shape() -> None:
    """Ten users ask once in 100 s in the first half of a day, and ten times as often then."""
    dice = Random(0)
    times = []
    for user in range(10):
        at_s = dice.uniform(0, 100)
        while at_s < 8_000:
            times.append((at_s, f"user-{user}"))
            at_s += dice.expovariate(0.01 if at_s < 4_000 else 0.1)
    rows = [TraceRequest(f"r{n}", at_s, 100, 5, session=u) for n, (at_s, u) in
            enumerate(sorted(times))]  # fmt: skip
    made = list(synthesise(fit(rows), seed=2))
    for begin_s in range(0, 8_000, 2_000):
        wanted, found = (
            sum(begin_s <= one.arrival_s < begin_s + 2_000 for one in trace)
            for trace in (rows, made)
        )
        assert found == pytest.approx(wanted, rel=0.2)
    gaps = [other.arrival_s - one.arrival_s for one, other in pairwise(made)]
    assert max(gaps) < 100


@pytest.mark.parametrize("linked", [False, True])
def test_a_turn_waits_for_the_one_before_only_if_it_did(linked: bool) -> None:
    rows = [
        TraceRequest(f"r{n}", float(n), 100, 5, session=f"user-{n % 4}",
                     parent=f"r{n - 4}" if linked and n >= 4 else None,
                     think_s=2.0 if linked and n >= 4 else None)
        for n in range(400)
    ]  # fmt: skip
    made = list(synthesise(fit(rows)))
    assert sum(one.parent is not None for one in made) == (396 if linked else 0)
    thinks = [one.think_s for one in made if one.parent]
    assert all(think_s is not None and think_s <= 2.0 for think_s in thinks)


def test_short_sessions_are_made_as_often_as_before() -> None:
    dice = Random(5)
    times: list[tuple[float, str]] = []
    start_s = 0.0
    for name in range(500):
        start_s += dice.expovariate(0.1)
        times += [(start_s + 10.0 * turn, f"s{name}") for turn in range(1 + name % 5)]
    rows = [TraceRequest(f"r{n}", at_s, 100, 5, session=session) for n, (at_s, session) in
            enumerate(sorted(times))]  # fmt: skip
    model = fit(rows)
    assert (model.long_sessions, len(model.first)) == (0, 500)
    found = describe(synthesise(model, seed=1))
    assert found.requests == pytest.approx(len(rows), rel=0.1)
    assert found.duration_s == pytest.approx(rows[-1].arrival_s, rel=0.02)


def test_one_endless_session_has_a_rate() -> None:
    rows = [TraceRequest(f"r{n}", 2.0 * n, 100, 5, session="batch") for n in range(50)]
    assert len(list(synthesise(fit(rows)))) == 50
    with pytest.raises(InputError, match="fewer than two requests at different times"):
        fit(rows[:1])
