"""The studies of a whole service: knees, sharing, floods, KV cache, needles; in virtual time."""

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from stages.replay_server import MODEL, Server, serve
from study_runs import PHI, study

from forebay.analysis.charts.heat_map import heat_map
from forebay.analysis.experiments.gauges import GaugeSample, Pool, read_page
from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.load_stats import good, percentile
from forebay.analysis.experiments.result import Result, doubted
from forebay.analysis.experiments.studies import flood, needle, shared_document
from forebay.analysis.experiments.studies.flood import Flood
from forebay.analysis.experiments.studies.hol_fleet import REMEDIES, THEIRS, HolFleet
from forebay.analysis.experiments.studies.kv_study import KvCache
from forebay.analysis.experiments.studies.needle import Needle
from forebay.analysis.experiments.studies.saturation import Saturation, seats_seen
from forebay.analysis.experiments.studies.shared_document import PHASES, SharedDocumentStudy
from forebay.analysis.experiments.study import Study, numbers
from forebay.analysis.experiments.systems import IN_TURN, PROXY, PlayedLoad, SimWay, Way, sim_ways
from forebay.analysis.experiments.target import StudyFailed, sim_config
from forebay.analysis.statistics.knee import gain_of_last_doubling, kneedle, last_followed
from forebay.proxy.cli import main
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine
from forebay.replay.plan.slo import default_slos, parse_slos
from forebay.replay.results.row import Row as RequestRow
from forebay.replay.results.row import row_with
from forebay.replay.sim.closed_loop import closed_loop
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.tokens import ByteEstimate

LLAMA = "sim:llama-3-8b@h200"


def asked(out: Path, target: str = "") -> Study:
    return Study(targets=[target], out=out)


def saturation_of(way: Way) -> Saturation:
    made = Saturation(targets=[PHI], out=Path("out"), requests=24)
    made.way = way
    return made


def one_engine(**options: Any) -> SimWay:
    config = replace(sim_config(PHI, None), **options)
    return SimWay(IN_TURN, Scenario(config, 1, DIRECT), PHI, watched=True)


def answered(
    request: TraceRequest, due_s: float = 0.0, done_s: float = 1.0, **changed: Any
) -> RequestRow:
    """The row of an answer whose TTFT is 0.5 s, unless changed."""
    values = {
        "outcome": "ok", "intended_s": due_s, "first_s": due_s + 0.5, "done_s": done_s,
        "ttft_response_s": 0.5, "e2e_response_s": 1.0, "tpot_s": 0.01, "stall_s": 0.01,
        "prompt_tokens": request.input_tokens, "cached_tokens": 0,
    }  # fmt: skip
    return row_with(request, "chat", None, values | changed)


def rows(count: int, prompt: int = 1000, output: int = 20) -> list[TraceRequest]:
    return [TraceRequest(f"r{i}", 0.0, prompt, output) for i in range(count)]


# The knee


@pytest.mark.parametrize(
    ("loads", "came", "at"),
    [
        ([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 16, 16], 4),  # 16 seats
        ([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 14, 9], 4),  # falls beyond them
        ([1, 2, 3, 4], [10, 20, 30, 40], None),  # a straight line has no knee
        ([1, 2, 4], [5, 5, 5], None),  # nor has a flat one
        ([1, 64], [1, 16], None),  # two points say nothing
    ],
)
def test_kneedle_finds_the_bend(loads: list[float], came: list[float], at: int | None) -> None:
    assert kneedle(loads, came) == at


def test_the_knee_of_a_smooth_curve_is_where_its_slope_is_the_chords() -> None:
    """n / (100 + n) on 1..512: 100 / (100 + n)^2 = (f(512) - f(1)) / 511 at n = 148.6."""
    loads = list(range(1, 513))
    at = kneedle(loads, [n / (100 + n) for n in loads])
    assert at is not None
    assert loads[at] in (148, 149)


def test_a_sweep_that_still_rises_has_met_no_plateau() -> None:
    assert gain_of_last_doubling([1, 2, 4], [10, 19, 36]) == pytest.approx(36 / 19 - 1)
    assert gain_of_last_doubling([1, 2, 4], [10, 19, 19]) == 0
    assert gain_of_last_doubling([4], [10]) == float("inf")


def test_a_rate_is_followed_until_it_is_not() -> None:
    offered = [1.0, 2.0, 3.0, 4.0]
    assert last_followed(offered, [1.0, 1.96, 2.7, 4.0]) == 1  # 4 after a failure is luck
    assert last_followed(offered, [0.5, 2.0, 3.0, 4.0]) is None
    assert last_followed(offered, offered) == 3


# The closed loop


@pytest.mark.parametrize("exact", [False, True])
def test_a_closed_loop_keeps_so_many_in_flight_and_answers_all(exact: bool) -> None:
    engine = served_engine(sim_config(PHI, None), exact=exact)
    outcomes = closed_loop(rows(30, output=50), engine, "gpu0", 4)
    assert len(outcomes) == 30
    times = [(outcome.request.arrival_s, outcome.finished_s) for outcome in outcomes]
    assert all(last is not None and last > due for due, last in times)
    for due, _ in times:
        assert sum(begun <= due < (end or 0.0) for begun, end in times) <= 4
    assert sum(due == 0.0 for due, _ in times) == 4


def test_alone_the_closed_loop_is_one_answer_after_the_other() -> None:
    row = asyncio.run(saturation_of(one_engine()).row(1))
    load = asyncio.run(one_engine().closed("x", rows(1, 1000, 200), 1))
    assert row["requests_per_s"] == pytest.approx(
        1 / (load.seen[0].e2e_response_s or 0.0), rel=0.15
    )
    assert row["running"] == 1


# Saturation


def test_saturation_finds_the_seats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max-num-seqs", "16", "--concurrency", "1,2,4,8,16,32,64")
    found = study("saturation", tmp_path, *words)
    facts = found["facts"]
    assert facts["knee_load"] == facts["max_num_seqs"] == 16
    assert [row["running"] for row in found["rows"]] == [1, 2, 4, 8, 16, 16, 16]
    best = max(row["requests_per_s"] for row in found["rows"])
    assert facts["t_sat_requests_per_s"] == pytest.approx(best, rel=0.1)
    first, *_, last = found["rows"]
    assert last["ttft_s"] > 50 * first["ttft_s"]  # beyond the seats one waits
    said = " ".join(capsys.readouterr().out.split())
    assert "Saturated from 16 requests in flight" in said
    assert "Kneedle" in said
    assert "seed: 0" in said
    assert "command: forebay experiment saturation --" in said


@pytest.mark.parametrize(
    ("came", "knee", "words"),
    [
        ((0.171, 0.170, 0.170, 0.168), 1, "Saturated already at the first load, 1 requests in fl"),
        ((1.0, 1.01, 1.02, 1.03), 1, "Saturated already at the first load, 1 requests in flight"),
        ((1.0, 1.9, 2.0, 2.0), 2, "Saturated from 2 requests in flight"),
        ((1.0, 1.02, 1.05, 1.13), None, "1.13 requests/s; the last doubling gained +8%"),
        ((1.0, 2.0, 4.0, 8.0), None, "8.00 requests/s; the last doubling still gained +100%"),
    ],
)
def test_a_plateau_that_was_measured_is_not_denied(
    came: Sequence[float], knee: int | None, words: str
) -> None:
    told = [
        {"load": 2**n, "requests_per_s": y, "tokens_per_s": 100 * y, "ttft_s": 1.0, "tpot_s": 0.1,
         "seats": None, "running": None, "failed": 0, "verdict": "valid"}
        for n, y in enumerate(came)
    ]  # fmt: skip
    found = saturation_of(one_engine()).conclude(told)
    assert words in found.sentence
    assert found.facts["knee_load"] == knee


def test_rates_are_followed_up_to_what_the_seats_bear(tmp_path: Path) -> None:
    words = ("--max-num-seqs", "10", "--rates", "2,4,10", "--seconds", "60")
    found = study("saturation", tmp_path, *words)
    assert found["facts"]["knee_load"] == 4
    for row in found["rows"][:2]:
        assert row["requests_per_s"] == pytest.approx(row["offered_per_s"], rel=0.05)
    assert found["rows"][2]["requests_per_s"] < 8
    already = study(
        "saturation", tmp_path, *words[:2], "--rates", "9,10,11", "--seconds", "60", "--force"
    )
    assert already["sentence"].startswith("No knee was found: already 9")


@pytest.mark.real_time
async def test_seats_are_inferred_where_nobody_tells_them() -> None:
    way = one_engine(max_num_seqs=8)

    study = saturation_of(way)
    told = [await study.row(n) for n in (4, 16, 32)]
    way.max_num_seqs = None
    assert study.seats(told)[0] == 8
    assert study.seats(told[:2])[0] is None  # once may be chance
    blind = [row | {"seats": None, "running": None} for row in told]
    assert "a proxy does not pass them on" in study.seats(blind)[1]


def test_seats_are_not_what_ran_while_nobody_waited() -> None:
    busy = [GaugeSample("gpu0", at, 8, 0, 0.2, 0) for at in range(9)]
    assert seats_seen(busy) is None
    assert seats_seen([replace(one, waiting=3) for one in busy]) == 8
    assert seats_seen([replace(one, waiting=3, kv_share=0.98) for one in busy]) is None


# The shared document


def test_one_pays_for_a_shared_document(tmp_path: Path) -> None:
    words = ("--users", "12", "--document-tokens", "30000", "--gpus", "1")
    found = study("shared-document", tmp_path, *words)
    for way in (IN_TURN, PROXY):
        of = {row["phase"]: row for row in found["rows"] if row["way"] == way}
        assert [of[phase]["cold"] for phase in PHASES] == [1, 0, 0, 1]
        assert of["the others"]["hit_ratio"] > 0.99
        assert of["first"]["hit_ratio"] == 0
        # A hit takes 0.13 s, of which the API server has 0.1 s for the text.
        assert of["first"]["ttft_s"] > 6 * of["one more"]["ttft_s"]
        assert of["the others"]["kv_tokens"] < 1.2 * of["first"]["kv_tokens"]
    facts = found["facts"]
    assert facts["kv_tokens_per_added_user"] < 0.02 * facts["prompt_tokens"]
    assert found["sentence"].startswith("The document was computed for 1 of 12 users (proxy)")
    assert "KV use stayed flat" in found["sentence"]


@pytest.mark.parametrize(
    ("users", "gpus", "copies_of_proxy"), [(5, 2, 1), (20, 2, 2), (20, 4, 4), (200, 1, 1)]
)
def test_a_copy_on_another_engine_is_no_growth_of_users(
    users: int, gpus: int, copies_of_proxy: int, tmp_path: Path
) -> None:
    """A copy takes a free engine 0.5 s, and saves five users as much of tokenizing and decoding."""
    sizes = ("--users", str(users), "--document-tokens", "20000", "--gpus", str(gpus))
    found = study("shared-document", tmp_path, *sizes, "--apart", "0.02")
    for way, copies in ((IN_TURN, gpus), (PROXY, copies_of_proxy)):
        row = next(r for r in found["rows"] if (r["way"], r["phase"]) == (way, "the others"))
        if way == IN_TURN:
            assert [r["cold"] for r in found["rows"] if r["way"] == way] == [1, gpus - 1, 0, gpus]
            assert f"Round robin: {gpus} cold." in found["sentence"]
        assert row["kv_copies"] == copies
        assert row["kv_tokens"] > copies * found["facts"]["document_tokens"]
        assert 0 < row["kv_tokens_per_user"] <= found["facts"]["own_tokens"] == 192
    assert found["facts"]["kv_flat"]
    held = "one engine holds a copy"
    if copies_of_proxy > 1:
        held = f"{copies_of_proxy} engines hold a copy each"
    assert f"KV use stayed flat: {held} of the document" in found["sentence"]


def test_users_who_ask_one_after_another_wait_for_no_prefill(tmp_path: Path) -> None:
    """Fifty at once are a queue at the API server, which tokenizes one text after the other."""
    found = study("shared-document", tmp_path, "--users", "12", target=LLAMA)
    of = {(row["way"], row["phase"]): row for row in found["rows"]}
    proxy, in_turn = of[PROXY, "the others"], of[IN_TURN, "the others"]
    assert (proxy["cold"], proxy["kv_copies"]) == (0, 1)
    assert proxy["ttft_max_s"] < 0.3 < 3.0 < in_turn["ttft_max_s"]
    assert 0.7 < found["facts"]["api_server_s"] / found["facts"]["ttft_cached_s"] < 0.9


def test_a_copy_for_each_user_is_growth() -> None:
    document = 20_480
    shared = shared_document.KvUse(8, (document + 400, document + 1_200, 0))
    assert (shared.copies(document), shared.per_user(document)) == (2, 200.0)
    twice = shared_document.KvUse(8, (8 * document, 0))
    assert (twice.copies(document), twice.per_user(document)) == (1, 7 / 8 * document)
    facts = {
        "kv_tokens_per_added_user": twice.per_user(document),
        "kv_document_copies": 1,
        "kv_flat": False,
        "document_tokens": document,
        "own_tokens": 192,
        "prompt_tokens": document + 64,
    }
    assert "KV use did not stay flat" in shared_document.kv_words(facts)


def shared(users: int) -> SharedDocumentStudy:
    options: dict[str, Any] = {
        "document_tokens": 20_000,
        "question_tokens": 64,
        "output_tokens": 32,
    }
    return SharedDocumentStudy(targets=[PHI], out=Path("out"), users=users, apart=0.0, **options)


def test_a_cache_that_is_off_is_not_called_shared() -> None:
    config = replace(sim_config(PHI, None), enable_prefix_caching=False)
    (way, _) = sim_ways(PHI, Scenario(config, 1), watched=True)
    study = shared(6)
    study.ways = [way]
    loads = asyncio.run(way.play("x", *study.requests()))
    study.played = {way.name: dict(zip(PHASES, loads, strict=True))}
    told = [asyncio.run(study.row((way, phase))) for phase in PHASES]
    result = study.conclude(told)
    assert result.facts["kv_flat"] is False  # each user adds a copy
    assert result.sentence.startswith("The document was not shared: 6 of 6 users waited")


# The flood


def test_fail_fast_keeps_goodput_in_a_flood(tmp_path: Path) -> None:
    found = study("flood", tmp_path, "--loads", "0.5,2", "--seconds", "60")
    of = {(row["way"], row["load"]): row for row in found["rows"]}
    for way in (IN_TURN, flood.NO_FAIL_FAST, PROXY):
        assert of[way, 0.5]["rejected_share"] == 0
        assert of[way, 0.5]["attainment"] > 0.9
    assert of[PROXY, 2]["rejected_share"] > 0.05
    for way in (IN_TURN, flood.NO_FAIL_FAST):
        assert of[way, 2]["rejected_share"] == 0  # everybody waits
        assert of[way, 2]["goodput_per_s"] < of[PROXY, 2]["goodput_per_s"]
        assert of[way, 2]["ttft_p50_s"] > of[PROXY, 2]["ttft_p50_s"]
    assert "At 2x capacity the proxy has goodput" in found["sentence"]
    facts = found["facts"]
    assert facts["capacity_through_proxy_per_s"] > facts["capacity_per_s"]
    assert of[PROXY, 2]["load_of_proxy"] == pytest.approx(
        2 * facts["capacity_per_s"] / facts["capacity_through_proxy_per_s"]
    )
    assert facts["kept_from_knee"][PROXY] >= 0.95 > facts["kept_from_knee"][IN_TURN]
    assert of[PROXY, 2]["offered_per_s"] == pytest.approx(
        2 * found["facts"]["capacity_per_s"], 0.01
    )


def test_requests_that_the_proxy_admits_in_a_flood_are_in_time() -> None:
    """The admission counts the prefill of the request itself, so goodput does not fall.

    Nearly all that are late were rejected from the queue and took no prefill. Few of the admitted
    are late: the targets leave no room for what the streams of others and the prompts before a chat
    keep the API server and the engine busy with.
    """
    config, slos = sim_config(LLAMA, None), default_slos(DEFAULT_BUCKETS)
    scenario = Scenario(config, 2, proxy=flood.config_for(slos))
    way = SimWay(PROXY, scenario, "x", watched=False)
    told = []
    for factor, least in ((1.5, 0.997), (3.0, 0.985), (6.0, 0.98)):
        (load,) = asyncio.run(way.play("x", flood.requests(factor * 23.3, 60.0, 0)))
        told.append(flood.row_of(PROXY, factor, load, slos))
        assert good(load.answered, slos) > least * len(load.answered)
    assert max(row["late_share"] for row in told[:2]) < 0.05
    assert told[2]["late_share"] < 0.08
    assert min(row["goodput_per_s"] for row in told) > 0.95 * told[0]["goodput_per_s"]


def test_the_proxy_of_a_flood_has_the_targets_of_the_study() -> None:
    slos = parse_slos("document.ttft=1s,chat.tpot=1s", flood.NAMES)
    targets = {bucket.name: bucket.target_s for bucket in flood.config_for(slos).buckets}
    assert targets == {"chat": 2.0, "document": 1.0}  # chats without a TTFT target keep their own


@pytest.mark.parametrize(("limit", "found"), [(4.0, 10.5), (400.0, None)])
def test_capacity_is_the_highest_rate_that_is_followed(limit: float, found: float | None) -> None:
    class Steady:
        """Completes ten requests a second at most."""

        async def play(self, label: str, *phases: Sequence[TraceRequest]) -> list[PlayedLoad]:
            seen, free_s = [], 0.0
            for row in phases[0]:
                free_s = max(free_s, row.arrival_s) + 0.1
                seen.append(answered(row, row.arrival_s, free_s))
            return [PlayedLoad(seen)]

    def made(rate: float) -> list[TraceRequest]:
        return [TraceRequest(str(n), n / rate, 10, 10) for n in range(round(60 * rate))]

    got = asyncio.run(flood.highest_followed(cast(Any, Steady()), limit, made))
    assert got == (found and pytest.approx(found, rel=0.02))


def test_a_flood_says_when_fail_fast_does_not_help() -> None:
    row = {"load": 3.0, "goodput_per_s": 1.0, "ttft_p99_s": None, "rejected_share": 0.9}
    last = {PROXY: row, IN_TURN: row | {"goodput_per_s": 2.0}}
    told = flood._words(last, {PROXY: 4.0, IN_TURN: 2.0})
    assert told.startswith("At 3x capacity the proxy does not help: it has goodput 1.00/s")
    assert "25% of its best" in told


async def test_a_flood_of_a_url_alone_says_what_it_cannot_tell(tmp_path: Path) -> None:
    async with serve(Server()) as up:
        study = Flood(targets=[up.url], out=tmp_path, loads_text="0.01,0.02", duration=30.0)
        found = await study.measure()
    assert found.sentence.startswith("At 0.02x capacity the target has goodput ")
    assert found.sentence.endswith(" and rejects 0%.")
    assert [row["way"] for row in found.rows] == ["target", "target"]
    assert "way" not in [column.key for column in found.columns]
    assert "64 in flight; with several engines, give --capacity" in found.notes[0]
    assert any(note.startswith("the engines were not measured") for note in found.notes)


def test_what_was_refused_or_failed_is_missed() -> None:
    ok = answered(rows(1)[0])
    late = replace(ok, ttft_response_s=2.5, intended_s=1.0)
    refused = replace(ok, outcome="rejected", intended_s=2.0, reject_latency_s=0.01)
    slos = default_slos(DEFAULT_BUCKETS)
    told = flood.row_of(PROXY, 1.0, PlayedLoad([ok, late, refused]), slos)
    assert (told["attainment"], told["rejected_share"]) == pytest.approx((1 / 3, 1 / 3))
    assert told["ttft_p99_s"] is None  # two answers are no p99
    assert told["late_share"] == 0.5  # of the two admitted
    waited = replace(refused, reject_latency_s=2.0)
    told = flood.row_of(PROXY, 1.0, PlayedLoad([ok, late, waited]), slos)
    assert told["late_share"] == pytest.approx(2 / 3)  # rejected from the queue
    assert percentile([float(i) for i in range(1000)], 99) == 989


def test_a_load_that_was_not_as_meant_is_doubted() -> None:
    notes: list[str] = []
    good = {"load": 1.0, "verdict": "valid"}
    assert doubted("It is so.", notes, [good], "load") == "It is so."
    late = good | {"verdict": "client-limited", "load": 2.0}
    assert doubted("It is so.", notes, [good, late], "load").startswith(
        "Not valid, because the load generator"
    )
    assert notes == ["not valid: 2 (client-limited)"]


# The KV cache


def test_the_kv_cache_is_full_where_it_was_predicted(tmp_path: Path) -> None:
    words = ("--prompt-tokens", "60000", "--output-tokens", "200")
    found = study("kv", tmp_path, *words)
    facts = found["facts"]
    assert facts["predicted_pool_tokens"] == facts["reported_pool_tokens"]
    assert facts["reported_full_at"] == facts["predicted_full_at"] == 6
    assert facts["worst_share_error"] < 0.005
    assert [row["waiting"] for row in found["rows"]][-2:] == [1, 2]
    assert "as predicted. Then the rest waited" in found["sentence"]
    assert "only the use is checked" in found["notes"][0]


def test_requests_that_end_before_the_others_begin_do_not_count(tmp_path: Path) -> None:
    """The prompts of 7 take 105 steps; the first answer, begun after 15, has ended by then."""
    words = ("--prompt-tokens", "120000", "--output-tokens")
    found = study("kv", tmp_path / "few", *words, "64", target=LLAMA)
    assert found["facts"]["worst_share_error"] < 0.001
    assert [row["together"] for row in found["rows"]] == [True, True, True, *[False] * 4]
    assert found["notes"][-1].startswith("rows from 6 requests on do not count")
    assert "max_num_seqs" not in found["sentence"]
    advice = re.search(
        "because the first requests had ended before the last were prefilled: give "
        r"--output-tokens (\d+) or more", found["sentence"]
    )  # fmt: skip
    assert advice is not None
    found = study("kv", tmp_path / "enough", *words, advice[1], target=LLAMA)
    assert all(row["together"] for row in found["rows"])
    assert found["facts"]["reported_full_at"] == found["facts"]["predicted_full_at"] == 8
    assert found["facts"]["worst_share_error"] < 0.001


def test_a_cache_that_fills_early_is_not_called_as_predicted() -> None:
    trace, way = rows(4, 2000, 10), one_engine()
    way.pools, way.about = [Pool(1001, 16)], replace(way.about, gpu=None)

    def load(running: int, share: float) -> PlayedLoad:
        ok = answered(trace[0])
        return PlayedLoad([ok] * 4, [GaugeSample("gpu0", 0.0, running, 4 - running, share, 7)])

    for running, share, words in (
        (3, 0.9, "4 requests of 2,010 tokens, against 8 predicted"),
        (4, 0.9, "did not, nor with 4"),
        (3, 0.5, "max_num_seqs let only 3 run"),
    ):
        study = KvCache(targets=[PHI], out=Path("out"), prompt_tokens=2000, output_tokens=10)
        study.way = way
        result = study.conclude([study.row_of(load(running, share))])
        assert words in result.sentence
        assert "was not predicted" in result.notes[0]


# The needle


def test_a_simulated_engine_is_not_judged_by_its_answers(tmp_path: Path) -> None:
    words = ("--lengths", "1k,8k,128000,130k", "--depths", "0,0.5,1")
    found = study("needle", tmp_path, *words)
    assert found["facts"]["simulated"]
    assert found["facts"]["right"] is None
    assert found["facts"]["arrived_whole"] == 9
    assert "recall has no meaning here; all 9 prompts" in found["sentence"]
    assert {row["recall"] for row in found["rows"]} == {None}
    assert any("1 lengths were skipped" in note for note in found["notes"])


def needle_study(target: str) -> Needle:
    return Needle(
        targets=[target], out=Path("out"), lengths="512,1k", depths="0,1", tokenizer="estimate"
    )


@pytest.mark.parametrize(
    ("kept_tokens", "judged", "sentence"),
    [
        (
            600,
            [(True, True), (True, True), (True, False), (False, False)],
            "3 of 4 answers were right (75%); the shortest prompt with a miss has 1,024 tokens, "
            "the worst cell is depth 1 at 1,024 tokens (0%); 2 prompts did not arrive whole.",
        ),
        (
            2048,
            [(True, True)] * 4,
            "4 of 4 answers were right (100%): the fact was found at every depth, up to 1,024 "
            "tokens.",
        ),
    ],
)
def test_right_answers_are_counted_and_cut_prompts_seen(
    kept_tokens: int, judged: list[tuple[bool, bool]], sentence: str
) -> None:
    """A model that reads only the first tokens, and reports their number in its usage."""
    kept = kept_tokens * 4

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        seen = body["messages"][0]["content"][:kept]
        number = re.search(r"special number of the sluice gate at \w+ is (\d+)", seen)
        told = f"It is {int(number[1]):,}." if number else "I do not know that number at all."
        message = {"role": "assistant", "content": told}
        usage = {"prompt_tokens": len(seen) // 4, "completion_tokens": 8}
        return web.json_response({"choices": [{"message": message}], "usage": usage})

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"count": len((await request.json())["prompt"]) // 4})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 4096}]})

    async def ask_all() -> tuple[Needle, Result]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_post("/tokenize", tokenize)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            study = needle_study(url)
            return study, await study.measure()
        finally:
            await runner.cleanup()

    study, found = run(ask_all())
    assert [(answer.right, answer.whole) for answer in study.answers] == judged
    assert found.sentence == sentence


def test_an_answer_that_could_be_a_models_is_judged() -> None:
    assert needle.is_simulated("ban din tor mit")
    assert not needle.is_simulated("The special number is 4711.")
    assert not needle.is_simulated("ten")
    _, answer = needle_study(PHI).prompts(None, ByteEstimate())[0]
    refused = needle.judged(answer, needle.ModelReply(error="400 4xx"), 512)
    assert (refused.right, refused.whole) == (False, None)


def test_a_heat_map_says_what_was_not_measured() -> None:
    drawn = heat_map({(1024, 0.0): 0.75, (1024, 1.0): None}, [1024], [0.0, 1.0], "x", "y", "right")
    texts = [e.text for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("text")]
    assert "75%" in texts
    assert "–" in texts


# By URL, over real sockets on a clock that jumps


def config(**more: Any) -> EngineConfig:
    return EngineConfig("phi-3-mini", "h200-nvl", max_num_seqs=256, **more)


def sizes(pools: Sequence[Pool]) -> list[tuple[int, int]]:
    return [(pool.blocks, pool.tokens) for pool in pools]


async def test_saturation_by_url_is_what_virtual_time_says(tmp_path: Path) -> None:
    async with start_engine(config(max_num_batched_tokens=8192)) as server:
        (way,) = await http_ways(asked(tmp_path), [("target", [server.url])], ())
        row, pools = await saturation_of(way).row(4), way.pools
    simulated = await saturation_of(one_engine()).row(4)
    assert row["requests_per_s"] == pytest.approx(simulated["requests_per_s"], rel=0.03)
    assert row["running"] == simulated["running"] == 4
    assert row["kv_share"] == pytest.approx(simulated["kv_share"], abs=0.003)
    assert row["verdict"] == "valid"
    assert sizes(pools) == sizes(one_engine().pools)  # one is read from /metrics
    assert (tmp_path / "runs" / "target-closed-4" / "requests.parquet").exists()


async def test_a_shared_document_by_url(tmp_path: Path) -> None:
    async with start_engine(config()) as server:
        study = replace(shared(6), targets=[server.url], out=tmp_path)
        told = (await study.measure()).rows
    assert [row["cold"] for row in told] == [1, 0, 0, 1]
    assert told[1]["hit_ratio"] > 0.99
    assert told[0]["kv_tokens"] is not None
    assert told[1]["kv_tokens"] < 1.2 * told[0]["kv_tokens"]


def test_a_server_that_refuses_everything_fails_the_study(tmp_path: Path) -> None:
    async def refuse(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        return web.json_response({"error": {"code": "queue_full"}}, status=429)

    async def live() -> None:
        async with serve(Server(refuse)) as up:
            (way,) = await http_ways(asked(tmp_path), [("target", [up.url])], ())
            await way.closed("x", rows(3), 2)

    with pytest.raises(StudyFailed, match=r"none of 3 requests was answered \(queue_full\)"):
        run(live())


def test_a_server_that_does_not_say_what_was_cached_is_bad_input() -> None:
    ok = answered(rows(1)[0], cached_tokens=None)
    study = shared(6)
    study.played = {IN_TURN: {PHASES[0]: PlayedLoad([ok])}}
    with pytest.raises(InputError, match="--enable-prompt-tokens-details"):
        asyncio.run(study.row((one_engine(), PHASES[0])))


def test_metrics_are_read_by_vllms_names() -> None:
    sample, pool = read_page(
        "# HELP x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:num_preemptions_total{engine="0",model_name="m"} 5.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="1001"} 1.0\n'
        "process_start_time_seconds 1.7e9\n",
        "gpu0",
        1.5,
    )
    assert sample == GaugeSample("gpu0", 1.5, 3, 2, 0.25, 5)
    assert pool == Pool(1001, 16)
    assert pool.tokens == 16_016
    unknown = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_page("up 1\n", "gpu0", 0.0) == read_page(unknown, "gpu0", 0.0) == (None, None)


GONE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefill", "--target", "sim:"], "name a model"),
        (["prefill", "--target", PHI, "--lengths", "1k,x"], "--lengths 1k,x"),
        (["prefill", "--target", PHI, "--lengths", "1k,200k,300k"], "only 1 of them fit in"),
        (["prefill", "--target", PHI, "--lengths", "1k,1024"], "give 3 lengths or more"),
        (["phases", "--target", PHI, "--lengths", "1k"], "--lengths 1k: give 3 lengths or more"),
        (["decode", "--target", GONE], "cannot be reached"),
        (["hol", "--target", PHI, "--prompt-tokens", "131071"], "--prompt-tokens 131071"),
        (["memory", "--target", PHI, "--used-tokens", "4000"], "from --used-tokens 4000"),
        (["memory", "--target", PHI, "--max-model-lens", "1m"], "give numbers such as 1k"),
        (["memory", "--target", GONE], "memory is arithmetic; give sim:MODEL@GPU"),
        (["nothing"], "nothing"),
        (["saturation", "--target", PHI, "--concurrency", "1,2"], "3 loads or more"),
        (["saturation", "--target", PHI, "--rates", "1,x,3"], "--rates 1,x,3"),
        (["saturation", "--target", PHI, "--prompt-tokens", "131000"], "--prompt-tokens 131000"),
        (["saturation", "--target", GONE], "cannot be reached"),
        (["saturation", "--target", GONE, "--vllm-version", "0.11"], "only for a sim: target"),
        (["saturation", "--target", "sim:gpt-5"], "gpt-5"),
        (
            ["shared-document", "--target", PHI, "--engine", GONE],
            "--engine: not with a sim: target",
        ),
        (["shared-document", "--target", GONE, "--engine", GONE], "cannot be reached"),
        (
            ["shared-document", "--target", PHI, "--document-tokens", "131000"],
            "takes at most 131072",
        ),
        (["flood", "--target", GONE], "cannot be reached"),
        (["flood", "--target", PHI, "--engine", GONE], "--engine: not with a sim: target"),
        *(
            (["flood", "--target", PHI, "--time-scale", n], "--time-scale")
            for n in ("0", "-1", "nan", "inf")
        ),
        (["flood", "--target", PHI, "--loads", "0,1"], "--loads 0,1"),
        (["flood", "--target", PHI, "--capacity", "-1"], "--capacity -1"),
        (["flood", "--target", PHI, "--slo", "chat.speed=1s"], "no metric 'speed'"),
        (["kv", "--target", GONE], "cannot be reached"),
        (
            ["kv", "--target", PHI, "--prompt-tokens", "131000"],
            "--prompt-tokens 131000 with its output: sim:phi-3-mini@h200-nvl takes at most 131072",
        ),
        (["prefill", "--target", GONE, "--tp", "2"], "--tensor-parallel-size: only for a sim:"),
        (["prefill", "--target", PHI, "--tensor-parallel", "2"], "--tensor-parallel-size"),
        (["hol", "--target", PHI, "--max-num-batched-tokens", "512"], "give --chunks"),
        (["needle", "--target", GONE], "cannot be reached"),
        (["needle", "--target", PHI, "--depths", "0,2"], "--depths 0,2"),
        (["needle", "--target", PHI, "--lengths", "200k"], "none fits"),
        (["needle", "--target", PHI, "--endpoint", "images"], "--endpoint images"),
        (["needle", "--target", PHI, "--haystack", "none.jsonl"], "none.jsonl"),
        (["hol", "--target", PHI, "--engine", GONE], "--engine: only with --fleet"),
        (["hol", "--target", GONE, "--fleet"], "--fleet: give the URL of each engine"),
        (["hol", "--target", PHI, "--fleet", "--prompt-tokens", "131000"], "takes at most 131072"),
        (["hol", "--target", PHI, "--fleet", "--chat-rate", "0"], "--chat-rate"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["experiment", *words, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out
    assert not out.exists()


def test_a_server_without_metrics_cannot_tell_of_its_kv_cache(tmp_path: Path) -> None:
    async def live() -> None:
        async with serve(Server()) as up:
            await KvCache(targets=[up.url], out=tmp_path).measure()

    with pytest.raises(InputError, match="no vllm:cache_config_info"):
        run(live())


def test_numbers_are_read_as_people_write_them() -> None:
    assert numbers("3, 0.5,1", "--loads") == [0.5, 1.0, 3.0]
    for text in ("nan", "inf", "", "-1", "1,,2"):
        with pytest.raises(InputError, match="--loads"):
            numbers(text, "--loads")


# The fleet of hol


def test_hol_of_a_fleet_measures_the_remedies(tmp_path: Path) -> None:
    words = ("--fleet", "--seconds", "40", "--prompt-tokens", "60000")
    found = study("hol", tmp_path, *words)
    of = {(row["way"], row["prefill"]): row for row in found["rows"]}
    assert len(of) == 8
    for remedy in REMEDIES:
        assert of[PROXY, remedy]["stall_s"] < 0.5 * of[PROXY, "chunked"]["stall_s"]
    for way in (IN_TURN, PROXY):  # chunks shorten the stall whoever routes
        assert of[way, "chunked"]["stall_s"] < 0.5 * of[way, "whole"]["stall_s"]
    assert of[PROXY, "chunked"]["document_ttft_s"] < of[IN_TURN, "chunked"]["document_ttft_s"]
    assert "with chunked prefill the proxy" in found["sentence"]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (100, "counts answered chats only: the proxy rejects 50% of all requests, round robin 0%"),
        (2, None),
    ],
)
def test_hol_of_a_fleet_says_what_shorter_stalls_cost(refused: int, words: str | None) -> None:
    """A policy that rejects half of the requests gets short stalls without merit."""
    row = {
        "prefill": THEIRS, "stall_s": 4.0, "stalled_share": 0.5, "ttft_p99_s": None,
        "chats": 180, "documents": 20, "rejected": 0, "failed": 0, "verdict": "valid",
    }  # fmt: skip
    told = [
        row | {"way": IN_TURN},
        row | {"way": PROXY, "stall_s": 0.4, "stalled_share": 0.0, "rejected": refused},
    ]
    request = TraceRequest("c", 0.0, 10, 10)
    seen = answered(request)
    study = HolFleet(targets=[PHI], out=Path("out"), prompt_tokens=60_000)
    study.played = {name: PlayedLoad([seen, seen]) for name in (IN_TURN, PROXY)}
    found = study.conclude(told)
    assert "the proxy shortens a chat's worst stall" in found.sentence
    assert ("rejects" in found.sentence) == (words is not None)
    if words:
        assert words in found.sentence
    assert any("of answered chats" in note for note in found.notes) == (words is not None)
