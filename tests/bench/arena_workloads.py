"""The workloads on which policies are compared: each from a seed, at a stated load.

Load is the mean rate as a share of what the engines complete when all of it is there at once and
handed out in turn (`capacity_per_s`; in a mixed fleet, the sum of what each completes). Time is
stretched to reach it, except where the times are part of the workload; no row is left out for it.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from overload import capacity, mix, poisson

from forebay.proxy.config.schema import Config
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import LLAMA_3_8B
from forebay.replay.sim.capacity import capacity_per_s, mixed_capacity_per_s
from forebay.replay.sim.workload import with_blocks
from forebay.traces.formats import open_trace
from forebay.traces.formats.readers.kv_cache_tester import interleaved, read_sessions
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload as Synth
from forebay.traces.synth.documents import workload
from forebay.traces.synth.popularity import Zipf
from forebay.traces.synth.ticks import spread_ticks

ENGINE = EngineConfig()
ENGINES = 2
CONTEXT = ENGINE.context
GPUS = ("h200", "h100", "l40s")
MIXED = tuple(replace(ENGINE, gpu=gpu) for gpu in GPUS)
# The shapes of Llama-3-8B with the longer context of gradientai/Llama-3-8B-Instruct-262k, and the
# proxy's default buckets, of which the last takes it.
LONG_CONTEXT = 262_144 + 32_768
LONG = EngineConfig(model=replace(LLAMA_3_8B, name="llama-3-8b-long", max_model_len=LONG_CONTEXT))
LONG_PROXY = Config.model_validate(
    {
        "buckets": [
            bucket.model_dump(exclude_unset=True) | {"up_to": up_to}
            for bucket, up_to in zip(Config().buckets, (5_000, LONG_CONTEXT), strict=True)
        ]
    }
)
Rows = list[TraceRequest]


@dataclass(frozen=True, slots=True)
class Load:
    """One workload.

    Attributes:
        make: the requests of a seed; the folder is that of the public data.
        share: of capacity that is offered on average.
        kind: what is wanted of it: `chat` beside long documents, `shared` documents, `overload`,
            `mixed` fleets, or `other`.
        data: it needs files that are not part of the project.
        engines: the options of each engine.
        proxy: the proxy's configuration.
        timed: its times are part of it; else they are stretched to reach `share`.
    """

    name: str
    make: Callable[[int, Path], Rows]
    share: float
    kind: str = "other"
    data: bool = False
    engines: tuple[EngineConfig, ...] = (ENGINE,) * ENGINES
    proxy: Config = field(default_factory=Config, compare=False)  # no hash
    timed: bool = False


def at_load(
    rows: Sequence[TraceRequest],
    share: float,
    engines: Sequence[EngineConfig] = (ENGINE,) * ENGINES,
) -> Rows:
    """The rows from 0 on, time stretched so that they come at `share` of capacity."""
    rows = [row for row in rows if row.input_tokens + row.output_tokens <= CONTEXT]
    start_s, end_s = rows[0].arrival_s, rows[-1].arrival_s
    rate = len(rows) / (end_s - start_s)
    if len(set(engines)) == 1:
        capacity_rate = capacity_per_s(rows, engines[0], len(engines))
    else:
        capacity_rate = mixed_capacity_per_s(rows, engines)
    factor = rate / (share * capacity_rate)
    return [replace(r, arrival_s=(r.arrival_s - start_s) * factor) for r in rows]


def window(rows: Iterable[TraceRequest], first: int, count: int) -> Rows:
    return list(islice(rows, first, first + count))


def mooncake(name: str, count: int, step: int) -> Callable[[int, Path], Rows]:
    def make(seed: int, data: Path) -> Rows:
        rows = open_trace(data / "traces" / f"mooncake_{name}_head.jsonl")
        if name == "conversation":
            rows = spread_ticks(rows, seed=seed)  # type: ignore[assignment]
        return window(rows, step * seed, count)

    return make


def azure(name: str, count: int, step: int) -> Callable[[int, Path], Rows]:
    def make(seed: int, data: Path) -> Rows:
        path = data / "traces" / f"AzureLLMInferenceTrace_{name}.csv"
        return window(open_trace(path), step * seed, count)

    return make


def agents(seed: int, data: Path) -> Rows:
    sessions = read_sessions(data / "traces" / "kv_cache_tester")
    return interleaved(sessions, start_gap_s=20.0, longest_gap_s=120.0, seed=seed)


def questions(name: str, order: str) -> Callable[[int, Path], Rows]:
    """Questions about documents as ZeroSCROLLS asks them: instruction, document, question."""

    def make(seed: int, data: Path) -> Rows:
        dice = random.Random(f"{seed}:{name}:{order}")
        texts = {row["doc_id"]: row["text"] for row in _lines(data / "docs" / f"{name}.docs.jsonl")}
        asked = list(_lines(data / "docs" / f"{name}.queries.jsonl"))
        if order == "shuffled":
            dice.shuffle(asked)
        elif order == "zipf":  # with replacement: a thousand questions, most about few documents
            groups = [[q for q in asked if q["doc_id"] == doc] for doc in texts]
            dice.shuffle(groups)
            popular = Zipf(len(groups), 1.0)
            asked = [dice.choice(groups[popular.draw(dice)]) for _ in range(1_000)]
        rows, at = Rows(), 0.0
        for number, row in enumerate(asked):
            at += dice.expovariate(1.0)
            text = (
                f"You are given a text and a question. Answer it.\n\n{texts[row['doc_id']]}"
                f"\n\nQuestion {number if order == 'zipf' else ''}: {row['query']}\nAnswer:"
            )
            output = max(1, len(row["ref_output"]) // 4)
            rows.append(
                with_blocks(TraceRequest(str(number), at, len(text) // 4, output, text=text))
            )
        return rows

    return make


def _lines(path: Path) -> Iterable[dict[str, str]]:
    with path.open() as file:
        yield from map(json.loads, file)


def beside(number_of_questions: int) -> Callable[[int, Path], Rows]:
    """Chat beside documents of 120,000 tokens, each asked about so often."""

    def make(seed: int, data: Path) -> Rows:
        spec = ChatBesideDocuments(
            chat_rate_per_s=4.0, document_rate_per_s=0.2, questions=number_of_questions,
            duration_s=600.0, seed=seed,
        )  # fmt: skip
        return list(chat_beside_documents(spec))

    return make


def popular(chat_share: float) -> Callable[[int, Path], Rows]:
    """Documents of 12,000 tokens in the median, of Zipf popularity, and some chat."""

    def make(seed: int, data: Path) -> Rows:
        spec = Synth(
            documents=100, zipf_s=1.0, chat_share=chat_share, rate_per_s=3.0, duration_s=None,
            requests=1_500, instruction_tokens=512, seed=seed,
        )  # fmt: skip
        return list(workload(spec))

    return make


def overload(factor: float) -> Load:
    """Nine chats to a document of 10,000 to 40,000 tokens, one in three of which came before."""

    def make(seed: int, data: Path) -> Rows:
        return poisson(mix, [(120.0, factor * capacity(mix))], seed)

    kind = "overload" if factor >= 1 else "other"
    return Load(f"overload {factor:g}x", make, factor, kind, timed=True)


def long_sessions(rate_per_s: float) -> Load:
    """Sessions of coding agents with contexts of 140,000 tokens in the median, on four engines."""

    def make(seed: int, data: Path) -> Rows:
        spec = AgentSessions(session_rate_per_s=rate_per_s, duration_s=2_400.0, seed=seed)
        return list(agent_sessions(spec))

    return Load(
        f"long agent sessions, {rate_per_s:g}/s", make, rate_per_s, "sessions",
        engines=(LONG,) * 4, proxy=LONG_PROXY, timed=True,
    )  # fmt: skip


LOADS = (
    Load("mooncake conversation", mooncake("conversation", 1_500, 900), 0.8, "other", True),
    Load("mooncake synthetic", mooncake("synthetic", 1_200, 180), 0.8, "shared", True),
    Load("azure code, bursts", azure("code", 2_500, 1_500), 0.3, "other", True),
    Load("azure conversation", azure("conv_head", 2_500, 1_700), 0.8, "other", True),
    Load("agent sessions", agents, 0.8, "shared", True),
    *(
        Load(f"{name.partition('-')[0]} {order}", questions(name, order), 0.8, "shared", True)
        for name in ("squality-dev", "qmsum-val")
        for order in ("grouped", "shuffled", "zipf")
    ),
    Load("chat beside 120k, shared", beside(5), 0.8, "chat"),
    Load("chat beside 120k, unshared", beside(1), 0.8, "chat"),
    Load("popular documents", popular(0.0), 0.8, "shared"),
    Load("popular documents, chat", popular(0.5), 0.8, "shared"),
    *(overload(factor) for factor in (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)),
    *(
        Load(f"mixed fleet of {len(engines)}, {name}", make, 0.8, "mixed", data, engines)
        for engines in (MIXED, MIXED * 2)
        for name, make, data in (
            ("popular documents, chat", popular(0.5), False),
            ("mooncake conversation", mooncake("conversation", 1_500, 900), True),
        )
    ),
    *(long_sessions(rate) for rate in (0.005, 0.01)),
)


def proxy_of(load: Load) -> Config:
    """The proxy's configuration for a workload."""
    backends = [{"url": "http://127.0.0.1"}]
    return Config.model_validate(
        {**load.proxy.model_dump(exclude_unset=True), "backends": backends}
    )


def rows_of(load: Load, seed: int, data: Path) -> Rows:
    rows = load.make(seed, data)
    return rows if load.timed else at_load(rows, load.share, load.engines)
