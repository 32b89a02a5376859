"""replay/send/http/measure.py, slo.py, verdict.py, outcome.py: each definition as a table."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from forebay.replay.plan.slo import Slo, default_slos, meets, parse_slos
from forebay.replay.results.printed_table import summary_table
from forebay.replay.results.summary import (
    RunTotals,
    distribution_ms,
    firm,
    highest_firm,
    is_firm,
    throughput,
)
from forebay.replay.results.verdict import Lateness, judge_answers, lag_limit_s
from forebay.replay.send.http.measure import Latency, OutputEvents, measure
from forebay.replay.send.http.outcome import (
    first_words,
    of_status,
    of_stream_error,
    seconds_header,
    token_count,
)
from forebay.traces.ground.buckets import LengthBucket
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import new_histogram


def events(*seen: tuple[float, int | None]) -> OutputEvents:
    """Output events as (time, running total of continuous usage or None)."""
    made = OutputEvents()
    for at_s, total in seen:
        made.add(at_s, total)
    return made


def of(made: OutputEvents, output_tokens: int | None) -> Latency:
    return measure(10.0, 10.5, 0.2, made, output_tokens)  # due at 10, sent at 10.5


def test_three_single_tokens() -> None:
    latency = of(events((12.0, None), (12.1, None), (12.4, None)), 3)
    assert latency.ttft_response_s == pytest.approx(2.0)
    assert latency.ttft_service_s == pytest.approx(1.5)
    assert latency.e2e_response_s == pytest.approx(2.4)
    assert latency.e2e_service_s == pytest.approx(1.9)
    assert latency.tpot_s == pytest.approx(0.2)
    assert latency.icl_s == pytest.approx([0.1, 0.3])
    assert latency.itl_s is None  # equal to icl_s
    assert latency.stall_s == pytest.approx(0.3)


def test_multi_token_events_counted_by_continuous_usage() -> None:
    made = events((12.0, 2), (12.2, 6), (12.3, 7))
    assert not made.estimated
    latency = of(made, 7)
    assert latency.tpot_s == pytest.approx(0.3 / 5)  # 5 tokens after the first event's 2
    assert latency.icl_s == pytest.approx([0.2, 0.1])
    assert latency.itl_s is not None
    assert [n for _, n in latency.itl_s] == [4, 1]
    assert [gap for gap, _ in latency.itl_s] == pytest.approx([0.05, 0.1])


def test_events_of_one_read_count_as_one() -> None:
    """A busy client reads three events at once: their tokens came 10 ms apart, not at once."""
    made = events(*((at, None) for at in (12.0, 12.0, 12.03, 12.03, 12.03, 12.04)))
    latency = of(made, 6)
    assert latency.itl_s is not None
    assert [n for _, n in latency.itl_s] == [3, 1]
    assert [gap for gap, _ in latency.itl_s] == pytest.approx([0.01, 0.01])
    assert latency.stall_s == pytest.approx(0.03)
    counted = of(events((12.0, 1), (12.03, 3), (12.03, 7), (12.05, 8)), 8)
    assert counted.itl_s is not None
    assert [n for _, n in counted.itl_s] == [6, 1]
    assert [gap for gap, _ in counted.itl_s] == pytest.approx([0.005, 0.02])
    assert of(events((12.0, None), (12.0, None)), 2).itl_s == []


def test_multi_token_events_without_continuous_usage_are_estimated() -> None:
    made = events((12.0, None), (12.4, None))
    assert made.estimated
    latency = of(made, 9)
    assert latency.tpot_s == pytest.approx(0.4 / 8)
    assert latency.itl_s is None


@pytest.mark.parametrize(
    ("made", "output_tokens"),
    [
        (events((12.0, None)), 1),  # one token: nothing after the first
        (events((12.0, 4)), 4),  # all in one event
        (events((12.0, None)), 4),  # all in one event, and n_1 is unknown: no pace was seen
        (events((12.0, None)), None),
        (events((12.0, None), (12.1, None)), 1),  # the server counts fewer than we saw
    ],
)
def test_tpot_is_undefined_not_zero(made: OutputEvents, output_tokens: int | None) -> None:
    assert of(made, output_tokens).tpot_s is None


def test_one_token_has_no_gap_and_no_stall() -> None:
    latency = of(events((12.0, None)), 1)
    assert (list(latency.icl_s), latency.stall_s) == ([], None)
    assert latency.e2e_response_s == latency.ttft_response_s == 2.0


def test_no_output_at_all() -> None:
    latency = of(events(), 0)
    assert latency.first_s is latency.last_s is latency.ttft_response_s is None
    assert latency.e2e_service_s is latency.tpot_s is latency.stall_s is None
    assert latency.pacing_lag_s + latency.cap_wait_s == pytest.approx(0.5)


def test_without_usage_the_tokens_are_not_known() -> None:
    assert of(events((12.0, None), (12.2, None), (12.4, None)), None).tpot_s is None


@pytest.mark.parametrize(
    ("sent", "cap", "pacing_lag", "cap_wait"),
    [
        (10.0, 0.0, 0.0, 0.0),
        (10.5, 0.0, 0.5, 0.0),
        (10.5, 0.5, 0.0, 0.5),
        (10.5, 0.2, 0.3, 0.2),
        (10.5, 0.7, 0.0, 0.5),  # never more than the lag it is part of
        (9.9999999, 0.0, 0.0, 0.0),  # a hair early is not negative
    ],
)
def test_schedule_lag_splits(sent: float, cap: float, pacing_lag: float, cap_wait: float) -> None:
    latency = measure(10.0, sent, cap, events(), None)
    assert latency.pacing_lag_s == pytest.approx(pacing_lag)
    assert latency.cap_wait_s == pytest.approx(cap_wait)


# ---- targets

BUCKETS = ["chat", "document"]


def test_parse_slos() -> None:
    assert parse_slos("chat.ttft=2s, document.ttft=15s,tpot=100ms,e2e=1.5m,stall=3", BUCKETS) == (
        Slo("chat", "ttft", 2.0),
        Slo("document", "ttft", 15.0),
        Slo(None, "tpot", 0.1),
        Slo(None, "e2e", 90.0),
        Slo(None, "stall", 3.0),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "METRIC=TIME"),
        ("ttft", "METRIC=TIME"),
        ("ttft=fast", "METRIC=TIME"),
        ("ttft=-1s", "METRIC=TIME"),
        ("ttft=0s", "above 0"),
        ("itl=1s", "no metric 'itl'"),
        ("video.ttft=1s", "no bucket 'video'"),
    ],
)
def test_slos_that_are_none(text: str, says: str) -> None:
    with pytest.raises(InputError, match=f"--slo.*{says}"):
        parse_slos(text, BUCKETS)


def test_default_slos_follow_the_buckets() -> None:
    buckets = [LengthBucket("chat", 5_000, 2.0), LengthBucket("book", 9_000)]
    assert default_slos(buckets) == (Slo("chat", "ttft", 2.0),)


@pytest.mark.parametrize(
    ("bucket", "ttft", "tpot", "met"),
    [
        ("chat", 2.0, 0.1, True),  # at the limit is within it
        ("chat", 2.1, 0.1, False),
        ("chat", 1.0, 0.2, False),
        ("chat", 1.0, None, True),  # a one-token answer has no pace to miss
        ("chat", None, None, False),  # no first token is no good answer
        ("document", 9.0, 0.1, True),  # chat's target is not its own
    ],
)
def test_meets(bucket: str, ttft: float | None, tpot: float | None, met: bool) -> None:
    slos = parse_slos("chat.ttft=2s,tpot=100ms", BUCKETS)
    values = {"ttft": ttft, "tpot": tpot, "e2e": 9.0, "stall": 1.0}
    assert meets(slos, bucket, values) is met


# ---- verdict


def late(*arrivals: tuple[float, float], of_all: int = 1000, limit_s: float = 0.01) -> Lateness:
    made = Lateness(limit_s)
    for at in range(of_all - len(arrivals)):
        made.add(float(at), 0.0, 0.0)
    for number, (pacing_lag, cap_wait) in enumerate(arrivals):
        made.add(500.0 + number, pacing_lag, cap_wait)
    return made


@pytest.mark.parametrize(
    ("lateness", "word", "at_s"),
    [
        (late(), "valid", None),
        (late(*[(0.011, 0.0)] * 10), "valid", None),  # one in a hundred may be late
        (late(*[(0.011, 0.0)] * 11), "client-limited", 500.0),
        (late(*[(0.009, 0.0)] * 500), "valid", None),
        (late(*[(0.0, 1.0)] * 11), "cap-limited", 500.0),
        (late(*[(0.02, 1.0)] * 11), "cap-limited", 500.0),
        (late(*[(0.02, 0.0)] * 12, *[(0.0, 1.0)] * 11), "client-limited", 500.0),
        (late((1.0, 0.0), of_all=10), "valid", None),  # one hiccup in a short run
        (late((1.0, 0.0), (1.0, 0.0), of_all=10), "client-limited", 500.0),
        (Lateness(0.01), "client-limited", 0.0),
    ],
)
def test_verdict(lateness: Lateness, word: str, at_s: float | None) -> None:
    verdict = lateness.judge()
    assert (verdict.word, verdict.at_s) == (word, at_s)
    assert verdict.reason


@pytest.mark.parametrize(
    ("lateness", "word", "at_s", "says"),
    [
        (
            late(),
            "valid",
            None,
            "0 of 1,000 requests left more than 10 ms after their slot was free",
        ),
        (late(*[(0.011, 0.0)] * 10), "valid", None, "10 of 1,000 requests"),
        (late(*[(0.011, 0.0)] * 11), "client-limited", 500.0, "slot was free because this machine"),
        (Lateness(0.01), "client-limited", 0.0, "nothing was sent"),
    ],
)
def test_verdict_of_a_closed_loop(
    lateness: Lateness, word: str, at_s: float | None, says: str
) -> None:
    """Judged by the same limits; it has neither a rate nor --max-in-flight to speak of."""
    verdict = lateness.judge(closed=True)
    assert (verdict.word, verdict.at_s) == (word, at_s)
    assert says in verdict.reason
    told = RunTotals(["chat"], ())
    told.lateness = lateness
    values = told.summary({}, 1.0, closed=True, scale=1.0)
    assert (values["verdict"], values["verdict_at_s"]) == (word, at_s)
    assert values["verdict_reason"] == verdict.reason


@pytest.mark.parametrize(
    ("requests", "completed", "rejected", "failed", "ended", "word", "says"),
    [
        (6, 0, {}, {"4xx": 6}, "complete", "failed", "none of 6 requests was answered: 4xx 6"),
        (6, 0, {"queue_full": 6}, {}, "complete", "failed", "none of 6 requests was answered"),
        (437, 44, {}, {"never_sent": 393}, "interrupted", "interrupted", "44 of 437 requests"),
        (437, 437, {}, {}, "interrupted", "interrupted", "437 of 437"),
        (10, 4, {}, {"5xx": 5, "timeout": 1}, "complete", "failed", "6 of 10 requests were lost"),
        (10, 5, {}, {"5xx": 5}, "complete", None, ""),
        (10, 1, {"queue_full": 9}, {}, "complete", None, ""),  # a flood measures rejections
        (0, 0, {}, {}, "complete", None, ""),
    ],
)
def test_a_run_that_lost_its_requests_is_not_valid(
    requests: int,
    completed: int,
    rejected: dict[str, int],
    failed: dict[str, int],
    ended: str,
    word: str | None,
    says: str,
) -> None:
    judged = judge_answers(requests, completed, rejected, failed, ended)
    assert (judged.word if judged else None) == word
    assert says in (judged.reason if judged else "")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "The model `m` does not exist.", "code": 404}}',
         "The model `m` does not exist."),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": {}}', "{}"),
        (b"<html>\n Bad\tgateway\x1b[31m", "<html> Bad gateway [31m"),
        (b"x" * 900, "x" * 199 + "\u2026"),
        (b"[1]", "[1]"),
        (b"  ", None),
        (b"", None),
    ],
)  # fmt: skip
def test_first_words_of_an_error(body: bytes, says: str | None) -> None:
    assert first_words(body) == says


def test_the_limit_follows_the_tightest_ttft_target() -> None:
    assert lag_limit_s(()) == 0.010
    assert lag_limit_s((Slo("chat", "ttft", 2.0), Slo("document", "ttft", 15.0))) == 0.020
    assert lag_limit_s((Slo(None, "ttft", 0.5), Slo(None, "e2e", 60.0))) == 0.010


# ---- outcomes

QUEUE_FULL = b'{"error": {"message": "m", "type": "t", "param": null, "code": "queue_full"}}'


@pytest.mark.parametrize(
    ("status", "body", "outcome", "reason"),
    [
        (429, QUEUE_FULL, "rejected", "queue_full"),
        (503, QUEUE_FULL, "rejected", "queue_full"),  # the status is configurable
        (429, b"", "failed", "429"),
        (429, b'{"error": {"code": 429}}', "failed", "429"),
        (429, b'{"error": {"code": "429"}}', "failed", "429"),
        (429, b'{"error": "no"}', "failed", "429"),
        (503, b'{"error": {"code": 503}}', "failed", "503"),  # vLLM's own
        (503, b'{"error": {"code": "no_backend_available"}}', "failed", "503"),
        (503, b'{"error": {"code": "draining"}}', "failed", "503"),
        (400, QUEUE_FULL, "failed", "4xx"),
        (413, b"x", "failed", "4xx"),
        (500, b"x", "failed", "5xx"),
        (502, QUEUE_FULL, "failed", "5xx"),
        (302, b"", "failed", "malformed"),
        (204, b"", "failed", "malformed"),
    ],
)
def test_outcome_of_an_answer_that_is_not_200(
    status: int, body: bytes, outcome: str, reason: str
) -> None:
    assert of_status(status, body) == (outcome, reason)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (500, "stream_error"),
        (400, "4xx"),
        (429, "429"),
        ("upstream_stream_error", "stream_error"),
        (None, "stream_error"),
    ],
)
def test_error_event(code: object, reason: str) -> None:
    assert of_stream_error({"code": code}) == reason


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 20.0), ("0.5", 5.0), ("Wed, 21 Oct", None), ("nan", None), ("-1", None), (None, None)],
)
def test_seconds_header(text: str | None, value: float | None) -> None:
    assert seconds_header(text, scale=10.0) == value


@pytest.mark.parametrize(
    ("value", "count"), [(3, 3), (0, 0), (-1, None), (True, None), ("3", None), (1 << 60, None)]
)
def test_token_count(value: object, count: int | None) -> None:
    assert token_count(value) == count


@pytest.mark.parametrize(
    ("name", "count", "is_shown"),
    [("p50", 20, True), ("p50", 19, False), ("p99", 1000, True), ("p99", 999, False),
     ("p99.9", 10_000, True), ("p99.9", 9_999, False), ("max", 1, True), ("p50", 0, False)],
)  # fmt: skip
def test_people_see_a_percentile_with_ten_samples_beyond(
    name: str, count: int, is_shown: bool
) -> None:
    assert is_firm(name, count) is is_shown
    assert firm({"count": count, name: 3.0}, name) == (3.0 if is_shown else None)


def test_the_percentiles_of_one_sample_are_numbers() -> None:
    histogram = new_histogram()
    assert set(distribution_ms(histogram).values()) == {0, None}
    histogram.record_value(5_000)
    told = distribution_ms(histogram)
    assert told.pop("count") == 1
    assert all(value == pytest.approx(5.0, rel=1e-3) for value in told.values())


@pytest.mark.parametrize(
    ("count", "name"),
    [(1000, "p99"), (999, "p95"), (200, "p95"), (199, "p90"), (99, "p50"), (19, "max"), (1, "max")],
)
def test_the_highest_percentile_that_a_count_allows(count: int, name: str) -> None:
    figures = {"count": count} | {one: one for one in ("p50", "p90", "p95", "p99", "max")}
    assert highest_firm(figures, "p99") == (name, name)


@pytest.mark.parametrize("count", [1, 7, 100, 1013])
def test_p95_is_the_nearest_rank(count: int) -> None:
    values = np.random.default_rng(count).integers(1, 2_000, count)  # exact in the histogram
    histogram = new_histogram()
    for value in values.tolist():
        histogram.record_value(value)
    exact = float(np.percentile(values, 95, method="inverted_cdf")) / 1e3
    assert distribution_ms(histogram)["p95"] == exact


def test_throughput_is_plain_division() -> None:
    told = throughput(30, 6_000.0, 300.0, 12.0)
    assert list(told.values()) == [2.5, 500.0, 25.0, 525.0]
    assert set(throughput(0, 0.0, 0.0, 0.0).values()) == {None}


def test_the_table_of_a_short_run_shows_no_tails() -> None:
    few = dict.fromkeys(("p50", "p90", "p99", "p99.9", "max"), 7.0) | {"count": 3}
    values = RunTotals(["chat"], ()).summary({}, 1.0, closed=False, scale=1.0)
    values |= {"ttft_ms": {"all": few}, "stall_ms": {"all": few}, "schedule_lag_ms": few}
    with StringIO() as out:
        Console(file=out, width=120).print(summary_table(values))
        text = out.getvalue()
    assert text.count("7.0 ms") == 2  # TTFT and lag, both max
    assert "schedule lag p50 – p99 – max 7.0 ms" in text
