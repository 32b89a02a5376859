"""The workloads: what is asked, at which share of capacity, for how long, to which targets."""

from collections.abc import Sequence
from dataclasses import replace

from arena_sources import (
    beside,
    fifty,
    public,
    questions,
    sessions,
    shared,
    small_beside,
    small_fifty,
    small_shared,
)
from arena_traffic import Course

CPU_CHUNK = 512  # a quarter of a step, as of the simulated engines
# A percentile of documents needs some hundred of them, and a queue that grows needs time to do so.
SUSTAINED_S = 120.0
LONG_S = 300.0  # until how it begins, with empty caches and no queue, is a small part of it
CHUNK = 2_048  # what `forebay fleet up` gives this model on this GPU (replay/fleet/gpu/profiles.py)


def _overload(load: float, core: bool = False) -> Course:
    return Course(
        f"overload {load:g}x", f"the same traffic at {load:g} times capacity", beside, load,
        window_s=SUSTAINED_S, core=core, group="overload",
    )  # fmt: skip


def _chunked(course: Course, chunk: int = CHUNK) -> Course:
    """The same traffic in front of engines that split long prefills themselves."""
    return replace(
        course, name=f"{course.name}, chunked", core=True, chunk=chunk, traffic_of=course.name,
        about=f"{course.about}; engines take {chunk:,} tokens of one prompt in a step at most",
    )  # fmt: skip


def _long(course: Course) -> Course:
    """The same for longer; `documents` are few, too: so long until they come together."""
    return replace(
        course, name=f"{course.name} for five minutes", window_s=LONG_S, core=False,
        about=f"{course.about}, for five minutes",
    )  # fmt: skip


def _task(task: str, order: str, what: str) -> Course:
    return Course(
        f"{task} {order}", f"{what}, {order}, at 80 % load", questions(task, order),
        window_s=40.0, slo="chat.ttft=2s,document.ttft=5s", group="questions",
    )  # fmt: skip


def _simulated() -> Sequence[Course]:
    squality = "SQuALITY: 125 questions about 25 stories"
    qmsum = "QMSum: 272 questions about 35 meetings"
    documents = Course(
        "documents", "chat beside 120k-token documents, five questions each, at 80 % load",
        beside, core=True, group="mix",
    )  # fmt: skip
    shared_documents = Course(
        "shared documents", "50 users, 16 documents of 10k-100k tokens (Zipf 1.0), 40 % chat, "
        "a common instruction of 1,024 tokens, at 80 % load",
        shared, window_s=SUSTAINED_S, core=True, group="mix",
    )  # fmt: skip
    overload, long_documents = _overload(1.5, core=True), _long(documents)
    conversation = Course(
        "mooncake conversation", "the chat production trace, ticks spread, at 80 % load",
        public("mooncake_conversation_head.jsonl", ticks=True), group="traces",
    )  # fmt: skip
    return (
        documents,
        _chunked(documents),
        shared_documents,
        _chunked(shared_documents),
        overload,
        _chunked(overload),
        Course(
            "mooncake synthetic", "the RAG-like production trace, a minute of it, at 80 % load",
            public("mooncake_synthetic_head.jsonl", step_s=60.0), core=True, group="traces",
        ),
        Course(
            "fifty users", "50 users ask about one 60k-token document within 5 s, caches empty",
            fifty, load=None, group="mix",
        ),
        conversation,
        _chunked(conversation),
        long_documents,
        replace(_chunked(long_documents), core=False),
        _long(shared_documents),
        _long(overload),
        Course(
            "azure code", "bursts (CV 13) of code completions at half of capacity",
            public("AzureLLMInferenceTrace_code.csv", step_s=300.0), load=0.5, window_s=30.0,
            time_scale=1.0, group="traces",
        ),
        Course(
            "kv-cache-tester", "coding-agent sessions to 131k tokens, pauses cut at 20 s, at "
            "80 % load", sessions, group="traces",
        ),
        _task("squality", "zipf", squality),
        _task("qmsum", "shuffled", qmsum),
        _overload(2.0),
        _overload(1.0),
        _overload(0.5),
        _overload(3.0),
        Course(
            "azure conv", "conversations without any sharing at a quarter of capacity",
            public("AzureLLMInferenceTrace_conv_head.csv"), load=0.25, window_s=30.0,
            time_scale=1.0, group="traces",
        ),
        _task("squality", "shuffled", squality),
        _task("qmsum", "zipf", qmsum),
        _task("squality", "grouped", squality),
        _task("qmsum", "grouped", qmsum),
    )  # fmt: skip


def _real() -> Sequence[Course]:
    slo = "chat.ttft=1s,document.ttft=4s"
    documents = Course(
        "documents", "chat beside 14k-token documents, five questions each, at 80 % load",
        small_beside, slo=slo, window_s=30.0, core=True, group="mix",
    )  # fmt: skip
    return (
        documents,
        _chunked(documents, CPU_CHUNK),
        Course(
            "shared documents", "50 users, 12 documents of 6k-12k tokens (Zipf 1.0), 40 % chat, "
            "a common instruction of 1,024 tokens, at 80 % load",
            small_shared, slo=slo, window_s=30.0, core=True, group="mix",
        ),
        Course(
            "overload 1.5x", "the documents again at 1.5 times capacity", small_beside, 1.5,
            slo=slo, window_s=20.0, core=True, group="overload",
        ),
        Course(
            "fifty users", "50 users ask about one 14k-token document within 5 s, caches empty",
            small_fifty, load=None, slo=slo, group="mix",
        ),
    )  # fmt: skip


COURSES = {course.name: course for course in _simulated()}
CPU_COURSES = {course.name: course for course in _real()}
