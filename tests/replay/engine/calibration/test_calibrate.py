"""Calibrations: the shipped ones against published rows, the fit against known answers."""

import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from commands import forebay

from forebay.replay.engine.calibration.calibrate import PointFit, calibrate, kernel_table
from forebay.replay.engine.calibration.fit import Fit, refusal
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.calibration.points import Point, read_points
from forebay.replay.engine.calibration.workloads import point_steps, predicted_s
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.specs import H200_NVL, H200_SXM, LLAMA_3_8B, PHI_3_MINI
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.roofline import bound_by, least
from forebay.replay.engine.timing.step_constants import (
    CONSTANTS,
    Calibration,
    calibration_file_of,
    calibration_of,
    parse_calibration,
    read_calibration,
    shipped,
)
from forebay.traces.ground.errors import InputError

TODAY = date(2026, 11, 21)
ONE_CHUNK = 131_072

# Published single-request figures of Phi-3-mini-128k on one H200 NVL (exact seconds from its
# tokens/s column; decode: the slope of 128 tokens at 95.68/s and 2,048 at 105.99/s).
FITTED = [
    Point(2, "ttft", 0.0309, 1_024, max_num_batched_tokens=ONE_CHUNK),
    Point(3, "ttft", 0.8740, 32_768, max_num_batched_tokens=ONE_CHUNK),
    Point(4, "ttft", 7.7679, 128_000, max_num_batched_tokens=ONE_CHUNK),
    Point(5, "itl", 9.37e-3, 1_000),
]
HELD_OUT = [
    Point(6, "ttft", 0.0808, 4_096, max_num_batched_tokens=ONE_CHUNK, held_out=True),
    Point(7, "ttft", 2.4937, 65_536, max_num_batched_tokens=ONE_CHUNK, held_out=True),
    Point(8, "stall", 6.99, 120_000, max_num_batched_tokens=ONE_CHUNK, held_out=True),
]


def fitted(
    points: list[Point],
    model: str = "llama-3-8b",
    gpu: str = "h200",
    hold_out: float = 0.0,
) -> PointFit:
    sizes = find_model(model)
    # Phi-3's prior has its own launch times, and no times of the API server for a prompt token.
    prior = calibration_of(sizes, find_gpu(gpu)) if sizes is PHI_3_MINI else kernel_table()
    return calibrate(
        points, sizes, find_gpu(gpu), prior, used="a test", today=TODAY, hold_out=hold_out
    )


def errors_of(done: PointFit) -> list[float]:
    return [row["error"] for row in done.file.points]


@pytest.fixture(scope="module")
def phi() -> PointFit:
    return fitted([*FITTED, *HELD_OUT], "phi-3-mini", "h200-nvl")


def test_held_out_published_rows(phi: PointFit) -> None:
    errors = {row["line"]: row["error"] for row in phi.file.points if row["held_out"]}
    assert len(errors) == 3
    assert abs(errors[6]) < 0.01
    assert abs(errors[7]) < 0.01
    assert abs(errors[8]) < 0.009


def test_the_shipped_constants_are_the_fit_of_their_points(phi: PointFit) -> None:
    ours = calibration_of(PHI_3_MINI, H200_NVL)
    assert set(phi.fit.fitted) == {"gemm_compute", "prefill_compute", "step_s", "request_s"}
    for name in CONSTANTS:
        assert getattr(phi.file.constants, name) == pytest.approx(getattr(ours, name), rel=0.005)


def test_as_many_constants_as_points_are_no_evidence(phi: PointFit) -> None:
    assert "3 held-out points" in phi.file.checked
    assert "for want of points" in phi.file.checked
    assert phi.fit.relative_errors == dict.fromkeys(phi.fit.fitted)  # no degree of freedom left


def test_the_model_is_beside_every_point_of_a_shipped_file() -> None:
    """The errors in the files are computed again; an unexplained row stays, marked as held out."""
    file = calibration_file_of("phi-3-mini-128k", "h200-nvl")
    errors = {}
    for row in file.points:
        point = Point(line=0, **row)
        work = point_steps(point, PHI_3_MINI, H200_NVL)
        seconds = predicted_s(work, PHI_3_MINI, H200_NVL, file.constants)
        errors[str(point)] = seconds / point.seconds - 1
        if not point.held_out:
            assert abs(errors[str(point)]) < 0.002
    assert errors["stall 120,000, chunk 512"] == pytest.approx(-0.40, abs=0.01)
    assert "-40 %" in file.checked


@pytest.mark.parametrize(
    ("tokens", "published_s"),
    [(1_024, 0.0309), (4_096, 0.0808), (32_768, 0.874), (65_536, 2.494), (128_000, 7.768)],
)
def test_a_client_sees_the_published_ttfts_of_phi_3(tokens: int, published_s: float) -> None:
    """The whole way: API server, engine, API server. No part of the table counts twice."""
    core = EngineCore(EngineConfig("phi-3-mini", "h200-nvl", max_num_batched_tokens=ONE_CHUNK,
                                   async_scheduling=False))  # fmt: skip
    request = EngineRequest("r", tokens, 1)
    play(core, [request])
    assert request.first_token_s == pytest.approx(published_s, rel=0.01)


def test_a_shipped_calibration_says_if_its_products_contain_the_api_server() -> None:
    for file in shipped():
        of_tokens = [file.constants.receive_token_s, file.constants.tokenize_token_s,
                     file.constants.answer_token_s]  # fmt: skip
        assert all(of_tokens) or not any(of_tokens)
        assert ("which are 0: the table contains them" in file.source) is not any(of_tokens)


def test_every_shipped_calibration_says_how_far_it_was_checked() -> None:
    assert len(shipped()) >= 3
    assert len({(one.model, one.gpu) for one in shipped()}) == len(shipped())
    for one in shipped():
        assert len(one.checked) > 15
        assert len(one.source) > 15


def test_the_cpus_part_is_that_of_one_row_of_vllms_own_ci() -> None:
    """performance-benchmark build 9515, latency_llama8B_tp1 on H200: 833.421 ms, synchronous."""
    point = Point(0, "offline", 0.833421, 32, batch_size=8, output_tokens=128)
    work = point_steps(point, LLAMA_3_8B, H200_SXM)
    seconds = predicted_s(work, LLAMA_3_8B, H200_SXM, calibration_of(LLAMA_3_8B, H200_SXM))
    assert seconds == pytest.approx(point.seconds, rel=0.002)
    assert "833.4 ms" in calibration_file_of("llama-3-8b", "h200-sxm").source


def made(constants: Calibration, wanted: list[Point]) -> list[Point]:
    """Points as an engine with `constants` would measure them."""
    works = [point_steps(point, LLAMA_3_8B, H200_SXM) for point in wanted]
    return [
        replace(point, seconds=predicted_s(work, LLAMA_3_8B, H200_SXM, constants))
        for point, work in zip(wanted, works, strict=True)
    ]


TTFTS = [Point(n, "ttft", 1.0, tokens) for n, tokens in enumerate((256, 2_048, 16_384, 100_000))]
ITLS = [Point(9, "itl", 1.0, 500), Point(10, "itl", 1.0, 500, batch_size=64)]
LONG = [Point(11, "itl", 1.0, 100_000, batch_size=4), Point(12, "tpot", 1.0, 30_000, batch_size=8)]


def test_the_fit_finds_the_constants_behind_the_points() -> None:
    done = fitted(made(BUSY, TTFTS + ITLS + LONG))
    for name in ("gemm_compute", "prefill_compute", "step_s", "request_s", "decode_bandwidth",
                 "sequence_s"):  # fmt: skip
        assert name in done.fit.fitted
        assert getattr(done.file.constants, name) == pytest.approx(getattr(BUSY, name), rel=0.01)
    assert max(map(abs, errors_of(done))) < 1e-4


def test_what_the_points_cannot_show_keeps_the_prior() -> None:
    truth = replace(kernel_table(), gemm_compute=0.58, decode_bandwidth=0.3)
    done = fitted(made(truth, TTFTS))
    assert "decode_bandwidth" not in done.fit.fitted
    assert "sequence_s" not in done.fit.fitted
    assert done.file.constants.decode_bandwidth == kernel_table().decode_bandwidth
    assert done.fit.unresolved["decode_bandwidth"] < 0.01
    assert done.file.constants.gemm_compute == pytest.approx(0.58, rel=0.05)


def test_a_constant_never_leaves_what_is_physical() -> None:
    fast = [replace(point, seconds=point.seconds * 0.75) for point in made(kernel_table(), TTFTS)]
    done = fitted(fast)
    for name, allowed in CONSTANTS.items():
        assert allowed.low <= getattr(done.file.constants, name) <= allowed.high


TTFTS_MEASURED = made(kernel_table(), TTFTS)
BUSY = replace(kernel_table(), gemm_compute=0.58, prefill_compute=0.55, step_s=3e-3,
               request_s=40e-3, decode_bandwidth=0.5, sequence_s=25e-6)  # fmt: skip


@pytest.mark.parametrize(
    ("point", "says"),
    [
        # a prefix-cache hit taken for a prefill: 8B in 10 ms would be 26 PFLOP/s
        (Point(4, "ttft", 0.01, 16_384), "line 4: ttft 16,384 in 0.01 s needs"),
        # 1.8 ms a token is below the read of 16 GB at 4.8 TB/s
        (Point(4, "itl", 1.8e-3, 1_000), "TB/s, 1"),
    ],
)
def test_the_roofline_turns_the_impossible_away(point: Point, says: str) -> None:
    done = fitted([*TTFTS_MEASURED, point])
    assert list(done.rejected) == [4]
    assert says in done.rejected[4]
    assert "prefix-cache hit" in done.rejected[4]
    assert [(at.kind, at.seconds) for at in done.points] == [
        (at.kind, at.seconds) for at in TTFTS_MEASURED
    ]
    for hold_out in (0.0, 1.0):
        with pytest.raises(InputError, match="no point left to fit; 1 were rejected: line 4"):
            fitted([point], hold_out=hold_out)


def test_the_last_points_are_held_out_as_the_marked_are() -> None:
    marked = [replace(TTFTS_MEASURED[0], held_out=True), *TTFTS_MEASURED[1:], *LONG]
    done = fitted(marked, hold_out=0.4)
    assert [row["held_out"] for row in done.file.points] == [True, False, False, False, True, True]
    assert done.file.checked.startswith("3 held-out points: ")
    unfitted = fitted(marked, hold_out=1.0)
    assert unfitted.fit.constants == kernel_table()
    assert all(row["held_out"] for row in unfitted.file.points)


def test_a_point_that_no_kernel_reaches_is_doubtful() -> None:
    """91 % of peak, end to end: kernels alone reach 82 %."""
    work = point_steps(TTFTS[2], LLAMA_3_8B, H200_SXM)
    fast = replace(
        TTFTS[2], line=20, seconds=least(LLAMA_3_8B, H200_SXM, work.steps).seconds / 0.91
    )
    kept = fitted([*TTFTS_MEASURED, fast])
    assert not kept.rejected
    assert len(kept.doubts) == 1
    assert kept.doubts[0].startswith("line 20: ")
    assert "91%" in kept.doubts[0]


def test_a_hit_given_as_one_is_possible() -> None:
    cached = made(kernel_table(), [Point(4, "ttft", 1.0, 16_384, cached_tokens=16_000)])
    assert cached[0].seconds < 0.1 < TTFTS_MEASURED[2].seconds
    assert not fitted([*TTFTS_MEASURED, *cached]).rejected


def test_more_points_than_constants_are_cross_validated() -> None:
    noise = [1.02, 0.98, 1.01, 0.99] * 2
    exact = made(kernel_table(), TTFTS + ITLS + LONG)
    done = fitted([replace(p, seconds=p.seconds * f) for p, f in zip(exact, noise, strict=True)])
    worst_own = max(map(abs, errors_of(done)))
    left_out = [row["left_out_error"] for row in done.file.points]
    assert all(error is not None for error in left_out)
    assert max(map(abs, left_out)) > worst_own
    assert "leave-one-out over 8" in done.file.checked


def test_points_of_every_kind_of_table_are_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"kind": "ttft", "prompt_tokens": 256, "seconds": 0.02, "note": "\n#1"},
            {"kind": "itl", "prompt_tokens": 500, "seconds": 0.006, "note": "\n#2"}]  # fmt: skip
    csv, lines, parquet = (tmp_path / name for name in ("p.csv", "p.jsonl", "p.parquet"))
    csv.write_text("kind,prompt,seconds\n\n# by hand\nttft,256,0.02\nitl,500,0.006\n")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), str(parquet))
    assert [point.line for point in read_points(csv)] == [4, 5]
    for path in (csv, lines, parquet):
        points = [(at.kind, at.prompt_tokens, at.seconds) for at in read_points(path)]
        assert points == [("ttft", 256, 0.02), ("itl", 500, 0.006)]
    assert [point.note for point in read_points(parquet)] == ["\n#1", "\n#2"]


HEAD = "kind,prompt_tokens,seconds,held_out\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "no points"),
        (HEAD + "ttft,1000,1\n", ":2: 3 fields, the header has 4"),
        (HEAD + "# a note\nttft,1000,fast,\n", ":3: seconds: 'fast' is not a time"),
        (HEAD + "ttft,1000,0,\n", ":2: seconds is 0"),
        (HEAD + "ttft,1.5,1,\n", ":2: prompt_tokens: '1.5' is not a whole"),
        (HEAD + "guess,1000,1,\n", ":2: kind guess: give ttft"),
        (HEAD + "ttft,,1,\n", ":2: prompt_tokens: no such column"),
        (HEAD + "ttft,1000,1,maybe\n", ":2: held_out maybe"),
        ("kind,prompt_tokens,time\nttft,1,1\n", ":2: time: unknown"),
        ('{"kind":"ttft"}\n{"kind":\n', ":1: seconds: no such column"),
        ('{"kind":"ttft","prompt_tokens":64,"cached_tokens":64,"seconds":1}', "fewer than"),
        ('{"kind":"ttft","prompt_tokens":64,"batch_size":2,"seconds":1}', "alone"),
    ],
)
def test_bad_points_are_named_by_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_points(path)


GOOD = calibration_file_of("phi-3-mini-128k", "h200-nvl").as_json()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 1}, "format is 1; this version reads 2; fit the points again"),
        ({"gpu": None}, "gpu is missing"),
        ({"fited": []}, "fited: unknown key; did you mean fitted"),
        ({"constants": {**GOOD["constants"], "gemm_compute": 1.2}},
         r"constants.gemm_compute is 1.2; give a number from 0.05 to 1 \(share\)"),
        ({"constants": {**GOOD["constants"], "step": 1}}, "constants.step: unknown key; did you"),
        ({"constants": {k: v for k, v in GOOD["constants"].items() if k != "step_s"}},
         "constants.step_s is missing"),
        ({"points": [1]}, "points is not a list"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^cal.json: {says}"):
        parse_calibration(json.dumps({**GOOD, **change}).encode(), "cal.json")


def test_what_a_time_is_bound_by() -> None:
    decode = point_steps(ITLS[0], LLAMA_3_8B, H200_SXM)
    floor = least(LLAMA_3_8B, H200_SXM, decode.steps)
    assert floor.seconds == floor.memory_s == pytest.approx(16.06e9 / 4.8e12, rel=0.08)
    assert bound_by(floor, floor.seconds * 1.5) == "memory"
    assert bound_by(floor, floor.seconds * 4) == "overhead"
    prefill = least(LLAMA_3_8B, H200_SXM, point_steps(TTFTS[3], LLAMA_3_8B, H200_SXM).steps)
    assert bound_by(prefill, prefill.seconds * 1.5) == "compute"


def test_fit_writes_what_the_engine_reads(tmp_path: Path) -> None:
    points, out, prior = tmp_path / "points.csv", tmp_path / "cal.json", tmp_path / "prior.json"
    prior.write_text(json.dumps(calibration_file_of("phi-3-mini-128k", "h200-nvl").as_json()))
    points.write_text(
        "kind,prompt_tokens,max_num_batched_tokens,seconds,held_out,text\n"
        + "".join(
            f"{p.kind},{p.prompt_tokens},{p.max_num_batched_tokens},{p.seconds},{p.held_out},{p.text}\n"
            for p in FITTED + HELD_OUT
        )
        + "ttft,65536,131072,0.5,,\n"
    )
    words = ("fit", str(points), "--model", "phi-3-mini", "--gpu", "h200-nvl", "--json",
             "--calibration", str(prior))  # fmt: skip
    done = forebay("engine", *words, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "rejected line 9" in done.stderr
    data = json.loads(done.stdout)
    assert data["rejected"][0]["line"] == 9
    assert [row["held_out"] for row in data["points"]] == [False] * 4 + [True] * 3
    core = EngineCore(EngineConfig("phi-3-mini", "h200-nvl", calibration=out))
    assert (
        core.config.step_constants().server_times().request_s
        == data["constants"]["request_s"]
        == pytest.approx(3.95e-3, rel=0.01)
    )
    assert read_calibration(out).fitted == tuple(data["fitted"])
    with pytest.raises(InputError, match="is for phi-3-mini-128k on h200-nvl, not for llama-3-8b"):
        EngineConfig("llama-3-8b", "h200-nvl", calibration=out)
    again = forebay("engine", *words, "--out", str(out))
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists" in again.stderr


@pytest.fixture
def two_points(tmp_path: Path) -> str:
    path = tmp_path / "points.csv"
    path.write_text("kind,prompt_tokens,seconds\nttft,1024,0.04\nttft,8192,0.25\n")
    return str(path)


def test_the_table_says_which_part_of_it_is_evidence(two_points: str) -> None:
    done = forebay("engine", "fit", two_points, "--model", "llama-3-8b", "--gpu", "h200")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "as many constants as points: no evidence" in said
    assert "decode_bandwidth 0.9 0.9 share 0.05 to 1 prior" in said


def test_the_list_of_shipped_calibrations() -> None:
    done = forebay("engine", "--list-calibrations", "--json")
    assert {(one["model"], one["gpu"]) for one in json.loads(done.stdout)["calibrations"]} == {
        (one.model, one.gpu) for one in shipped()
    }
    assert "any other" in forebay("engine", "--list-calibrations").stdout


def test_a_calibration_is_written_to_the_target_of_a_link(two_points: str, tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("{}")
    link.symlink_to(kept)
    words = ("--model", "llama-3-8b", "--gpu", "h200", "--out", str(link), "--force")
    done = forebay("engine", "fit", two_points, *words)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert read_calibration(kept).model == "llama-3-8b"


@pytest.mark.parametrize(("error", "refused"), [(0.1, True), (None, True), (50.0, False)])
def test_a_constant_near_zero_is_refused_only_if_it_is_certain(
    error: float | None, refused: bool
) -> None:
    """A server that tokenizes in no time that could be measured is possible."""
    name, low = "tokenize_token_s", 1e-8
    constants = replace(kernel_table(), tokenize_token_s=low)
    why = refusal(Fit(constants, (name,), {name: error}, (name,), {}, 0.1))
    assert (why is not None and why.startswith(f"{name} would be negative")) is refused


def test_a_fit_without_scipy_names_the_extra(
    two_points: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    words = ("engine", "fit", two_points, "--model", "llama-3-8b", "--gpu", "h200")
    done = forebay(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("forebay engine: scipy is not installed: pip install 'forebay[lab]'\n")
    compared = forebay(*words, "--hold-out", "1", "--json")
    assert json.loads(compared.stdout)["fitted"] == []
