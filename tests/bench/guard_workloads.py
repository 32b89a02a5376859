"""The workloads of `make guard`: twelve kinds of traffic, each made from a seed.

A workload's requests are the same at each load; only their arrivals are closer together. At its
capacity each takes about two minutes. Capacity is what the engines complete a second when all
requests are there at once and handed out in turn.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, islice

from overload import mix, poisson

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.capacity import capacity_per_s
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions, answer_s
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload as Synth
from forebay.traces.synth.documents import workload
from forebay.traces.synth.lengths import Fixed, Length, Lognormal, Uniform

ENGINE = EngineConfig()
Rows = list[TraceRequest]
FIRST_BLOCK = 10**6  # of the first session; shared instructions have the ids below
SESSION_BLOCKS = 10**4


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """Sessions whose prompts grow from turn to turn, as a Poisson stream.

    Attributes:
        sessions_per_s: sessions that begin a second.
        systems: number of system prompts; a session has a random one of them.
        opening_tokens, reply_tokens: new input of the first turn, and of each turn after it.
        think_s: mean time from an answer to the next turn, exponential.
        questions: requests of a turn, which arrive together and share all but their last block.
    """

    sessions_per_s: float
    systems: int = 1
    system_tokens: int = 2_048
    opening_tokens: Length = field(default=Lognormal(300, 0.8, 20, 4_000))
    reply_tokens: Length = field(default=Lognormal(150, 0.8, 10, 2_000))
    output_tokens: Length = field(default=Lognormal(250, 0.6, 20, 1_500))
    turns: Length = field(default=Uniform(3, 9))
    think_s: float = 8.0
    questions: int = 1


def talks(spec: Talks, seed: int, end_s: float) -> Iterator[TraceRequest]:
    """Make the turns of all sessions that begin until `end_s`, in order of arrival."""
    dice, start_s, rows = random.Random(f"talks {seed}"), 0.0, Rows()
    for session in count():
        start_s += dice.expovariate(spec.sessions_per_s)
        if start_s > end_s:
            break
        rows += _session(spec, session, start_s, dice)
    rows.sort(key=lambda row: row.arrival_s)
    yield from (row for row in rows if row.arrival_s <= end_s)


def _session(
    spec: Talks, number: int, start_s: float, dice: random.Random
) -> Iterator[TraceRequest]:
    root = _ids(SESSION_BLOCKS * dice.randrange(spec.systems), spec.system_tokens // BLOCK_TOKENS)
    first_id, at_s = FIRST_BLOCK + SESSION_BLOCKS * number, start_s
    own_tokens, partial = spec.opening_tokens.draw(dice), first_id + SESSION_BLOCKS
    for turn in range(spec.turns.draw(dice)):
        blocks = root + _ids(first_id, own_tokens // BLOCK_TOKENS)
        prompt_tokens = len(blocks) * BLOCK_TOKENS + max(1, own_tokens % BLOCK_TOKENS)
        output_tokens = 0
        for question in range(spec.questions):
            partial -= 1
            output_tokens = spec.output_tokens.draw(dice)
            yield TraceRequest(
                f"{number}-{turn}-{question}", at_s, prompt_tokens, output_tokens,
                (*blocks, partial), session=str(number),
            )  # fmt: skip
        at_s += answer_s(output_tokens) + dice.expovariate(1 / spec.think_s)
        own_tokens += output_tokens + spec.reply_tokens.draw(dice)


def _ids(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


MINUTES_S = 600.0  # more than any workload takes
Make = Callable[[int, int], Iterable[TraceRequest]]


def rag(seed: int, scale: int) -> Iterable[TraceRequest]:
    return poisson(mix, [(200.0, 13.0 * scale)], seed)


def waves(seed: int, scale: int) -> Iterable[TraceRequest]:
    """Bursts of three times the mean rate for five seconds of twenty."""
    return poisson(mix, [(5.0, 39.0 * scale), (15.0, 4.3 * scale)] * 10, seed)


AGENTS = AgentSessions(
    session_rate_per_s=0.13, turns=Lognormal(16, 0.6, 2, 60), instruction_tokens=8_192,
    task_tokens=Lognormal(24_000, 0.6, 1_024, 60_000),
    tool_tokens=Lognormal(1_200, 1.0, 32, 12_000),
    output_tokens=Lognormal(300, 0.8, 8, 3_000), context_tokens=110_000, summary_tokens=20_480,
    duration_s=MINUTES_S,
)  # fmt: skip


def agents(seed: int, scale: int) -> Iterable[TraceRequest]:
    """Sessions of coding agents with contexts of 40,000 tokens in the median."""
    rate = AGENTS.session_rate_per_s * scale
    return agent_sessions(replace(AGENTS, session_rate_per_s=rate, seed=seed))


def beside(questions: int, chats_per_s: float, documents_per_s: float) -> Make:
    """Return the maker of chats beside documents of 120,000 tokens, each asked about so often."""
    return lambda seed, scale: chat_beside_documents(
        ChatBesideDocuments(
            chat_rate_per_s=chats_per_s * scale, document_rate_per_s=documents_per_s * scale,
            questions=questions, duration_s=MINUTES_S, seed=seed,
        )
    )  # fmt: skip


def synthetic(spec: Synth) -> Make:
    return lambda seed, scale: workload(
        replace(
            spec, seed=seed, rate_per_s=spec.rate_per_s * scale, documents=spec.documents * scale
        )
    )


def talking(spec: Talks) -> Make:
    return lambda seed, scale: talks(
        replace(spec, sessions_per_s=spec.sessions_per_s * scale, systems=spec.systems * scale),
        seed,
        MINUTES_S,
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic.

    Attributes:
        make: makes requests of a seed, at so many times the rate of two engines.
        requests: number of requests on two engines.
        skip: requests before those, while sessions build up.
        flag: it is also played with --long-prefill-token-threshold.
        wide: it is also played on eight engines.
    """

    make: Make
    requests: int
    skip: int = 0
    flag: bool = False
    wide: bool = False


KINDS = {
    "rag": Kind(rag, 1_700, flag=True, wide=True),
    "conversation": Kind(
        talking(
            Talks(
                sessions_per_s=1.2, system_tokens=512,
                opening_tokens=Lognormal(3_000, 1.0, 100, 40_000),
                reply_tokens=Lognormal(1_200, 1.0, 20, 12_000),
                output_tokens=Lognormal(300, 0.6, 20, 1_500), think_s=15.0,
            )
        ), 800, 400, flag=True, wide=True,
    ),
    "shared documents": Kind(beside(5, 6.7, 0.33), 600, flag=True),
    "unshared 120k": Kind(beside(1, 2.8, 0.14), 400, flag=True, wide=True),
    "popular documents": Kind(
        synthetic(
            Synth(
                documents=100, zipf_s=1.0, chat_share=0.5, rate_per_s=13.0, duration_s=None,
                requests=10_000, instruction_tokens=512,
            )
        ), 1_600, flag=True,
    ),
    "multi-turn": Kind(talking(Talks(sessions_per_s=4.2, systems=8)), 3_000, 1_000, wide=True),
    "fan-out": Kind(
        talking(
            Talks(
                sessions_per_s=0.23, systems=4,
                opening_tokens=Lognormal(20_000, 0.4, 6_000, 60_000),
                reply_tokens=Lognormal(1_000, 0.6, 100, 5_000),
                output_tokens=Lognormal(300, 0.5, 50, 1_000), turns=Uniform(1, 3), questions=12,
            )
        ), 700,
    ),
    "handbook": Kind(
        synthetic(
            Synth(
                documents=1, document_tokens=Fixed(24_576), rate_per_s=8.0, duration_s=None,
                question_tokens=Lognormal(100, 0.6, 20, 500), requests=10_000,
                output_tokens=Lognormal(250, 0.6, 20, 1_000),
            )
        ), 1_000,
    ),
    "agents": Kind(agents, 350, 150, flag=True),
    "reasoning": Kind(
        synthetic(
            Synth(
                chat_share=1.0, documents=1, rate_per_s=8.5, duration_s=None, requests=10_000,
                chat_tokens=Lognormal(600, 0.8, 50, 4_000),
                chat_output_tokens=Lognormal(1_500, 0.6, 200, 5_000),
            )
        ), 1_000,
    ),
    "waves": Kind(waves, 1_700, flag=True),
    "chats": Kind(
        synthetic(
            Synth(
                chat_share=1.0, documents=1, rate_per_s=40.0, duration_s=None, requests=40_000
            )
        ), 4_800,
    ),
}  # fmt: skip


@lru_cache(8)
def rows_at_capacity(name: str, engines: int, seed: int) -> Rows:
    """The requests of a workload, at the rate that the engines complete at most."""
    kind, scale = KINDS[name], engines // 2
    made, first = kind.make(seed, scale), kind.skip * scale
    return at_load(list(islice(made, first, first + kind.requests * scale)), 1.0, engines)


def at_load(rows: Sequence[TraceRequest], share: float, engines: int = 2) -> Rows:
    """The rows from 0 on, time stretched so that they come at `share` of capacity."""
    rows = [row for row in rows if row.input_tokens + row.output_tokens <= ENGINE.context]
    start_s, end_s = rows[0].arrival_s, rows[-1].arrival_s
    rate = len(rows) / (end_s - start_s)
    factor = rate / (share * capacity_per_s(rows, ENGINE, engines))
    return [replace(r, arrival_s=(r.arrival_s - start_s) * factor) for r in rows]
