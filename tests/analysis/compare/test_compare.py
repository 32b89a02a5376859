"""Reading run folders and comparing them: made-up runs in, figures and words out."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from commands import forebay, printed, refusal, remarks
from fakes.made_runs import SLOS, Row, answered, realistic_rows, refused, write_pair, write_run

from forebay.analysis.compare.compare import Comparison, compare, compare_all, rows_of
from forebay.analysis.compare.figures import Price, backends, figures, imbalance, unanswered
from forebay.analysis.compare.headline import headline
from forebay.analysis.compare.limits import broken, parse_limit
from forebay.analysis.compare.lines import ComparisonRow
from forebay.analysis.runs.load import load_run, load_runs
from forebay.analysis.runs.provenance import repeat_command, verdict
from forebay.replay.plan.slo import Slo, parse_slos
from forebay.traces.ground.errors import InputError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("runs"))


def steady(count: int, ttft_s: float, **others: Any) -> list[Row]:
    """Chats whose TTFT rises evenly from `ttft_s` to twice that."""
    return [
        answered(i, "chat", i * 0.1, ttft_s * (1 + (i + 1) / count), **others) for i in range(count)
    ]


def compared(
    tmp_path: Path, a: list[Row], b: list[Row], slos: Sequence[Slo] = (),
    *, told_a: tuple[Row, Row] = ({}, {}), told_b: tuple[Row, Row] = ({}, {}),
) -> Comparison:  # fmt: skip
    """Compare two runs; what is told of each is in summary.json and in run.json."""
    runs = load_runs(
        [write_run(tmp_path / "a", a, *told_a), write_run(tmp_path / "b", b, *told_b)]
    )  # fmt: skip
    return compare(runs[0], runs[1], slos)


def again(tmp_path: Path, info: Row) -> Comparison:
    """Compare two runs of equal prompts, the second half an hour after the first."""
    later = {"salt": "", "started_at": "2026-11-21T10:30:00+00:00"}
    rows, told_b = steady(30, 1.0), (Row(), later | info)
    return compared(tmp_path, rows, rows, told_a=({}, {"salt": ""}), told_b=told_b)


def line(comparison: Comparison, section: str, key: str) -> ComparisonRow:
    found = comparison.line(section, key)
    assert found is not None
    return found


class TestReading:
    def test_columns_are_numbers_with_nan_and_words_with_nothing(self, tmp_path: Path) -> None:
        rows = [answered(0, "chat", 0.0, 0.5), refused(1, "document", 1.0)]
        run = load_run(write_run(tmp_path / "night", rows))
        assert (run.name, run.requests) == ("night", 2)
        assert run.numbers["ttft_response_s"][0] == 0.5
        assert math.isnan(run.numbers["ttft_response_s"][1])
        assert run.words["reason"].tolist() == ["", "queue_full"]
        assert verdict(run).valid

    def test_buckets_come_shortest_prompts_first(self, tmp_path: Path) -> None:
        rows = [
            answered(0, "aaa-long", 0.0, 1.0, input_tokens=90_000),
            answered(1, "zzz-short", 0.0, 1.0, input_tokens=10),
            refused(2, "", 0.0) | {"bucket": None},
        ]
        assert load_run(write_run(tmp_path / "r", rows)).buckets() == [
            "zzz-short", "aaa-long", "other",
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["summary.json", "run.json", "requests.parquet"])
    @pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"PAR1 not really PAR1"])
    def test_missing_or_damaged_file_is_named(
        self, tmp_path: Path, name: str, content: bytes | None
    ) -> None:
        folder = write_run(tmp_path / "r", steady(3, 1.0))
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(InputError) as told:
            load_run(folder)
        assert str(folder / name) in str(told.value)
        assert "\n" not in str(told.value)

    def test_truncated_parquet_is_damaged(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "r", steady(300, 1.0))
        table = folder / "requests.parquet"
        whole = table.read_bytes()
        for kept in (len(whole) // 3, len(whole) - 1):
            table.write_bytes(whole[:kept])
            with pytest.raises(InputError, match="damaged parquet"):
                load_run(folder)

    def test_parquet_of_something_else_names_the_columns(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = write_run(tmp_path / "r", steady(3, 1.0))
        pq.write_table(pa.table({"bucket": ["chat"]}), folder / "requests.parquet")
        with pytest.raises(InputError, match="no column intended_s, outcome, ttft_response_s"):
            load_run(folder)

    @pytest.mark.parametrize(
        ("where", "value", "told"),
        [("outcome", "lost", "outcome 'lost'"), ("goodput_per_s", "many", "not a number")],
    )
    def test_strange_values_are_named(
        self, tmp_path: Path, where: str, value: str, told: str
    ) -> None:
        in_row = {"outcome": value} if where == "outcome" else {}
        folder = write_run(tmp_path / "r", [answered(0, "chat", 0.0, 1.0) | in_row], {where: value})
        with pytest.raises(InputError, match=told):
            figures(load_run(folder), None)

    @pytest.mark.parametrize(("make", "told"), [(False, "not there"), (True, "a file")])
    def test_no_folder(self, tmp_path: Path, make: bool, told: str) -> None:
        path = tmp_path / "x"
        if make:
            path.write_text("")
        with pytest.raises(InputError, match=f"{told}; give a run folder"):
            load_run(path)

    @pytest.mark.parametrize(
        ("summary", "told"),
        [
            ({"a": [1]}, "summary.json: has no number of requests"),
            ({"requests": "3"}, "summary.json: has no number of requests"),
            ({"requests": 84}, "summary.json: counts 84 requests, but requests.parquet has 3"),
        ],
    )
    def test_a_summary_of_something_else_is_named(
        self, tmp_path: Path, summary: dict[str, Any], told: str
    ) -> None:
        folder = write_run(tmp_path / "r", steady(3, 1.0))
        (folder / "summary.json").write_bytes(orjson.dumps(summary))
        with pytest.raises(InputError, match=told):
            load_run(folder)

    def test_runs_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        paths = [write_run(tmp_path / top / "run", steady(3, 1.0)) for top in ("mon", "tue")]
        assert [run.name for run in load_runs(paths)] == ["mon/run", "tue/run"]
        assert len({run.name for run in load_runs([paths[0], paths[0]])}) == 2


class TestFigures:
    def test_golden_numbers_of_a_known_run(self, tmp_path: Path) -> None:
        """1,000 answers with TTFT 1 ms to 1 s, and 250 without an answer."""
        rows = [answered(i, "chat", i * 0.1, (i + 1) / 1000) for i in range(1000)]
        rows += [refused(1000 + i, "chat", i * 0.1) for i in range(250)]
        run = load_run(write_run(tmp_path / "r", rows))
        one = figures(run, "chat", [Slo("chat", "ttft", 0.5), Slo(None, "tpot", 0.02)])
        assert (one.intended, one.answered, one.rejected, one.failed) == (1250, 1000, 250, 0)
        assert one.latency["ttft"].values == {
            "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": None,
        }  # fmt: skip
        assert one.latency["ttft_failures"].values == {
            "p50": 0.625, "p90": math.inf, "p95": math.inf, "p99": math.inf, "p99.9": None,
        }  # fmt: skip
        assert one.attainment == 500 / 1250  # over what was due, not over what was answered
        assert one.goodput_per_s == pytest.approx(500 / 180)
        itl = one.latency["itl"]  # of tokens, so from summary.json
        assert (itl.count, itl.values["p99"], itl.values["p99.9"]) == (9000, 0.031, None)

    def test_p95_and_throughput_are_those_of_numpy_and_plain_division(self, tmp_path: Path) -> None:
        random = np.random.default_rng(4)
        rows = [
            answered(i, "chat", i * 0.1, float(random.exponential(1.0)), output_tokens=20 + i)
            for i in range(400)
        ]
        rows.append(refused(400, "chat", 40.0))
        run = load_run(write_run(tmp_path / "r", rows, {"duration_s": 50.0}))
        one = figures(run, "chat")
        ttft = [row["ttft_response_s"] for row in rows[:400]]
        exact = float(np.percentile(ttft, 95, method="inverted_cdf"))
        assert one.latency["ttft"].values["p95"] == exact
        prompt, output = 400 * 800, sum(20 + i for i in range(400))
        assert one.rates == {
            "requests_per_s": 400 / 50,
            "prompt_tokens_per_s": prompt / 50,
            "output_tokens_per_s": output / 50,
            "total_tokens_per_s": (prompt + output) / 50,
        }

    def test_a_gate_takes_p95_and_names_the_figure(self, tmp_path: Path) -> None:
        run = load_run(write_run(tmp_path / "r", steady(200, 1.0)))
        limits = [parse_limit("chat.ttft_p95 > 1s"), parse_limit("chat.ttft_p95 > 9s")]
        (said,) = broken([compare(run, run)], limits)
        assert said == "chat.ttft_p95 of r is 1.95 s (limit > 1.00 s)"

    def test_cost_of_a_million_tokens(self, tmp_path: Path) -> None:
        """100 s on two GPUs at 3.60 an hour are 0.20; 10 answers have 9,010 tokens."""
        rows = [answered(i, "chat", i * 0.1, 1.0 if i < 5 else 9.0) for i in range(10)]
        run = load_run(write_run(tmp_path / "r", rows, {"duration_s": 100.0}, {"gpus": 2}))
        cost = Price(3.60).per_million(run)
        assert cost["cost_per_million"] == pytest.approx(0.2 / 9_010 * 1e6)
        assert cost["cost_per_million_in_time"] == pytest.approx(0.2 / 4_505 * 1e6)
        by_backend = load_run(write_run(tmp_path / "q", rows))
        assert (Price(1.0).gpus_of(by_backend), Price(1.0, 8).gpus_of(by_backend)) == (1, 8)
        nowhere = load_run(write_run(tmp_path / "s", [row | {"backend": None} for row in rows]))
        with pytest.raises(InputError, match="give --gpus"):
            Price(1.0).gpus_of(nowhere)

    def test_an_undefined_tpot_does_not_miss_its_target(self, tmp_path: Path) -> None:
        rows = steady(4, 0.1, tpot_s=None)
        run = load_run(write_run(tmp_path / "r", rows))
        assert figures(run, None, [Slo(None, "tpot", 0.001)]).attainment == 1.0

    def test_a_hit_left_out_by_the_server_is_no_hit(self, tmp_path: Path) -> None:
        """vLLM leaves cached_tokens out of an answer without a hit."""
        rows = [
            answered(0, "chat", 0.0, 1.0, cached_tokens=400),
            answered(1, "chat", 0.0, 1.0, cached_tokens=None),
        ]
        run = load_run(write_run(tmp_path / "r", rows))
        assert figures(run, None).hit_ratio == 400 / 1600
        never = load_run(write_run(tmp_path / "n", [rows[1]]))
        assert figures(never, None).hit_ratio is None

    def test_an_idle_backend_counts_for_the_imbalance(self, tmp_path: Path) -> None:
        rows = [
            answered(0, "chat", 0.0, 1.0, prompt_tokens=3000, backend="gpu0"),
            answered(1, "chat", 0.0, 1.0, prompt_tokens=1000, backend="gpu1"),
            refused(2, "chat", 0.0, backend="the-proxy"),  # who spoke, not who worked
        ]
        run = load_run(write_run(tmp_path / "r", rows))
        assert imbalance(run) == 3.0
        idle = {"prompt_tokens_per_backend": {"gpu0": 3000, "gpu1": 1000, "gpu2": 0}}
        run = load_run(write_run(tmp_path / "i", rows, idle))
        assert [backend.name for backend in backends(run)] == ["gpu0", "gpu1", "gpu2"]
        assert imbalance(run) == math.inf
        assert imbalance(load_run(write_run(tmp_path / "one", rows[:1]))) is None

    def test_refusals_come_by_kind_and_number(self, tmp_path: Path) -> None:
        rows = [refused(i, "chat", float(i)) for i in range(3)]
        rows += [refused(i, "chat", float(i), reason="tenant_quota") for i in range(5)]
        rows += [refused(9, "chat", 9.0, outcome="failed", reason="connect", status=None)]
        found = unanswered(load_run(write_run(tmp_path / "r", rows)))
        assert [(one.outcome, one.reason, one.count, one.status) for one in found] == [
            ("rejected", "tenant_quota", 5, "429"),
            ("rejected", "queue_full", 3, "429"),
            ("failed", "connect", 1, ""),
        ]
        assert (found[0].answer_p50_s, found[0].retry_after_s) == (0.004, 3.0)


class TestComparison:
    def test_golden_ratios(self, tmp_path: Path) -> None:
        found = compared(tmp_path, steady(1000, 1.0), steady(1000, 0.25))
        ttft = line(found, "chat", "ttft_p99")
        assert (ttft.a, ttft.b, ttft.ratio, ttft.better) == (1.99, 0.4975, 4.0, "b")
        assert ttft.interval is not None
        assert ttft.interval.low == pytest.approx(4.0, rel=0.05)
        assert line(found, "chat", "tpot_p50").better == "equal"
        assert line(found, "run", "intended").better is None
        assert found.line("chat", "ttft_p99.9") is None  # one sample beyond: hidden, so no line
        assert found.headline_keys == {"chat": "ttft_p99"}

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_row_of_a_table_has_a_value_for_each_run(self, tmp_path: Path, count: int) -> None:
        seconds = (1.0, 0.25, 2.0)[:count]
        runs = load_runs([write_run(tmp_path / str(s), steady(1000, s)) for s in seconds])
        rows = rows_of(compare_all(runs))
        by_key = {(row.heading, row.line.key): row for row in rows}
        assert by_key["chat", "ttft_p99"].values == [1.99 * s for s in seconds]
        assert len(by_key["all requests", "intended"].texts) == count
        assert [row.heading for row in rows] == sorted(row.heading for row in rows)

    def test_worse_is_called_worse(self, pair: tuple[Path, Path]) -> None:
        good, bad = load_runs([pair[1], pair[0]])
        words = headline(compare(good, bad))
        assert words.mood == "worse"
        assert words.summary.startswith("round-robin is worse than forebay in chat TTFT")
        assert any("longer" in point for point in words.points)
        assert not any("better" in point for point in (words.summary, *words.points))

    def test_better_is_called_better_with_its_interval(self, pair: tuple[Path, Path]) -> None:
        direct, shaped = load_runs(pair)
        words = headline(compare(direct, shaped))
        assert words.mood == "better"
        assert words.points[0].startswith("chat: p99 time to first token 0.45 s with forebay, 7.65")
        assert "17.1× shorter (95 % interval 11.9× to 55.2×)" in words.points[0]
        assert any("rejected 7 and failed 0 of 1,760 requests (0.4 %)" in p for p in words.points)

    def test_the_same_run_twice_shows_no_difference(self, pair: tuple[Path, Path]) -> None:
        run = load_run(pair[0])
        found = compare(run, run)
        assert {one.better for one in found.lines} <= {"equal", None}
        assert headline(found).mood == "none"
        assert found.warnings == ()

    def test_noise_is_not_sold_as_a_win(self, tmp_path: Path) -> None:
        """Two draws from one law whose p99 differ by more than 5 %."""
        a = realistic_rows("forebay", seed=3, documents=0)
        b = realistic_rows("forebay", seed=8, documents=0)
        found = compared(tmp_path, a, b)
        ttft = line(found, "chat", "ttft_p99")
        assert ttft.ratio is not None
        assert abs(ttft.ratio - 1) > 0.05
        assert ttft.better == "unclear"
        words = headline(found)
        assert words.mood == "none"
        assert "not significant" in words.points[0]
        # A change of this size excludes equality, a smaller one does not.
        shows = re.search(
            r"These runs can show only a change of (\d+) % or more\.", words.points[0]
        )
        assert shows is not None
        assert ttft.interval is not None
        least = 1 + int(shows[1]) / 100
        sides = ttft.interval.high / ttft.ratio, ttft.ratio / ttft.interval.low
        assert least == pytest.approx(max(sides), abs=0.006)
        assert (least - 1) * 100 > 10

    @pytest.mark.parametrize(
        ("good", "of", "mood"),
        [((34, 37), 40, "none"), ((9, 12), 12, "none"), ((200, 390), 400, "better")],
    )
    def test_goodput_counts_where_it_is_more_than_luck(
        self, tmp_path: Path, good: tuple[int, int], of: int, mood: str
    ) -> None:
        def rows(met: int) -> list[Row]:
            return [answered(i, "chat", i * 0.1, 1.0 if i < met else 9.0) for i in range(of)]

        a, b = map(rows, good)
        found = compared(tmp_path, a, b, [Slo("chat", "ttft", 5.0)])
        words = headline(found)
        assert words.mood == mood
        for key in ("goodput", "attainment"):
            told = line(found, "run", key)
            assert told.interval is not None
            assert told.interval.clear == (mood == "better")
            assert told.better == ("b" if mood == "better" else "unclear")
        assert ("and goodput;" in words.summary) == (mood == "better")
        assert any("not significant" in point for point in words.points) == (mood == "none")

    def test_a_goodput_without_counts_is_unclear(self, tmp_path: Path) -> None:
        rows = steady(30, 1.0)
        told_a, told_b = (({"goodput_per_s": rate}, Row()) for rate in (1.0, 2.0))
        words = headline(compared(tmp_path, rows, rows, told_a=told_a, told_b=told_b))
        assert words.summary == (
            "No clear difference between b and a; both answered every request."
        )

    def test_refusing_nearly_all_is_not_better_for_being_fast(self, tmp_path: Path) -> None:
        a = steady(1000, 1.0)
        b = [*steady(1000, 0.1)[:100], *(refused(i, "chat", i * 0.1) for i in range(100, 1000))]
        found = compared(tmp_path, a, b, [Slo("chat", "ttft", 5.0)])
        words = headline(found)
        assert words.mood == "mixed"
        assert words.summary == (
            "b is better than a in chat TTFT (of answered requests), worse in goodput; "
            "b left 900 of 1,000 unanswered, a left none."
        )
        assert line(found, "run", "attainment").better == "a"

    def test_single_samples_get_no_verdict(self, tmp_path: Path) -> None:
        """The longest pause is one sample, and the work of two servers one figure a run."""
        a = steady(400, 1.0, stall_s=0.5)
        b = [row | {"backend": f"gpu{number % 4 // 3}"} for number, row in enumerate(a)]
        a = [row | {"backend": f"gpu{number % 2}"} for number, row in enumerate(a)]
        b[7] |= {"stall_s": 1.2}
        found = compared(tmp_path, a, b)
        for section, key, change in (("chat", "stall_max", 2.4), ("run", "imbalance", 3.0)):
            single = line(found, section, key)
            assert single.change == pytest.approx(change)
            assert (single.better, single.interval) == (None, None)
        points = headline(found).points
        assert "chat: longest pause inside an answer 1.20 s with b, 0.50 s with a." in points

    def test_an_interval_without_an_end_says_at_least(self, tmp_path: Path) -> None:
        """All slow requests of A stand in one jam, which eight of ten parts do not have."""
        random = np.random.default_rng(4)
        fast = random.lognormal(0.0, 0.5, 1200)
        slow = 3.0 * fast * random.lognormal(0.0, 0.1, 1200)
        slow[:120] *= 30.0
        a, b = (
            [answered(i, "chat", i * 0.1, ttft_s) for i, ttft_s in enumerate(times.tolist())]
            for times in (slow, fast)
        )
        said = headline(compared(tmp_path, a, b)).points[0]
        assert re.search(r"× shorter \(at least [23]\.\d\d×, with 95 % confidence\)\.$", said)

    def test_without_goodput_the_share_of_answers_decides(self, tmp_path: Path) -> None:
        rows = steady(100, 1.0)
        found = compared(tmp_path, rows, rows[:50] + [refused(i, "chat", 1.0) for i in range(50)])
        assert "worse than a in the share of requests answered" in headline(found).summary

    def test_a_run_with_only_rejects(self, tmp_path: Path) -> None:
        found = compared(
            tmp_path, steady(50, 1.0), [refused(i, "chat", float(i)) for i in range(50)]
        )
        assert line(found, "chat", "ttft_failures_p50").b == math.inf
        by_key = {figure["key"]: figure for figure in found.as_json()["figures"]}
        assert by_key["ttft_failures_p50"]["b"] == "inf"
        words = headline(found)
        assert words.mood == "worse"
        assert words.points[0].startswith("chat: too few answered requests for a percentile (0 ")

    def test_an_empty_run_and_a_bucket_of_one_side(self, tmp_path: Path) -> None:
        document = [answered(0, "document", 0.0, 1.0)]
        found = compared(tmp_path, [], document)
        assert found.buckets == ("document",)
        assert headline(found).mood == "none"

    @pytest.mark.parametrize(
        ("summary", "info", "told"),
        [
            ({"verdict": "client-limited", "verdict_reason": "late", "verdict_at_s": 3.0}, {},
             "b: verdict client-limited (late, first at 3.0 s)"),
            ({}, {"seed": 8}, "different seed: a 7, b 8"),
            ({}, {"rate_per_s": None}, "different rate: a 9.5, b not recorded"),
            ({}, {"load": 0.8}, "different load: a not recorded, b 0.8"),
            ({}, {"time_scale": 1.0}, "different time scale: a 4, b 1"),
            ({}, {"trace": {"sha256": "cd"}}, "different trace sha256"),
            ({}, {"ended": "interrupted"}, "b: ended by interrupted"),
            ({"slos": ["chat.ttft=1s"]}, {}, "different latency targets"),
        ],
    )  # fmt: skip
    def test_what_makes_runs_unfit_is_said(
        self, tmp_path: Path, summary: Row, info: Row, told: str
    ) -> None:
        rows = steady(30, 1.0)
        found = compared(tmp_path, rows, rows, told_b=(summary, info))
        assert len(found.warnings) == 1
        assert told in found.warnings[0]
        if "verdict" in summary:
            words = headline(found)
            assert "Treat with care: the load generator was too slow in b (late" in words.summary
            assert words.mood == "doubtful"
        elif "different" in told:
            words = headline(found)
            assert words.mood == "doubtful"
            assert f"the runs differ in {told.split(':')[0].split(' ', 1)[1]}." in words.summary
        if "slos" in summary:
            again = compared(tmp_path / "again", rows, rows, SLOS, told_b=(summary, info))
            assert again.warnings == ()  # judged anew, both by the same

    @pytest.mark.parametrize(
        ("late", "reason", "later_s", "doubtful"),
        [
            (13, "13 of 1,000 requests left more than 20 ms late because ...", 0.0, False),
            (13, "13 of 1,000 requests left more than 20 ms late because ...", 9.0, True),
            (101, "101 of 1,000 requests left more than 20 ms late because ...", 0.0, True),
            (None, "late", 0.0, True),
        ],
    )
    def test_a_busy_machine_is_a_footnote_unless_it_decides(
        self, tmp_path: Path, late: int | None, reason: str, later_s: float, doubtful: bool
    ) -> None:
        """`later_s`: how late the last 13 requests left, which makes the run worse."""
        a, b = steady(1000, 1.0), steady(1000, 1.0)
        for row in a[-13:]:
            row["ttft_response_s"] += later_s
        told = {"verdict": "client-limited", "verdict_reason": reason, "late_arrivals": late}
        found = compared(tmp_path, a, b, told_a=(told, {}))
        words = headline(found)
        assert (words.mood == "doubtful") == doubtful
        assert bool(found.warnings) == doubtful
        note = (
            "a: the machine was busy: 13 of 1,000 requests left more than 20 ms late; figures may "
            "be a little high."
        )
        assert (note in words.points) != doubtful

    @pytest.mark.parametrize(
        ("info", "second"),
        [
            ({}, "b"),
            ({"started_at": "2026-11-21T09:59:59+00:00"}, "a"),
            ({"targets": [{"url": "http://elsewhere"}, {"url": "http://127.0.0.1:8001/x"}]}, "b"),
            ({"targets": [{"url": "http://127.0.0.1:8002"}]}, None),
            ({"targets": [{"url": "http://[::1"}]}, None),
            ({"targets": "http://127.0.0.1:8001"}, None),
            ({"salt": "b"}, None),
            ({"salt": None}, None),
            ({"started_at": "2026-11-21T10:00:00+00:00"}, None),
            ({"started_at": None}, None),
        ],
    )
    def test_equal_prompts_at_one_server_are_said(
        self, tmp_path: Path, info: Row, second: str | None
    ) -> None:
        """The second found what the first had left in the cache, unless the salt differs."""
        found = again(tmp_path, info).warnings
        assert [text.split()[0] for text in found] == ([second] if second else [])
        for text in found:
            assert "to 127.0.0.1:8001 again" in text
            assert "repeat it without --salt" in text

    @pytest.mark.parametrize(
        "differs",
        [{"trace": {"sha256": "cd"}}, {"model": "llama-3-70b"}, {"endpoint": "chat"}],
    )
    def test_other_prompts_find_no_cache(self, tmp_path: Path, differs: Row) -> None:
        (only,) = again(tmp_path, differs).warnings
        assert only.startswith("different ")

    def test_what_a_run_warned_of_is_said_again(self, tmp_path: Path) -> None:
        rows, warm = (
            steady(30, 1.0),
            {"warnings": ["the caches were warm: 31 of 32 prompt tokens", 5]},
        )
        told_a: tuple[Row, Row] = ({"warnings": "none"}, {})
        assert compared(tmp_path, rows, rows, told_a=told_a, told_b=(warm, {})).warnings == (
            "b: the caches were warm: 31 of 32 prompt tokens",
            "b: 5",
        )

    def test_the_command_repeats_the_run(self, pair: tuple[Path, Path]) -> None:
        assert repeat_command(load_run(pair[0])) == (
            "forebay replay 'traces/rag mix.jsonl' --target http://127.0.0.1:8001 "
            "--arrivals poisson --rate 9.5 --time-scale 4 --endpoint completions --seed 7 "
            "--model llama-3-8b --out round-robin"
        )

    @pytest.mark.parametrize(
        ("info", "words"),
        [
            ({"warmup": 0, "max_in_flight": 10_000, "max_model_len": None}, ""),
            ({"salt": ""}, "--salt ''"),
            ({"salt": "a b"}, "--salt 'a b'"),
            ({"max_model_len": 8192}, "--max-model-len 8192"),
            ({"max_in_flight": 16}, "--max-in-flight 16"),
            ({"warmup": 3}, "--warmup 3"),
            ({"buckets": [{"name": "chat", "up_to": 5000}, {"name": "document", "up_to": 131_072}],
              "slos": [{"bucket": "chat", "metric": "ttft", "limit_s": 2.0},
                       {"bucket": "document", "metric": "ttft", "limit_s": 15.0}]}, ""),
            ({"buckets": [{"name": "all", "up_to": 9}], "slos": []}, "--buckets all:9"),
            ({"slos": [{"bucket": None, "metric": "tpot", "limit_s": 5e-05},
                       {"bucket": "chat", "metric": "ttft", "limit_s": 120.0}]},
             "--slo tpot=0.00005s,chat.ttft=120s"),
            ({"trace": {"path": "traces/rag mix.jsonl", "skipped_bad": 2}}, "--skip-bad"),
            ({"buckets": 5, "slos": [{"bucket": "chat"}, 7]}, ""),
        ],
    )  # fmt: skip
    def test_the_command_has_what_was_not_the_default(
        self, tmp_path: Path, info: Row, words: str
    ) -> None:
        run = load_run(write_run(tmp_path / "r", steady(3, 1.0), info=info))
        said = repeat_command(run).partition("--model llama-3-8b ")[2]
        assert said == f"{words} --out r".lstrip()

    def test_the_command_of_a_closed_loop_has_no_limit(self, tmp_path: Path) -> None:
        info = {"arrivals": "closed:16", "max_in_flight": 16}
        run = load_run(write_run(tmp_path / "r", steady(3, 1.0), info=info))
        assert "--arrivals closed:16" in repeat_command(run)
        assert "--max-in-flight" not in repeat_command(run)


class TestCommand:
    def test_table_fits_eighty_columns(
        self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        out = printed("compare", *pair)
        assert max(map(len, out.splitlines())) <= 80
        rows = [row.split() for row in out.splitlines()]
        assert ["TTFT", "p99", "7.646", "s", "0.446", "s", "0.058×", "forebay"] in rows
        assert ["goodput", "7.10", "/s", "9.40", "/s", "1.32×", "forebay"] in rows
        assert ["95", "%", "interval", "of", "B/A", "0.018×", "to", "0.084×"] in rows
        assert ["TTFT", "p99", "–", "–", "–"] in rows  # 160 documents are too few

    def test_json_is_data_only(self, pair: tuple[Path, Path]) -> None:
        done = forebay("compare", *pair, "--json", "--slo", "chat.ttft=200ms")
        data = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        assert data["slo"] == ["chat.ttft=0.2s"]
        by_key = {(figure["section"], figure["key"]): figure for figure in data["figures"]}
        assert by_key["run", "goodput"]["better"] == "b"
        assert by_key["chat", "ttft_p99"]["interval_95"] == [
            pytest.approx(11.90, abs=0.02), pytest.approx(55.21, abs=0.02),
        ]  # fmt: skip
        assert data["headline"].startswith("forebay is better")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["{a}", "{a}x"], "ax: not there; give a run folder"),
            (["{a}", "{b}", "--slo", "chat.ttft"], "is not METRIC=TIME"),
            (["{a}", "{b}", "--slo", "document.ttft=1s"], "no bucket 'document'; one of: chat"),
            (["{a}"], "give two or more runs: the baseline, and those to compare with it"),
            (["{a}", "{b}", "--fail-if", "faster"], "write e.g. 'chat.ttft_p99 > 5%'"),
            (["{a}", "{b}", "--fail-if", "ttft_p98 > 5%"], "no figure 'ttft_p98'; one of: ttft,"),
            (["{a}", "{b}", "--fail-if", "ttft.p99 > 5%"], "write ttft_p99"),
            (["{a}", "{b}", "--fail-if", "ttft_p50 > 2"], "give the time with its unit"),
            (["{a}", "{b}", "--fail-if", "ttft_p50 > 2kg"], "2kg is no limit; give a time such as"),
            (["{a}", "{b}", "--fail-if", "goodput < 2s"], "give a number or a change such as 5%"),
            (["{a}", "{b}", "--fail-if", "attainment < 99"], "is a share from 0 to 1, or a change"),
            (["{a}", "{b}", "--fail-if", "chta.ttft_p50 > 5%"], "no bucket 'chta'; one of: chat"),
            (["{a}", "{b}", "--min-beyond", "1", "--fail-if", "ttft_p99 > 5%"],
             "b has too few requests for ttft_p99 (it needs 100)"),
            (["{a}", "{b}\udcff", "--json"], "b\ufffd: its name is not UTF-8; rename it"),
            (["{a}", "{b}", "--min-beyond", "-1"], "--min-beyond"),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_line_and_status_two(
        self, tmp_path: Path, words: list[str], told: str
    ) -> None:
        for name in ("a", "b"):
            write_run(tmp_path / name, steady(3, 1.0))
        places = {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
        err = refusal("compare", *[w.format(**places) for w in words])
        assert told in err

    @pytest.mark.parametrize(
        ("conditions", "told"),
        [
            (["chat.ttft_p50 > 5%"], "chat.ttft_p50 of b is 1.66 s, +10.4 % against 1.50 s of "
                                     "a (limit > 5 %)"),
            (["ttft_p50 > 15%"], None),
            (["output_tokens_per_s < 1000"], "output_tokens_per_s of b is"),
            (["chat.ttft_p50 < -5%"], None),
            (["ttft_max > 2.1s"], "ttft_max of b is 2.20 s (limit > 2.10 s)"),
            (["ttft_max > 2300ms"], None),
            (["rejected > 5%"], "rejected of b is 5, beyond measure against 0 of a (limit > 5 %)"),
            (["rejected > 5"], None),
            (["chat.answered < -3%"], "chat.answered of b is 95, -5.0 % against 100 of a"),
            (["attainment < 0.96"], "attainment of b is 47.0 % (limit < 96.0 %)"),
            (["e2e_p50 > 99h", "ttft_max > 2.1s"], "ttft_max of b"),
            (["failed > 0%"], None),
        ],
    )  # fmt: skip
    def test_a_condition_fails_a_build(
        self, tmp_path: Path, conditions: list[str], told: str | None
    ) -> None:
        a = write_run(tmp_path / "a", steady(100, 1.0))
        worse = [*steady(95, 1.1), *(refused(100 + i, "chat", 9.5 + i / 10) for i in range(5))]
        b = write_run(tmp_path / "b", worse)
        limits = [word for text in conditions for word in ("--fail-if", text)]
        said = forebay("compare", a, b, "--json", "--slo", "chat.ttft=1.65s", *limits)
        failures = json.loads(said.stdout)["failures"]
        if told is None:
            assert (said.returncode, failures, said.stderr) == (0, [], "")
        else:
            assert failures[0].startswith(told)
            assert (said.returncode, said.stderr) == (1, f"forebay compare: {failures[0]}\n")

    def test_more_runs_are_compared_with_the_first(self, tmp_path: Path) -> None:
        runs = [
            write_run(tmp_path / name, steady(100, ttft_s))
            for name, ttft_s in (("a", 1.0), ("b", 0.5), ("c", 2.0))
        ]
        found = json.loads(printed("compare", *runs, "--json"))["comparisons"]
        assert [(one["a"]["name"], one["b"]["name"]) for one in found] == [("a", "b"), ("a", "c")]
        assert [one["mood"] for one in found] == ["better", "worse"]
        said = forebay("compare", *runs, "--fail-if", "ttft_p50 > 5%")
        assert said.returncode == 1
        assert said.stderr.startswith("forebay compare: ttft_p50 of c is 3.00 s, +100.0 % against")
        # What cannot be judged hides no failure of another condition, or of another run.
        limits = ("--fail-if", "ttft_p50 > 5%", "--fail-if", "ttft_p99 > 5%")
        said = forebay("compare", *runs, *limits)
        assert said.returncode == 2
        assert "ttft_p50 of c is 3.00 s, +100.0 % against" in said.stderr
        for name in ("b", "c"):
            assert f"{name} has too few requests for ttft_p99 (it needs 1,000)" in said.stderr
        said = forebay("compare", *runs, "--fail-if-worse")
        assert (said.returncode, said.stderr.count("\n")) == (1, 1)
        assert said.stderr.startswith("forebay compare: --fail-if-worse: c is worse than a in chat")
        assert remarks("compare", *runs[:2], "--fail-if-worse") == ""

    def test_a_bucket_without_requests_may_have_a_target(self, tmp_path: Path) -> None:
        """The example of --help on runs with chats only; run.json names the buckets."""
        planned = [{"name": "chat", "up_to": 5000}, {"name": "document", "up_to": 131_072}]
        runs = [
            write_run(tmp_path / name, steady(30, 1.0), info={"buckets": planned})
            for name in ("a", "b")
        ]
        slos = "chat.ttft=1.5s,document.ttft=15s"
        data = json.loads(printed("compare", *runs, "--json", "--slo", slos))
        assert data["slo"] == ["chat.ttft=1.5s", "document.ttft=15s"]
        by_key = {(figure["section"], figure["key"]): figure for figure in data["figures"]}
        assert by_key["run", "attainment"]["a"] == 0.5
        said = refusal("compare", *runs, "--slo", "video.ttft=1s")
        assert "no bucket 'video'; one of: chat, document" in said

    @pytest.mark.parametrize("listed", [None, 5, ["chat"], [{"up_to": 1}], [{"name": 7}]])
    def test_strange_buckets_of_run_json_are_left_out(self, tmp_path: Path, listed: object) -> None:
        run = load_run(write_run(tmp_path / "a", steady(3, 1.0), info={"buckets": listed}))
        assert run.planned_buckets() == []

    def test_hostile_names_stay_text(self, tmp_path: Path) -> None:
        hostile = "[red]\x1b[2Jrun"
        a = write_run(tmp_path / "a", steady(30, 1.0))
        b = write_run(tmp_path / hostile, steady(30, 0.5))
        out = printed("compare", a, b)
        assert "\x1b" not in out
        assert "[red]" in out


def test_numbers_written_by_the_replayer_are_understood(tmp_path: Path) -> None:
    """summary.json's own words: "inf" where failures count, null where hidden."""
    told = {"goodput_per_s": "inf", "attainment": None}
    run = load_run(write_run(tmp_path / "r", steady(3, 1.0), told))
    assert (run.number("goodput_per_s"), run.number("attainment")) == (math.inf, None)
    assert run.number("no", "such") is None


def test_summary_and_run_may_lack_all_but_the_number_of_requests(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", steady(30, 1.0))
    for name, kept in (("summary.json", {"requests": 30}), ("run.json", {})):
        (folder / name).write_bytes(orjson.dumps(kept))
    run = load_run(folder)
    found = compare(run, run)
    assert verdict(run).word == "unknown"
    assert repeat_command(run) == ""
    assert "unknown" in headline(found).summary


class TestSessions:
    """`session.e2e`: a replay, a simulation and an analysis judge alike."""

    def rows(self, later_s: float) -> list[Row]:
        """Thirty tasks of two requests; that of every tenth is rejected."""
        made = []
        for number in range(30):
            task, due_s = f"s{number}", number * 1.0
            made.append(answered(2 * number, "chat", due_s, 0.5, task=task))
            last = refused if number % 10 == 9 else answered
            ttft = () if number % 10 == 9 else (0.5,)
            made.append(last(2 * number + 1, "chat", due_s + later_s, *ttft, task=task))
        return made

    def test_times_are_compared_and_can_fail_a_run(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, self.rows(10.0), self.rows(18.5))
        found = line(comparison, "run", "session_e2e_p50")
        assert (found.a, found.b) == (11.5, 20.0)
        for text in ("session.e2e_p50 > 15s", "session.e2e_p50 > 5%", "session.e2e_max > 15s"):
            assert len(broken([comparison], [parse_limit(text)])) == 1
        assert not broken([comparison], [parse_limit("session.e2e_p50 > 30s")])

    def test_all_requests_of_a_task_meet_its_target_or_none(self, tmp_path: Path) -> None:
        run = load_run(write_run(tmp_path / "a", self.rows(10.0)))
        (slo,) = parse_slos("session.e2e=12s", [])
        assert figures(run, None, [slo]).attainment == 54 / 60
        assert figures(run, None, [replace(slo, limit_s=11.0)]).attainment == 0.0

    def test_runs_without_sessions_have_no_such_figure(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, steady(30, 0.1), steady(30, 0.1))
        assert comparison.line("run", "session_e2e_p50") is None
        with pytest.raises(InputError, match="session_e2e_p50"):
            broken([comparison], [parse_limit("session.e2e_p50 > 15s")])


class TestPairs:
    """The same requests at the same times are compared one by one."""

    def rows(self, seed: int, jitter: float, factor: float = 1.0) -> list[Row]:
        times = np.random.default_rng(1).lognormal(-2.0, 1.0, 3_000)  # those of the requests
        noise = np.random.default_rng(seed).lognormal(0.0, jitter, 3_000)
        return [
            answered(i, "chat", i * 0.1, float(factor * times[i] * noise[i])) for i in range(3_000)
        ]

    def test_what_both_runs_share_falls_out(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, self.rows(2, 0.02), self.rows(3, 0.02, 1.1))
        assert comparison.paired == ("chat",)
        p99 = line(comparison, "chat", "ttft_p99")
        assert p99.change_interval is not None
        assert 1.03 < p99.change_interval.low < 1.1 < p99.change_interval.high < 1.2
        assert p99.better == "a"

    def test_other_times_or_other_requests_are_not_paired(self, tmp_path: Path) -> None:
        first = self.rows(2, 0.02)
        later = [{**row, "intended_s": row["intended_s"] + 5.0} for row in first]
        renamed = [{**row, "id": f"x{row['id']}"} for row in first]
        twice = [{**row, "id": "same"} for row in first]
        fewer = first[:2_900]
        for number, other in enumerate((later, renamed, twice, fewer)):
            comparison = compared(tmp_path / str(number), first, other)
            assert comparison.paired == ()

    def test_without_pairs_the_reader_is_told_what_a_verdict_needs(self, tmp_path: Path) -> None:
        def points(name: str, a: list[Row], b: list[Row], *schedules: str) -> list[str]:
            infos = [{"schedule": {"sha256": schedule}} for schedule in schedules] or [{}, {}]
            told_a, told_b = ((Row(), info) for info in infos)
            found = compared(tmp_path / name, a, b, told_a=told_a, told_b=told_b)
            return [point for point in headline(found).points if "pair" in point]

        first, slower = self.rows(2, 0.02), self.rows(3, 0.02, 1.1)
        renamed = [{**row, "id": f"x{row['id']}"} for row in slower]
        needs = "Send the same trace with the same seed to both."
        (said,) = points("other", first, renamed)
        assert said.startswith("chat: no verdict without pairs")
        assert said.endswith(needs)
        assert points("seeds", first, renamed, "aa", "bb") == [said]
        # The same requests were sent, but one run answered fewer: another seed is no help.
        (said,) = points("fewer", first, slower[:2_900], "aa", "aa")
        assert "under 99 % of the answered requests are in both runs" in said
        assert needs not in said
        # A simulated run has no schedule, but the ids of the requests that it rejected.
        rejected = [{**row, "outcome": "rejected", "ttft_response_s": None} for row in slower[:100]]
        assert points("simulated", first, rejected + slower[100:]) == [said]
        # Pairs, or a difference that needs none.
        assert points("paired", first, slower) == []
        assert points("clear", first, [{**row, "id": f"x{row['id']}"} for row in
                                       self.rows(3, 0.02, 5.0)]) == []  # fmt: skip
