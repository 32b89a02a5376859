"""Two and four proxies in front of simulated engines do nearly as well as one."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from stages.shared_fleet import Result, play

from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, proxy_request
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.lengths import Lognormal

SEEDS = (1, 2, 3)
BUCKETS = [
    Bucket("chat", 5_000, max_wait_s=2.0),
    Bucket("document", 131_072, max_queue=64, max_wait_s=30.0, prefills_per_backend=1),
]


def shapers(slots: int = 64) -> Callable[[list[str]], Shaper]:
    return lambda names: Shaper([BackendSpec(name, slots) for name in names], BUCKETS)


def a_trace(
    seed: int, engines: int = 2, chat: float = 2.0, documents: float = 0.175, seconds: float = 600.0
) -> list[TraceRequest]:
    """Chats beside documents of 40k tokens or so, asked about five times each; rates an engine."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=chat * engines,
        document_rate_per_s=documents * engines,
        document_tokens=Lognormal(40_000, 0.6, 8_000, 110_000),
        instruction_tokens=1_000,
        duration_s=seconds,
        seed=seed,
    )
    return list(chat_beside_documents(spec))


@pytest.mark.parametrize(
    ("proxies", "engines", "seconds", "seeds"),
    [(2, 2, 600.0, SEEDS), (4, 4, 300.0, range(1, 9))],
)
@pytest.mark.timeout(600)  # a minute of work, on a machine that may be busy
def test_hits_and_balance_are_those_of_one_proxy(
    proxies: int, engines: int, seconds: float, seeds: Sequence[int]
) -> None:
    """Over the seeds within 5 %. One seed is a handful of documents: of four proxies 1 to 6 %."""
    one: list[Result] = []
    several: list[Result] = []
    for seed in seeds:
        trace = a_trace(seed, engines, seconds=seconds)
        one.append(play(trace, shapers(), proxies=1, engines=engines, seed=seed))
        several.append(play(trace, shapers(), proxies=proxies, engines=engines, seed=seed))
    hits = [sum(r.hit_ratio for r in results) / len(seeds) for results in (one, several)]
    balance = [sum(r.imbalance for r in results) / len(seeds) for results in (one, several)]
    assert hits[1] >= 0.95 * hits[0], hits
    # Four proxies see each other's sends a tenth of a second late: within the guard at least.
    assert balance[1] <= max(1.05 * balance[0], 1.2), balance
    assert all(r.rejected < 0.01 for r in several)


def test_in_flight_is_over_the_limit_by_what_a_tenth_of_a_second_brings() -> None:
    overshoot = 0
    for seed in SEEDS:
        trace = a_trace(seed, chat=8.0, documents=0.05, seconds=120.0)
        told = play(trace, shapers(slots=6), proxies=2, engines=2, seed=seed).policy
        overshoot += told.overshoot
        assert told.unexplained <= 0
        strangers = play(trace, shapers(slots=6), proxies=2, engines=2, seed=seed, exchange=False)
        assert strangers.policy.unexplained > 0
    assert overshoot > 0, "the limit was never reached: the test says nothing"


def test_one_proxy_among_several_decides_as_the_plain_simulator() -> None:
    trace = a_trace(1, seconds=120.0)
    journals: list[list[tuple[str | None, float | None]]] = []
    for run in range(2):
        if run:
            outcomes = play(trace, shapers(), proxies=1, engines=2).outcomes
        else:
            engines = {f"gpu{i}": served_engine(EngineConfig()) for i in range(2)}
            outcomes = Fleet(shapers()(list(engines)), engines).run(trace)
        journals.append([(o.backend, o.sent_s) for o in outcomes])
    assert journals[0] == journals[1]


def test_a_proxy_that_joins_and_leaves_is_as_if_it_had_never_been() -> None:
    """The departed proxy leaves no trace: the same decisions from then on."""
    shaper, fresh = shapers()(["gpu0", "gpu1"]), shapers()(["gpu0", "gpu1"])
    other = shapers()(["gpu0", "gpu1"])
    for one in (shaper, fresh, other):
        for name in ("gpu0", "gpu1"):
            one.backend_up(name, 0.0, 200_000.0)
    rows = a_trace(2, seconds=30.0)
    for row in rows[:20]:
        other.arrive(proxy_request(row), 0.0)
    shaper.peering.reported("other", other.peering.report(0.0), 0.0)
    assert shaper.backends["gpu0"].prefill_queue.backlog_s(0.0) > 0
    shaper.peering.gone("other", 0.5)
    for row in rows:
        at = 1.0 + row.arrival_s
        assert shaper.arrive(proxy_request(row), at) == fresh.arrive(proxy_request(row), at)


@cache
def agents() -> tuple[list[TraceRequest], float]:
    """A trace of agents, and the hit ratio that one proxy reaches with it: 0.81."""
    sessions = AgentSessions(
        session_rate_per_s=0.2, turns=Lognormal(12, 0.6, 2, 40), instruction_tokens=8_192,
        task_tokens=Lognormal(24_000, 0.6, 1_024, 60_000), context_tokens=110_000,
        summary_tokens=20_480,
        duration_s=150.0, seed=1,
    )  # fmt: skip
    trace = list(agent_sessions(sessions))
    return trace, play(trace, shapers(), proxies=1, engines=4, seed=1).hit_ratio


@pytest.mark.parametrize(("proxies", "least"), [(4, 0.98), (8, 0.97)])
@pytest.mark.timeout(600)
def test_turns_of_agents_find_their_caches_through_any_proxy(proxies: int, least: float) -> None:
    """Each turn comes through a proxy by chance, and most did not see the turn before it.

    Without the hashes of computed prompts in the reports, four proxies reach 0.70 and eight 0.63.
    """
    trace, alone = agents()
    several = play(trace, shapers(), proxies=proxies, engines=4, seed=1).hit_ratio
    assert several >= least * alone, (alone, several)
