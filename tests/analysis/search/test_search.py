"""`forebay search`: the bracket, the evidence, resumption, the sentence, and a known knee."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from commands import forebay, printed, refusal, remarks
from known_queue import known_queue, searched, within
from stages.replay_server import Server, answer, rows, serve

from forebay.analysis.search.bracket import Bracket, bracket
from forebay.analysis.search.cli import SearchArguments
from forebay.analysis.search.evidence import (
    Evidence,
    clump_size,
    judge_trial,
    slow,
    warm_up,
    z_of_looks,
)
from forebay.analysis.search.result import result_of
from forebay.analysis.search.search import (
    TRIALS,
    LoadSearch,
    SearchQuestion,
    least_part_s,
    users_per_load,
)
from forebay.analysis.search.trial import HttpTrials, TrialRow
from forebay.analysis.statistics.quantiles import Floats
from forebay.replay.clock.virtual_loop import run
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.plan.slo import Slo
from forebay.replay.runner import Summary, replay
from forebay.traces.edit.edit import repeated
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace


@pytest.mark.parametrize("unsure", [0, 1, 5])
@pytest.mark.parametrize("last", [-1, 0, 13, 99])
@pytest.mark.parametrize("guess", [0, 50, 99])
def test_a_bracket_encloses_exactly_what_is_unsure(last: int, unsure: int, guess: int) -> None:
    asked: list[int] = []

    def passes(index: int) -> bool | None:
        asked.append(index)
        return True if index <= last else None if index <= last + unsure else False

    found = bracket(passes, guess, 0, 99)
    assert found == Bracket(last, min(100, last + unsure + 1))
    assert len(set(asked)) == len(asked) <= 20


def test_one_look_decides_at_95_percent_and_more_looks_are_stricter() -> None:
    assert z_of_looks(1) == pytest.approx(1.645, abs=1e-3)
    assert z_of_looks(4) == pytest.approx(2.241, abs=1e-3)
    enough = Evidence(1000, 1000, 1000.0)
    assert enough.decides(0.99, z_of_looks(1)) is True
    assert replace(enough, effective=100.0).decides(0.99, z_of_looks(1)) is None
    assert Evidence(950, 1000, 1000.0).decides(0.99, z_of_looks(1)) is False


def test_late_requests_that_come_together_are_worth_fewer() -> None:
    dice = np.random.default_rng(1)
    alone = dice.random(20_000) < 0.02
    assert clump_size(alone) < 2
    together = np.repeat(dice.random(1_000) < 0.02, 20)
    assert 8 < clump_size(together) < 50


def test_clumps_are_seen_where_nothing_is_late() -> None:
    score = np.repeat(np.random.default_rng(2).random(200), 10) / 2  # all in time, in runs of ten
    assert slow(score).sum() == 40
    found = judge_trial(np.arange(2000.0), score, np.full(2000, 0.1))
    assert found.good == found.count == 1800
    assert found.effective < 600


def test_the_warm_up_is_a_tenth_or_two_answers_and_at_most_half() -> None:
    due: Floats = np.linspace(0.0, 99.9, 1000)

    def first(answer_s: float) -> int:
        return warm_up(due, np.full(1000, answer_s, np.float64))

    assert first(1.0) == 100
    assert first(12.0) == pytest.approx(240, abs=1)
    assert first(900.0) == 500
    assert first(np.nan) == 500  # nothing was answered


class KnownCurve:
    """Trials whose requests are good independently, at a share that falls to 99 % at 10/s."""

    def __init__(self, seed: int, stop_after: int = 10**9) -> None:
        self.seed, self.left = seed, stop_after

    def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        dice = np.random.default_rng([self.seed, round(rate_per_s * 1e6), part])
        missed = min(1.0, 0.01 * (rate_per_s / 10) ** 12)
        good = int(dice.binomial(len(rows), 1 - missed))
        return TrialRow(rate_per_s, part, len(rows), len(rows), good, len(rows), rate_per_s, 1, 2)


def question(**more: float) -> SearchQuestion:
    asked = {"wanted": 0.99, "resolution": 0.02, "part_rows": 1000, "most_parts": 16,
             "start_per_s": 3.0}  # fmt: skip
    return SearchQuestion(rows(5000), **{**asked, **more})  # type: ignore[arg-type]


def test_nine_of_ten_answers_are_within_five_percent_of_a_known_curve() -> None:
    near = 0
    for seed in range(10):
        search = LoadSearch(question(), KnownCurve(seed))
        found = result_of(search, search.run(), ["ttft=2s"])
        assert found.highest_per_s is not None
        assert found.fails_at_per_s is not None
        assert found.highest_per_s < found.fails_at_per_s
        near += abs(found.highest_per_s / 10 - 1) <= 0.05
        assert found.sentence.startswith(f"At {found.highest_per_s:g} requests/s, 99 % of requests")
        assert "with 95 % confidence" in found.sentence
        assert f"at {found.fails_at_per_s:g} it fails" in found.sentence
    assert near >= 9


def test_loads_far_from_the_answer_take_one_part() -> None:
    """A proof takes 4 parts of 250, even where no request is late."""
    search = LoadSearch(question(part_rows=250, resolution=0.05), KnownCurve(0))
    found = result_of(search, search.run(), ["ttft=2s"])
    assert found.highest_per_s == pytest.approx(10, rel=0.06)
    far = {load: len(parts) for load, parts in search.trials.items() if not 8 < load < 12}
    assert len(far) >= 4
    assert set(far.values()) == {1}


def test_a_search_on_a_url_takes_smaller_parts_than_a_simulation() -> None:
    def part_rows(target: str) -> int:
        given = SearchArguments(trace=Path("-"), target=[target])
        return given.question(rows(5000, gap_s=0.1), given.slos()).part_rows

    assert part_rows("http://127.0.0.1:1") < 500 <= part_rows("sim:llama-3-8b@h200")


@pytest.mark.parametrize("screen", [True, False])
def test_each_part_of_a_search_has_a_screen_on_a_terminal(
    screen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of many minutes showed nothing. In a log it still has no lines of its own."""
    monkeypatch.setattr("forebay.replay.results.progress.has_screen", lambda: screen)
    given = SearchArguments(trace=Path("-"), target=["http://127.0.0.1:1"], out=Path("found"))
    maker = given.http_trials(())
    assert isinstance(maker, HttpTrials)
    assert maker.options.quiet is not screen


def test_the_closed_form_of_the_known_queue() -> None:
    # From the tables of L. Takacs's formula for M/D/1: P(W = 0) = 1 - rho, and the mean wait.
    assert within(0.5, 1.0, 0.0) == pytest.approx(0.5)
    waits = np.arange(0, 60, 0.01)
    mean = sum(1 - within(0.5, 1.0, float(wait)) for wait in waits[::10]) * 0.1
    assert mean == pytest.approx(0.5 / (2 * 0.5), abs=0.06)  # rho / (2 (1 - rho))


def test_a_search_on_a_simulated_engine_finds_the_knee_that_is_known() -> None:
    queue = known_queue()
    found = searched(queue, 1, resolution=0.1, parts=4)
    assert found.highest_per_s is not None
    assert found.fails_at_per_s is not None
    assert found.highest_per_s < queue.knee_per_s < found.fails_at_per_s
    assert found.highest_per_s > 0.8 * queue.knee_per_s


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = LoadSearch(question(), KnownCurve(3))
    wanted = whole.run()
    first = LoadSearch(question(), KnownCurve(3, stop_after=7), tmp_path)
    assert first.resume({"slo": "x"}) == 0
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = LoadSearch(question(), KnownCurve(3), tmp_path)
    assert second.resume({"slo": "x"}) == 7
    assert second.run() == wanted
    assert second.ran == whole.ran - 7
    assert result_of(second, wanted, []) == result_of(whole, wanted, [])


def test_a_folder_with_another_question_is_an_error(tmp_path: Path) -> None:
    search = LoadSearch(question(), KnownCurve(0), tmp_path)
    search.resume({"slo": "ttft=1s", "seed": 1})
    search.run()
    other = LoadSearch(question(), KnownCurve(0), tmp_path)
    with pytest.raises(InputError, match=r"another question \(slo\)"):
        other.resume({"slo": "ttft=2s", "seed": 1})
    assert other.resume({"slo": "ttft=2s", "seed": 1}, force=True) == 0
    assert not (tmp_path / TRIALS).exists()


def test_a_trace_that_is_too_short_leaves_the_answer_open() -> None:
    search = LoadSearch(question(part_rows=200, most_parts=1), KnownCurve(0))
    found = result_of(search, search.run(), ["ttft=2s"])
    assert found.highest_per_s is None  # 200 good requests do not prove 99 %
    assert found.sentence.startswith("No load down to")


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("wanted", [0.9, 0.99, 0.995])
def test_the_least_part_that_proves_a_share(wanted: float, repeats: bool) -> None:
    """With one request fewer, no load can be proven even if none is late."""

    class NoneLate(KnownCurve):
        def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
            judged = len(rows) - len(rows) // 10
            return TrialRow(rate_per_s, part, len(rows), judged, judged, judged, rate_per_s, 1, 2)

    def asked(size: int) -> SearchQuestion:
        part = {"part_rows": size, "most_parts": 1, "wanted": wanted, "repeats": repeats}
        return replace(question(**part), rows=rows(size))

    least = asked(10).least_part_rows
    for size in (least - 1, least):
        search = LoadSearch(asked(size), NoneLate(0))
        assert asked(size).can_prove() is (size == least)
        assert search.passes(0) is (True if size == least else None)


def test_a_trace_for_a_single_part_is_looked_at_once() -> None:
    once = question(repeats=False, part_rows=3000)
    assert once.z == z_of_looks(1) < question(repeats=False).z < question().z == z_of_looks(5)


def test_what_was_met_and_still_is_no_proof_is_said() -> None:
    class Clumped(KnownCurve):
        def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
            return TrialRow(rate_per_s, part, 1000, 900, 900, 90.0, rate_per_s, 1, 2)

    search = LoadSearch(question(most_parts=1), Clumped(0))
    found = result_of(search, search.run(), [])
    assert found.highest_per_s is None
    (warning,) = found.warnings
    assert "none of 900 requests missed, but the slowest came together" in warning
    assert "prove no more than 90 on their own would; give a longer trace" in warning


def test_a_part_is_longer_than_an_overload_can_hide() -> None:
    """At 20 targets, work that comes 6 % too fast is late for a sixth of the part."""
    slos = (Slo("chat", "ttft", 2.0), Slo("document", "ttft", 15.0), Slo(None, "tpot", 60.0))
    assert least_part_s(slos, {"chat"}) == 40
    assert least_part_s(slos, {"chat", "document"}) == 300
    asked = question(least_s=40.0)
    assert [len(asked.part(0, load)) for load in (10.0, 25.0, 80.0, 400.0)] == [
        1000, 1000, 3200, 5000
    ]  # fmt: skip
    assert [asked.too_short(load) for load in (80.0, 125.0, 126.0)] == [False, False, True]
    assert [question(repeats=False, least_s=40.0).parts_at(load) for load in (10.0, 60.0)] == [4, 2]


def test_a_trace_that_is_over_too_soon_proves_no_load_but_refutes() -> None:
    search = LoadSearch(question(least_s=1000.0), KnownCurve(0))  # 5,000 requests: up to 5/s
    found = result_of(search, search.run(), ["ttft=2s"])
    assert found.highest_per_s == pytest.approx(5.0, rel=0.03)
    assert found.fails_at_per_s == pytest.approx(10.4, rel=0.05)
    (warning,) = found.warnings
    assert re.match(r"from 5\.\d+/s on the trace's 5,000 requests are over in less than", warning)


def test_an_overload_that_a_short_trace_hides_is_not_proven(tmp_path: Path) -> None:
    """One simulated GPU keeps 13.8/s of these and not 18/s, of which 300 are over in 17 s.

    Parts are longer than that, as the trace is repeated with prompts of its own.
    """
    path = tmp_path / "short.jsonl"
    write_trace(path, (TraceRequest(f"r{at}", at * 0.2, 2000, 200) for at in range(300)))
    out = tmp_path / "search"
    said = remarks(
        *("search", path, "--target", "sim:llama-3-8b@h200", "--slo", "ttft=4s", "--arrivals"),
        *("poisson", "--attainment", "0.9", "--resolution", "0.3", "--parts", "2", "--out", out),
        "--json",
    )
    found = orjson.loads((out / "result.json").read_bytes())
    assert 300 / 80 < found["highest_rate_per_s"] < 18
    assert found["fails_at_per_s"] <= 18 * 1.3
    assert not any("20 times the longest target" in warning for warning in found["warnings"])
    assert "sessions are repeated, with prompts of their own" in said


def test_a_short_trace_at_its_own_times_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    write_trace(path, (TraceRequest(f"r{at}", at * 0.2, 2000, 200) for at in range(400)))
    told = refusal("search", path, "--target", "sim:llama-3-8b@h200", "--slo", "ttft=15s")
    assert "no load above 1.33/s can be proven: its 400 requests are then over in less" in told
    assert "give --arrivals poisson, which repeats its sessions with new prompts" in told


def test_a_repeated_trace_shares_nothing_between_its_copies() -> None:
    messages = ({"role": "user", "content": [{"type": "text", "text": "hi"}]},)
    trace = [
        TraceRequest("a", 0.0, 600, 5, blocks=(1, 2), session="s"),
        TraceRequest("b", 4.0, 1200, 5, blocks=(1, 2, 3), session="s", parent="a"),
        TraceRequest("c", 6.0, 9, 5, text="hello"),
        TraceRequest("d", 9.0, 9, 5, messages=messages),
    ]
    many = repeated(trace, 10)
    assert many[:4] == trace
    assert [row.arrival_s for row in many[4:]] == [12.0, 16.0, 18.0, 21.0, 24.0, 28.0]
    assert len({row.id for row in many}) == 10
    first, second = many[4], many[5]
    assert (first.session, second.session, second.parent) == ("2/s", "2/s", "2/a")
    assert first.blocks is not None
    assert second.blocks is not None
    assert first.blocks == second.blocks[:2]
    assert not {1, 2, 3} & set(second.blocks)
    assert (many[6].text, len(many[7].messages or ())) == ("(2) hello", 2)


def test_a_load_at_the_edge_is_given_up_with_the_reason() -> None:
    """99 % of the requests are good at 10/s: no number of requests decides that."""

    class Edge(KnownCurve):
        def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
            good = len(rows) - len(rows) // (100 + (part % 2))
            return TrialRow(rate_per_s, part, len(rows), len(rows), good, 100.0, rate_per_s, 1, 2)

    told: list[str] = []
    search = LoadSearch(question(most_parts=64), Edge(0), report=told.append)
    assert search.passes(0) is None
    assert search.ran == 8  # of 64
    assert re.match(r"1/s: given up, as 99.05% is too near 99.00% for 64,000 requests", told[-1])


def test_the_answer_in_users(tmp_path: Path) -> None:
    """Each session sends three requests, a minute apart: 2/s are 120 sessions at once."""
    trace = [
        TraceRequest(f"{at}-{turn}", at * 1.0 + turn * 60.0, 100, 5, session=str(at))
        for at in range(100) for turn in range(3)
    ]  # fmt: skip
    trace.sort(key=lambda row: row.arrival_s)
    assert users_per_load(trace) == 60.0
    assert users_per_load(rows(100)) is None
    search = LoadSearch(question(users=60.0), KnownCurve(0))
    found = result_of(search, search.run(), [])
    assert found.highest_per_s is not None
    assert found.users == pytest.approx(60 * found.highest_per_s)
    assert not found.open_ended


def test_bounds_far_apart_are_no_result() -> None:
    class Undecided(KnownCurve):
        def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
            share = 1.0 if rate_per_s < 3 else 0.99 if rate_per_s < 90 else 0.5
            good = int(share * len(rows))
            return TrialRow(rate_per_s, part, len(rows), len(rows), good, 1000, rate_per_s, 1, 2)

    search = LoadSearch(question(resolution=0.5, most_parts=4), Undecided(0))
    found = result_of(search, search.run(), ["ttft=2s"])
    assert found.open_ended
    assert found.sentence.endswith("the loads above it are undecided.")
    assert any("is undecided: 99.00% of 4,000 requests met the targets" in warning
               for warning in found.warnings)  # fmt: skip


def test_trials_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server answers one request at a time in 25 ms, so 40 a second are too many."""

    busy: list[asyncio.Lock] = []

    async def one_at_a_time(
        server: Server, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        async with busy[0]:
            return await answer(server, request, body)

    def play(options: ReplayOptions) -> Summary:
        async def work() -> Summary:
            busy[:] = [asyncio.Lock()]
            async with serve(Server(behaviour=one_at_a_time)) as up:
                return await replay(replace(options, targets=[up.url]))

        return run(work())

    slos = (Slo(None, "ttft", 0.2),)
    options = ReplayOptions((), (), tmp_path, arrivals=Arrivals("poisson"), slos=slos, quiet=True)
    maker = HttpTrials(options, tmp_path, slos, play)
    slow_pace, fast_pace = maker.run(rows(300), 10.0, 0), maker.run(rows(300), 60.0, 0)
    assert "10/s: sending 300 requests, about 30 s" in capsys.readouterr().err
    assert slow_pace.good == slow_pace.judged == 270
    assert slow_pace.completed_per_s == pytest.approx(10, rel=0.01)  # also as arrivals end
    assert fast_pace.good < fast_pace.judged / 2
    assert fast_pace.completed_per_s == pytest.approx(40, rel=0.1)
    assert fast_pace.verdict == "valid"
    assert slow_pace.ttft_p50_s is not None
    assert slow_pace.ttft_p50_s < 0.05


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, (TraceRequest(f"r{at}", at * 0.2, 2000, 20) for at in range(400)))
    return path


def test_the_command_on_a_simulated_engine(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "search"
    words = ("search", trace, "--target", "sim:llama-3-8b@h200", "--slo", "ttft=1s",
             "--arrivals", "poisson", "--attainment", "0.9", "--resolution", "0.2",
             "--requests", "400", "--parts", "4", "--out", out)  # fmt: skip
    told = printed(*words).replace("\n", " ")
    assert "90 % of requests meet ttft=1s with 95 % confidence" in told
    kept = (out / TRIALS).read_bytes()
    result = orjson.loads(printed(*words, "--json"))  # nothing is left to measure
    assert result == orjson.loads((out / "result.json").read_bytes())
    assert result["highest_rate_per_s"] < result["fails_at_per_s"]
    assert (out / TRIALS).read_bytes() == kept
    assert (out / "curve.svg").read_text().startswith("<svg")


def test_a_curve_measures_the_loads_that_were_given(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve"
    words = ("search", trace, "--target", "sim:llama-3-8b@h200", "--slo", "ttft=1s", "--arrivals",
             "poisson", "--requests", "400", "--json")  # fmt: skip
    result = orjson.loads(printed(*words, "--out", out, "--curve", "40,2,10"))
    assert [point["rate_per_s"] for point in result["curve"]] == [2, 10, 40]
    completed = [point["completed_per_s"] for point in result["curve"]]
    assert completed[0] == pytest.approx(2, rel=0.1)
    assert completed[2] < 36  # more is offered than one GPU completes
    assert (result["knee_per_s"], result["fails_at_per_s"], result["warnings"]) == (10, 40, [])
    assert len((out / TRIALS).read_bytes().splitlines()) == 3
    drawn = (out / "curve.svg").read_text()
    assert "requests per second completed, simulated" in drawn
    assert ">knee<" in drawn
    (warning,) = orjson.loads(printed(*words, "--curve", "2"))["warnings"]  # why it proves nothing
    assert warning.startswith("at 2/s none of 360 requests missed")
    said = refusal(*words, "--curve", "1,no")
    assert "--curve 1,no: give requests a second, such as 1,2,4" in said


@pytest.mark.parametrize("shared", [True, False])
def test_a_repeated_trace_of_shared_documents_is_a_warning(shared: bool, tmp_path: Path) -> None:
    """16,000 rows bear 22.4/s, where repeats of a short trace bear 18.7/s: they share nothing."""
    path = tmp_path / "trace.jsonl"
    trace = [
        TraceRequest(f"r{at}", at * 0.2, 1024, 20, blocks=(at % 3 if shared else at, 999 + at))
        for at in range(120)
    ]
    write_trace(path, trace)
    done = forebay(
        *("search", path, "--target", "sim:llama-3-8b@h200", "--slo", "ttft=2s", "--arrivals"),
        *("poisson", "--attainment", "0.9", "--resolution", "0.5", "--requests", "100"),
        *("--parts", "2"),
    )
    told = "the trace's 120 requests were repeated with prompts of their own, which find no docu"
    assert (told in done.stderr) == shared


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target", "http://127.0.0.1:1"], "--out"),
        (["--target", "sim:llama-3-8b", "--attainment", "99"], "--attainment 99"),
        (["--target", "sim:llama-3-8b", "--arrivals", "closed:4"], "--arrivals"),
        (["--target", "foo"], "'foo' is not a URL; write e.g. http://127.0.0.1:8080, or sim:MODEL"),
        (["--target", "sim:llama-3-8b", "--start", "0"], "--start 0"),
        (["--target", "sim:llama-3-8b", "--start", "1e12"], "above 0 and below a million"),
        (
            ["--target", "sim:llama-3-8b@h200", "--attainment", "0.995"],
            "1 part of 400 requests cannot prove with 95 % confidence that 99.5 % meet their "
            "targets, even if all do; one part of 598 could: give a trace of 598 or more, "
            "--arrivals poisson (each part at new times), or a lower --attainment",
        ),
        (
            ["--target", "http://127.0.0.1:1", "--out", "none"],
            "1 part of 250 requests cannot prove with 95 % confidence that 99 % meet their "
            "targets, even if all do; one part of 297 could: give --requests 297, --arrivals",
        ),
        (["--target", "sim:llama-3-8b", "--slo", "video.ttft=1s"], "no bucket 'video'"),
        (["--target", "sim:a", "--target", "sim:b"], "one sim: target"),
    ],
)
def test_bad_usage(trace: Path, words: list[str], says: str) -> None:
    assert says in refusal("search", trace, *words)
