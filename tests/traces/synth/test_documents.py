"""Synthetic traces: arrivals, lengths, popularity and mixes."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from statistics import fmean, median
from typing import Any

import pytest
from stages.started import printed_with_two_hash_seeds

from forebay.traces.edit.describe import describe
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.reading.jsonl import parse_row
from forebay.traces.synth.arrivals import arrival_times
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import SharedDocument, Workload, Zipf, shared_document, workload
from forebay.traces.synth.lengths import (
    AZURE_CONV_INPUT,
    Fixed,
    Length,
    Lognormal,
    Quantiles,
    Uniform,
    parse_length,
)


def check_well_formed(requests: list[TraceRequest]) -> None:
    assert len({request.id for request in requests}) == len(requests)
    assert all(one.arrival_s <= two.arrival_s for one, two in pairwise(requests))
    assert all(parse_row(row_bytes(request)) == request for request in requests)


def test_arrivals() -> None:
    assert list(islice(arrival_times("constant", 4, 0), 3)) == [0.0, 0.25, 0.5]
    assert list(islice(arrival_times("burst", 4, 0), 3)) == [0.0, 0.0, 0.0]
    poisson = list(islice(arrival_times("poisson", 4, 7), 20_000))
    assert poisson[-1] == pytest.approx(5_000, rel=0.03)
    assert poisson == list(islice(arrival_times("poisson", 4, 7), 20_000))


@pytest.mark.parametrize(
    ("kind", "rate", "says"),
    [
        ("gamma", 1.0, "--arrivals gamma: not known; one of: burst, constant, poisson"),
        ("poisson", 0.0, "--rate 0: not a rate"),
        ("constant", -1.0, "--rate -1: not a rate"),
        ("poisson", float("nan"), "--rate nan: not a rate"),
        ("poisson", float("inf"), "--rate inf: not a rate"),
    ],
)
def test_bad_arrivals(kind: str, rate: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        arrival_times(kind, rate, 0)


@pytest.mark.parametrize(
    ("length", "least", "middle", "most"),
    [
        (Fixed(7), 7, 7, 7),
        (Uniform(10, 20), 10, 15, 20),
        (Lognormal(1_000, 0.5, 100, 5_000), 100, 1_000, 5_000),
        (Lognormal(1_000, 3.0, 900, 1_100), 900, 1_000, 1_100),
        (Quantiles(((0.0, 0), (0.5, 10), (1.0, 20))), 0, 10, 20),
        (AZURE_CONV_INPUT, 2, 1_035, 5_000),
    ],
)
def test_lengths_stay_in_bounds_around_their_median(
    length: Length, least: int, middle: int, most: int
) -> None:
    dice = Random(0)
    drawn = [length.draw(dice) for _ in range(4_000)]
    assert least <= min(drawn) <= max(drawn) <= most
    assert median(drawn) == pytest.approx(middle, rel=0.1)


def test_a_lognormal_is_cut_off_not_piled_up_at_its_bounds() -> None:
    dice = Random(0)
    drawn = [Lognormal(1_000, 3.0, 900, 1_100).draw(dice) for _ in range(4_000)]
    assert drawn.count(900) + drawn.count(1_100) < 80


def test_lengths_from_the_command_line() -> None:
    assert parse_length("8000", "--x") == Fixed(8_000)
    assert parse_length("uniform:1,9", "--x") == Uniform(1, 9)
    assert parse_length("lognormal:100,0.5,10,900", "--x") == Lognormal(100, 0.5, 10, 900)
    assert parse_length("azure-conv-input", "--x") is AZURE_CONV_INPUT


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-5", "1.5", "many", "1,2", "nan", "fixed", "zipf:1,2"),
        *("uniform:", "uniform:5", "uniform:9,1", "uniform:0,5", "uniform:1,inf"),
        *("lognormal:5,1", "lognormal:5,0,1,9", "lognormal:50,1,1,9"),
        *("lognormal:nan,1,1,9", "lognormal:5,nan,1,9"),
    ],
)
def test_bad_lengths_name_the_option(text: str) -> None:
    with pytest.raises(InputError, match=r"^--x: .* is not a length; write TOKENS"):
        parse_length(text, "--x")


def test_zipf_falls_with_rank_as_it_says() -> None:
    dice, zipf = Random(3), Zipf(10, 1.0)
    counts = Counter(zipf.draw(dice) for _ in range(50_000))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.15)
    even = Counter(Zipf(4, 0.0).draw(dice) for _ in range(40_000))
    assert [even[rank] for rank in range(4)] == [pytest.approx(10_000, rel=0.05)] * 4


SMALL = Workload(users=6, documents=3, document_tokens=Fixed(2_000), duration_s=60, seed=5)


def test_prompts_are_instruction_then_document_then_a_fresh_question() -> None:
    spec = replace(SMALL, instruction_tokens=600, question_tokens=Fixed(100), chat_share=0.3)
    requests = list(workload(spec))
    check_well_formed(requests)
    root = requests[0].blocks[:2] if requests[0].blocks else ()
    heads: dict[str, set[tuple[int, ...]]] = {}
    tails: list[int] = []
    for request in requests:
        assert request.blocks is not None
        assert request.blocks[:2] == root  # 600 tokens, rounded up to two blocks
        if request.document:
            assert request.id.startswith("document-")
            assert request.input_tokens == (2 + 4) * 512 + 100
            heads.setdefault(request.document, set()).add(request.blocks[:6])
            tails += request.blocks[6:]
        else:
            assert request.id.startswith("chat-")
            tails += request.blocks[2:]
    assert len(tails) == len(set(tails))
    assert all(len(head) == 1 for head in heads.values())
    assert len(set.union(*heads.values())) == len(heads) == 3
    shares = Counter(request.document is None for request in requests)
    assert shares[True] / len(requests) == pytest.approx(0.3, abs=0.15)


def test_a_question_changes_nothing_but_itself() -> None:
    """Aspects have their own dice: other lengths leave times, users and documents alone."""
    longer = replace(SMALL, question_tokens=Uniform(50, 700))
    for one, other in zip(workload(SMALL), workload(longer), strict=True):
        assert (one.arrival_s, one.session, one.document) == (
            other.arrival_s,
            other.session,
            other.document,
        )


def test_tenants_keep_to_their_own_documents() -> None:
    requests = list(workload(replace(SMALL, tenants=2, documents=5, rate_per_s=10)))
    owners: dict[str | None, set[str | None]] = {}
    for request in requests:
        owners.setdefault(request.document, set()).add(request.tenant)
        user = int((request.session or "").removeprefix("user-"))
        assert request.tenant == f"tenant-{user % 2}"
    assert all(len(tenants) == 1 for tenants in owners.values())
    assert len(owners) == 5


def test_thinking_users_set_the_pace() -> None:
    requests = list(workload(replace(SMALL, users=20, think_s=10, duration_s=2_000)))
    check_well_formed(requests)
    assert len(requests) / 2_000 == pytest.approx(20 / 10, rel=0.1)
    mine = [request.arrival_s for request in requests if request.session == "user-3"]
    assert fmean(two - one for one, two in pairwise(mine)) == pytest.approx(10, rel=0.2)


def test_fifty_users_and_one_document() -> None:
    requests = list(shared_document(SharedDocument(document_tokens=32_768)))
    check_well_formed(requests)
    assert [request.session for request in requests] == [f"user-{user}" for user in range(50)]
    assert {request.arrival_s for request in requests} == {0.0}
    found = describe(requests)
    assert (found.requests, found.documents) == (50, 1)
    assert found.ideal_hit_ratio == pytest.approx(49 / 50 * 32_768 / (32_768 + 64))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"document_tokens": 0, "question_tokens": 0}, "--document-tokens 0: give 1 or more"),
        ({"document_tokens": -512}, "--document-tokens -512: give 1 or more"),
        ({"question_tokens": 0}, "--question-tokens 0: give 1 or more"),
        ({"output_tokens": -1}, "--output-tokens -1: give 0 or more"),
    ],
)
def test_a_document_that_cannot_be_names_the_option(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^{says}$"):
        shared_document(SharedDocument(**change))


def test_an_answer_may_have_no_tokens() -> None:
    least = SharedDocument(users=2, document_tokens=1, question_tokens=1, output_tokens=0)
    made = list(shared_document(least))
    check_well_formed(made)
    assert [request.output_tokens for request in made] == [0, 0]


def test_chat_beside_documents_keeps_its_rates_from_the_first_second() -> None:
    spec = ChatBesideDocuments(
        chat_rate_per_s=5, document_rate_per_s=1, questions=4, duration_s=2_000, seed=1
    )
    requests = list(chat_beside_documents(spec))
    check_well_formed(requests)
    about = [request for request in requests if request.document]
    assert len(requests) - len(about) == pytest.approx(10_000, rel=0.05)
    assert len(about) == pytest.approx(2_000, rel=0.1)
    counts = Counter(request.document for request in about)
    assert max(counts.values()) == 4
    assert Counter(counts.values())[4] / len(counts) > 0.8  # the others are cut at the edges
    assert all(request.input_tokens <= 5_000 for request in requests if not request.document)
    assert {request.input_tokens for request in about} == {235 * 512 + 64}


def test_questions_come_as_often_at_the_start_as_later() -> None:
    """Documents opened before the trace are in it; without them these would be 7.6."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=0.01, document_rate_per_s=1, questions=4, duration_s=20
    )
    counts = [
        sum(1 for request in chat_beside_documents(replace(spec, seed=seed)) if request.document)
        for seed in range(200)
    ]
    assert fmean(counts) == pytest.approx(20, rel=0.1)


def digest(requests: Iterable[TraceRequest]) -> str:
    return hashlib.sha256(b"".join(map(row_bytes, requests))).hexdigest()


def test_equal_seeds_make_equal_bytes_in_every_process() -> None:
    program = (
        "import hashlib\n"
        "from forebay.traces.reading.jsonl import row_bytes\n"
        "from forebay.traces.synth.documents import Workload, workload\n"
        "from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments\n"
        "from forebay.traces.synth.chat_beside_documents import chat_beside_documents\n"
        "for made in (workload(Workload(seed=9, chat_share=0.2, tenants=3)),"
        " chat_beside_documents(ChatBesideDocuments(seed=9))):\n"
        "    print(hashlib.sha256(b''.join(map(row_bytes, made))).hexdigest())"
    )
    outputs = printed_with_two_hash_seeds(program)
    here = digest(workload(Workload(seed=9, chat_share=0.2, tenants=3)))
    mixed = digest(chat_beside_documents(ChatBesideDocuments(seed=9)))
    assert outputs == {f"{here}\n{mixed}\n"}
    assert here != digest(workload(Workload(seed=10, chat_share=0.2, tenants=3)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"users": 0}, "--users 0: give 1 or more"),
        ({"documents": 0}, "--documents 0"),
        ({"requests": 0}, "--requests 0"),
        ({"tenants": 4}, "--tenants 4: each needs a user and a document; give at most 3"),
        ({"chat_share": 1.5}, "--chat-share 1.5"),
        ({"zipf_s": -1.0}, "--zipf -1"),
        ({"instruction_tokens": -1}, "--instruction-tokens -1"),
        ({"think_s": 0.0}, "--think 0"),
        ({"rate_per_s": 0.0}, "--rate 0: not a rate"),
        ({"duration_s": 0.0}, "--duration 0"),
        ({"arrivals": "burst"}, "--requests: a burst never ends"),
    ],
)
def test_a_workload_that_cannot_be_names_the_option(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=f"^{says}"):
        workload(replace(SMALL, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chat_rate_per_s": 0.0}, "--chat-rate 0: not a rate"),
        ({"document_rate_per_s": 0.0}, "--document-rate 0"),
        ({"questions": 0}, "--questions 0"),
        ({"users": 0}, "--users 0"),
        ({"follow_gap_s": 0.0}, "--follow-gap 0"),
        ({"duration_s": -1.0}, "--duration -1"),
        ({"instruction_tokens": -1}, "--instruction-tokens -1"),
    ],
)
def test_a_mix_that_cannot_be_names_the_option(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=f"^{says}"):
        chat_beside_documents(replace(ChatBesideDocuments(), **change))  # type: ignore[arg-type]
