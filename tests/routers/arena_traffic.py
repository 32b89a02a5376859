"""The traffic of the side-by-side runs: public traces, document questions, chat beside documents.

Every trace is cut so that its arrivals last `window_s` seconds at the wanted share of capacity,
capacity being what the engines complete a second when the whole cut is there at once
(`replay/sim/capacity.py`). Its text is the same in every process. For traces that are files a seed
is where the cut begins; for made ones it is the seed. Missing data is an InputError that says so.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.capacity import capacity_per_s
from forebay.replay.slo import DEFAULT_SLO_S
from forebay.traces.errors import InputError
from forebay.traces.formats import open_trace
from forebay.traces.jsonl import row_bytes
from forebay.traces.kv_cache_tester import interleaved, read_sessions
from forebay.traces.lengths import Fixed, Lognormal
from forebay.traces.mooncake import spread_ticks
from forebay.traces.schema import TraceRequest
from forebay.traces.sharing import IdealCache
from forebay.traces.synth import Workload as Made
from forebay.traces.synth import shared_document, workload
from forebay.traces.synth_mix import ChatBesideDocuments, chat_beside_documents
from forebay.traces.zeroscrolls import Sample
from forebay.traces.zeroscrolls_trace import ordered

SLO = ",".join(f"{name}.ttft={limit_s:g}s" for name, limit_s in DEFAULT_SLO_S.items())
PROBED = 400  # requests from which the length of the cut is guessed
PROBED_REAL = 64  # requests from which the capacity of real engines is taken
Source = Callable[[int, Path], Sequence[TraceRequest]]


@dataclass(frozen=True, slots=True)
class Course:
    """One workload.

    Attributes:
        source: the requests for a seed and the folder of public data.
        load: share of capacity; None replays the times as they are.
        window_s: how long arrivals go on.
        time_scale: the most it may be run at: many small streams cost the machine more.
        core: among the first to be measured.
        group: workloads of one kind, together in the table.
    """

    name: str
    about: str
    source: Source
    load: float | None = 0.8
    window_s: float = 60.0
    slo: str = SLO
    time_scale: float = 8.0
    core: bool = False
    group: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A course for one seed, ready to be sent; `context` is the most tokens of a request."""

    name: str
    requests: tuple[TraceRequest, ...]
    slo: str
    context: int
    capacity_per_s: float | None

    @property
    def sha256(self) -> str:
        """The first 12 hex digits, of the rows as Forebay's own format writes them."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(row_bytes(request))
        return digest.hexdigest()[:12]

    @property
    def ideal_hit_ratio(self) -> float:
        """Of one infinite cache for all engines, every prompt being in it once it was sent."""
        cache = IdealCache()
        hits = sum(cache.look_up(request).hit_tokens for request in self.requests)
        return hits / sum(request.input_tokens for request in self.requests)


def prepare(course: Course, seed: int, data: Path, model: str, gpu: str, engines: int) -> Traffic:
    """`course` for simulated engines; raises InputError where its data is missing."""
    config = EngineConfig(model=model, gpu=gpu)
    rows = [_fitting(row, config.context) for row in course.source(seed, data)]
    if course.load is None:
        return Traffic(course.name, _from_zero(rows, 1.0), course.slo, config.context, None)
    cut = rows[: _count(course, capacity_per_s(_counted(rows[:PROBED]), config, engines))]
    capacity = capacity_per_s(_counted(cut), config, engines)
    return Traffic(course.name, at_rate(cut, course.load * capacity), course.slo, config.context,
                   capacity)  # fmt: skip


def prepare_real(
    course: Course,
    seed: int,
    data: Path,
    context: int,
    capacity_of: Callable[[Sequence[TraceRequest]], float],
) -> Traffic:
    """`course` for real engines: `capacity_of` asks them what they complete a second."""
    rows = [_fitting(row, context) for row in course.source(seed, data)]
    if course.load is None:
        return Traffic(course.name, _from_zero(rows, 1.0), course.slo, context, None)
    capacity = capacity_of(rows[:PROBED_REAL])
    cut = rows[: _count(course, capacity)]
    return Traffic(course.name, at_rate(cut, course.load * capacity), course.slo, context, capacity)


def at_rate(rows: Sequence[TraceRequest], rate_per_s: float) -> tuple[TraceRequest, ...]:
    """The rows with their times divided so that they come at `rate_per_s` on average."""
    if len(rows) < 2 or rows[-1].arrival_s <= rows[0].arrival_s:
        raise InputError("a trace that is to be sent at a rate needs two arrivals at least")
    offered = (len(rows) - 1) / (rows[-1].arrival_s - rows[0].arrival_s)
    return _from_zero(rows, rate_per_s / offered)


def _from_zero(rows: Sequence[TraceRequest], speed: float) -> tuple[TraceRequest, ...]:
    first_s = rows[0].arrival_s
    return tuple(
        replace(row, arrival_s=round((row.arrival_s - first_s) / speed, 6)) for row in rows
    )


def _count(course: Course, capacity: float) -> int:
    assert course.load is not None
    return max(20, round(course.load * capacity * course.window_s))


def _fitting(row: TraceRequest, context: int) -> TraceRequest:
    """As `forebay replay --too-long truncate` would shorten it, so that both agree."""
    from forebay.replay.source import fit

    return fit(row, context - 64, "truncate") or row  # a chat's own tokens come on top


def _counted(rows: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Rows whose text is told as block ids, so that virtual engines see what is shared."""
    return [row if row.text is None else replace(row, text=None, blocks=_ids(row), block_tokens=16)
            for row in rows]  # fmt: skip


def _ids(row: TraceRequest) -> tuple[int, ...]:
    data, ids, key = (row.text or "").encode(), [], b""
    per_block = max(1.0, len(data) * 16 / row.input_tokens)
    for number in range(-(-row.input_tokens // 16)):
        piece = data[round(number * per_block) : round((number + 1) * per_block)]
        key = hashlib.blake2b(key + piece, digest_size=8).digest()
        ids.append(int.from_bytes(key, "big"))
    return tuple(ids)


def _file(name: str, ticks: bool = False, step_s: float = 120.0) -> Source:
    """A public trace from `seed * step_s` seconds on."""

    def source(seed: int, data: Path) -> Sequence[TraceRequest]:
        path = data / "traces" / name
        rows = list(open_trace(_there(path)))
        if ticks:
            rows = list(spread_ticks(rows, seed=0))
        later = [row for row in rows if row.arrival_s >= seed * step_s]
        if len(later) < PROBED:
            raise InputError(f"{path}: too short for seed {seed}; use seeds below that")
        return later

    return source


def _sessions(seed: int, data: Path) -> Sequence[TraceRequest]:
    sessions = read_sessions(_there(data / "traces" / "kv_cache_tester"))
    return interleaved(sessions, start_gap_s=5.0, longest_gap_s=20.0, seed=seed)


def _questions(task: str, order: str) -> Source:
    """Questions about real documents, as the ZeroSCROLLS chat prompt has them, at even gaps."""

    def source(seed: int, data: Path) -> Sequence[TraceRequest]:
        samples, answers = _samples(task, data / "docs")
        rows = []
        for number, sample in enumerate(ordered(samples, order, seed=seed, zipf_s=1.0)):
            rows.append(
                TraceRequest(
                    id=f"{task}/{sample.id}",
                    arrival_s=float(number),
                    input_tokens=max(1, len(sample.input.encode()) // 4),
                    output_tokens=answers[sample.id],
                    text=sample.input,
                    document=sample.document_sha256()[:16],
                )
            )
        return _jittered(rows, seed)

    return source


def _jittered(rows: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    from forebay.traces.arrivals import arrival_times

    times = arrival_times("poisson", 1.0, seed)
    return [replace(row, arrival_s=at_s) for row, at_s in zip(rows, times, strict=False)]


INSTRUCTIONS = {
    "squality": "You are given a story and a question. Answer the question in a paragraph.",
    "qmsum": "You are given a meeting transcript and a query. Answer it in a few sentences.",
}


def _samples(task: str, folder: Path) -> tuple[list[Sample], dict[str, int]]:
    """Samples in file order, and the length of each reference answer in tokens."""
    name = {"squality": "squality-dev", "qmsum": "qmsum-val"}[task]
    documents = {row["doc_id"]: row["text"] for row in _json_lines(folder / f"{name}.docs.jsonl")}
    samples, answers = [], {}
    for row in _json_lines(folder / f"{name}.queries.jsonl"):
        head = f"{INSTRUCTIONS[task]}\n\nDocument:\n"
        text = documents[row["doc_id"]]
        tail = f"\n\nQuestion:\n{row['query']}"
        end = len(head) + len(text)
        samples.append(
            Sample(task, row["id"], head + text + tail, len(head), end, end, end + len(tail), "")
        )
        answers[row["id"]] = max(16, len(row["ref_output"].encode()) // 4)
    return samples, answers


def _json_lines(path: Path) -> list[dict[str, str]]:
    return [orjson.loads(line) for line in _there(path).read_bytes().splitlines() if line.strip()]


def _there(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path}: not there; give the folder of the public traces with --data")
    return path


def _beside(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.15, questions=5, duration_s=900.0, seed=seed
    )
    return list(chat_beside_documents(spec))


def _shared(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = Made(
        users=50, documents=16, zipf_s=1.0,
        document_tokens=Lognormal(30_000, 0.6, 10_000, 100_000), chat_share=0.4,
        instruction_tokens=1_024, rate_per_s=2.0, duration_s=None, requests=3_000, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def _fifty(seed: int, data: Path) -> Sequence[TraceRequest]:
    return list(
        shared_document(users=50, document_tokens=60_000, arrivals="poisson", rate_per_s=10.0,
                        instruction_tokens=1_024, seed=seed)
    )  # fmt: skip


def _small_beside(seed: int, data: Path) -> Sequence[TraceRequest]:
    """The same for a model whose context is 16k, on a CPU."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=4.0, document_rate_per_s=0.5, questions=5, follow_gap_s=6.0,
        document_tokens=Fixed(14_000), chat_tokens=Lognormal(400, 0.6, 50, 2_000),
        chat_output_tokens=Lognormal(60, 0.5, 8, 150), output_tokens=Fixed(32),
        duration_s=600.0, seed=seed,
    )  # fmt: skip
    return list(chat_beside_documents(spec))


def _small_shared(seed: int, data: Path) -> Sequence[TraceRequest]:
    spec = Made(
        users=50, documents=12, zipf_s=1.0,
        document_tokens=Lognormal(8_000, 0.3, 5_500, 12_000), chat_share=0.4,
        chat_tokens=Lognormal(400, 0.6, 50, 2_000), chat_output_tokens=Lognormal(60, 0.5, 8, 150),
        output_tokens=Fixed(32), instruction_tokens=1_024, rate_per_s=2.0, duration_s=None,
        requests=2_000, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def _small_fifty(seed: int, data: Path) -> Sequence[TraceRequest]:
    return list(
        shared_document(users=50, document_tokens=14_000, output_tokens=32, arrivals="poisson",
                        rate_per_s=10.0, instruction_tokens=1_024, seed=seed)
    )  # fmt: skip


def _overload(load: float, core: bool = False) -> Course:
    return Course(
        f"overload {load:g}x", f"the same traffic at {load:g} times capacity", _beside, load,
        window_s=60.0 if load <= 1 else 40.0, core=core, group="overload",
    )  # fmt: skip


def _task(task: str, order: str, what: str) -> Course:
    return Course(
        f"{task} {order}", f"{what}, {order}, at 80 % load", _questions(task, order),
        window_s=40.0, slo="chat.ttft=2s,document.ttft=5s", group="questions",
    )  # fmt: skip


def _simulated() -> Sequence[Course]:
    squality = "SQuALITY: 125 questions about 25 stories"
    qmsum = "QMSum: 272 questions about 35 meetings"
    return (
        Course(
            "documents", "chat beside 120k-token documents, five questions each, at 80 % load",
            _beside, core=True, group="mix",
        ),
        Course(
            "shared documents", "50 users, 16 documents of 10k-100k tokens (Zipf 1.0), 40 % chat, "
            "a common instruction of 1,024 tokens, at 80 % load",
            _shared, core=True, group="mix",
        ),
        _overload(1.5, core=True),
        Course(
            "mooncake synthetic", "the RAG-like production trace, a minute of it, at 80 % load",
            _file("mooncake_synthetic_head.jsonl", step_s=60.0), core=True, group="traces",
        ),
        Course(
            "fifty users", "50 users ask about one 60k-token document within 5 s, caches empty",
            _fifty, load=None, group="mix",
        ),
        Course(
            "mooncake conversation", "the chat production trace, ticks spread, at 80 % load",
            _file("mooncake_conversation_head.jsonl", ticks=True), group="traces",
        ),
        Course(
            "azure code", "bursts (CV 13) of code completions at half of capacity",
            _file("AzureLLMInferenceTrace_code.csv", step_s=300.0), load=0.5, window_s=40.0,
            time_scale=1.0, group="traces",
        ),
        Course(
            "kv-cache-tester", "coding-agent sessions to 131k tokens, pauses cut at 20 s, at "
            "80 % load", _sessions, group="traces",
        ),
        _task("squality", "zipf", squality),
        _task("qmsum", "shuffled", qmsum),
        _overload(2.0),
        _overload(1.0),
        _overload(0.5),
        _overload(3.0),
        Course(
            "azure conv", "conversations without any sharing at a quarter of capacity",
            _file("AzureLLMInferenceTrace_conv_head.csv"), load=0.25, window_s=30.0,
            time_scale=1.0, group="traces",
        ),
        _task("squality", "shuffled", squality),
        _task("qmsum", "zipf", qmsum),
        _task("squality", "grouped", squality),
        _task("qmsum", "grouped", qmsum),
    )  # fmt: skip


def _real() -> Sequence[Course]:
    slo = "chat.ttft=1s,document.ttft=4s"
    return (
        Course(
            "documents", "chat beside 14k-token documents, five questions each, at 80 % load",
            _small_beside, slo=slo, window_s=30.0, core=True, group="mix",
        ),
        Course(
            "shared documents", "50 users, 12 documents of 6k-12k tokens (Zipf 1.0), 40 % chat, "
            "a common instruction of 1,024 tokens, at 80 % load",
            _small_shared, slo=slo, window_s=30.0, core=True, group="mix",
        ),
        Course(
            "overload 1.5x", "the documents again at 1.5 times capacity", _small_beside, 1.5,
            slo=slo, window_s=20.0, core=True, group="overload",
        ),
        Course(
            "fifty users", "50 users ask about one 14k-token document within 5 s, caches empty",
            _small_fifty, load=None, slo=slo, group="mix",
        ),
    )  # fmt: skip


COURSES = {course.name: course for course in _simulated()}
CPU_COURSES = {course.name: course for course in _real()}
