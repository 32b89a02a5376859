"""The charts of docs/ show the committed results, computed anew without the code that drew them.

A chart is read back: the ticks of its axes tell where a value lies. The rows behind a study's table
are not committed, only their percentiles by study, router and load. So the points of a chart that
draws every request are held against these percentiles.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from drawn_charts import STUDIES, SVG, Panel, Points, covered, looks, read_panels
from pages.doc_pages import FILES
from paths import RESULTS, ROOT

DOCS = ROOT / "docs"
DRAWINGS = {"docs/assets/architecture.svg", "docs/assets/top.svg"}
"""Pictures without a figure of a result: boxes and arrows, and a terminal."""
GIB = 2**30
PHI_TOKEN = 2 * 32 * 3_072 * 2
"""Bytes of the KV cache of a token of Phi-3-mini: keys and values, layers, width, 16 bits."""
H200_NVL = {"peak": 835.5e12, "bandwidth": 4.8e12}
"""FLOP/s and bytes/s of its data sheet."""
Rows = Sequence[Mapping[str, Any]]


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(name: str, **cells: Any) -> Rows:
    rows = results("studies")[name]["rows"]
    return [row for row in rows if all(row[key] == value for key, value in cells.items())]


def pairs(rows: Rows, x: str, y: str) -> Points:
    return [(row[x], row[y]) for row in rows if row[y] is not None]


def relative_fit(points: Points, powers: Sequence[int]) -> Callable[[float], float]:
    """The least squares of relative errors, by the normal equations."""
    x, y = np.array(points).T
    terms = np.array([x**power / y for power in powers])
    found = np.linalg.solve(terms @ terms.T, terms.sum(axis=1))
    return lambda at: float(sum(c * at**power for c, power in zip(found, powers, strict=True)))


def fitted(panel: Panel, name: str, points: Points, powers: Sequence[int]) -> None:
    panel.assert_shows(name, points, joined=False)
    curve, fit = panel.lines[name].curve, relative_fit(points, powers)
    panel.assert_at(curve, [(at := panel.x.value(x), fit(at)) for x, _ in curve])


def prefill() -> None:
    (panel,) = read_panels("prefill")
    points = pairs(rows_of("prefill"), "prompt_tokens", "ttft_s")
    fitted(panel, "measured, with the fit", points, (0, 1, 2))
    fit = relative_fit(points, (0, 1, 2))
    linear, square = np.linalg.solve([[1, 1], [2, 4]], [fit(1) - fit(0), fit(2) - fit(0)])
    assert panel.x.value(panel.notes["quadratic leads"]) == pytest.approx(linear / square, rel=0.01)


def decode() -> None:
    (panel,) = read_panels("decode")
    points = pairs(rows_of("decode", output_tokens=256), "batch", "steady_itl_s")
    fitted(panel, "256 output tokens", points, (0, 1))


def phases() -> None:
    (panel,) = read_panels("phases")
    for phase in ("prefill", "decode"):
        rows = rows_of("phases", phase=phase)
        reached = [(r["flop_per_byte"], r["peak_share"] * H200_NVL["peak"]) for r in rows]
        panel.assert_shows(phase, reached, joined=False)
        # The same from the other roof: bytes/s times FLOP per byte.
        by_bytes = [r["flop_per_byte"] * r["bandwidth_share"] * H200_NVL["bandwidth"] for r in rows]
        assert by_bytes == pytest.approx([y for _, y in reached], rel=1e-3)
    ridge = H200_NVL["peak"] / H200_NVL["bandwidth"]
    assert panel.x.value(panel.notes["ridge"]) == pytest.approx(ridge, rel=0.01)
    for x, y in panel.points("roof of h200-nvl"):
        assert y == pytest.approx(min(H200_NVL["peak"], x * H200_NVL["bandwidth"]), rel=0.01)


def memory() -> None:
    by_requests, by_length = read_panels("memory")
    rows = rows_of("memory")
    pool_gib = float(
        re.findall(r"in the ([\d.]+) GiB", results("studies")["memory"]["notes"][0])[0]
    )
    sizes = {f"{n:,} reserved": n for n in (2_048, 8_192, 128_000)} | {"in pages, 256 used": 256}
    assert set(by_requests.lines) == set(sizes)
    for name, tokens in sizes.items():
        each, least = tokens * PHI_TOKEN / GIB, 2_048 * PHI_TOKEN / GIB
        most = min(pool_gib / each, 4 * (pool_gib // least))
        by_requests.assert_at(by_requests.lines[name].curve, [(0, 0), (most, most * each)])
    for row in rows:
        assert row["reserved_gib"] == 100 * row["max_model_len"] * PHI_TOKEN / GIB
    by_length.assert_shows("reserved", [
        (row["max_model_len"], pool_gib * GIB // (row["max_model_len"] * PHI_TOKEN)) for row in rows
    ])  # fmt: skip
    in_pages = pool_gib * GIB // (256 * PHI_TOKEN)
    by_length.assert_shows("in pages", [(row["max_model_len"], in_pages) for row in rows])


def kv() -> None:
    (panel,) = read_panels("kv")
    rows, sentence = rows_of("kv"), results("studies")["kv"]["sentence"]
    pool, each = (float(re.findall(rf"([\d,]+) {after}", sentence)[0].replace(",", ""))
                  for after in (r"tokens \(predicted", r"tokens, as"))  # fmt: skip
    predicted = [(row["requests"], min(1.0, row["requests"] * each / pool)) for row in rows]
    panel.assert_at(panel.lines["predicted"].curve, predicted)
    panel.assert_shows("reported peak", pairs(rows, "requests", "reported_share"), joined=False)
    assert panel.x.value(panel.notes["last that fits"]) == pytest.approx(pool // each, abs=0.02)


def hol() -> None:
    (panel,) = read_panels("hol")
    for name, key in (("worst gap of the chat", "worst_gap_s"),
                      ("TTFT of the upload", "upload_ttft_s")):  # fmt: skip
        panel.assert_shows(name, pairs(rows_of("hol"), "max_num_batched_tokens", key))


def share_from(points: Points, limit: float) -> float:
    """The share of requests that took longer than `limit`, of a falling curve of shares."""
    times, shares = np.array(points).T
    return float(np.interp(np.log(limit), np.log(times), shares)) if limit < times[-1] else 0.0


def hol_fleet() -> None:
    stalls, waits = read_panels("hol-fleet")
    rows = rows_of("hol-fleet")
    assert list(stalls.lines) == [f"{row['way']}, {row['prefill']}" for row in rows]
    for name, row in zip(stalls.lines, rows, strict=True):
        points = stalls.points(name)
        assert points[-1][0] == pytest.approx(row["stall_s"], rel=0.01)
        assert share_from(points, 0.5) == pytest.approx(row["stalled_share"], rel=0.1, abs=0.002)
        times, shares = np.array(waits.points(name)).T
        p99 = np.exp(np.interp(-np.log(0.01), -np.log(shares), np.log(times)))
        assert p99 == pytest.approx(row["ttft_p99_s"], rel=0.05)


def saturation() -> None:
    throughput, times = read_panels("saturation")
    rows = rows_of("saturation")
    throughput.assert_shows("throughput", pairs(rows, "load", "tokens_per_s"))
    for name, key in (("TTFT p50", "ttft_s"), ("TTFT p99", "ttft_p99_s"),
                      ("time per output token p50", "tpot_s")):  # fmt: skip
        times.assert_shows(name, pairs(rows, "load", key))
    # The knee is the point that is furthest above the chord.
    load, tokens = np.array(pairs(rows, "load", "tokens_per_s")).T
    above = (tokens - tokens[0]) / np.ptp(tokens) - (load - load[0]) / np.ptp(load)
    knee = load[above.argmax()]
    for panel in (throughput, times):
        assert panel.x.value(panel.notes["knee"]) == pytest.approx(knee, rel=0.01)


def shared_document() -> None:
    waits, used = read_panels("shared-document")
    for way in ("round robin", "proxy"):
        of = {row["phase"]: row for row in rows_of("shared-document", way=way)}
        first, others = of["first"], of["the others"]
        drawn = [y for _, y in waits.points(f"{way}, one first")]
        assert len(drawn) == 50
        assert max(drawn) == pytest.approx(max(first["ttft_max_s"], others["ttft_max_s"]), rel=0.01)
        drawn.remove(min(drawn, key=lambda y: abs(y - first["ttft_s"])))
        assert np.median(drawn) == pytest.approx(others["ttft_s"], rel=0.01)
        cold = [y for _, y in waits.points(f"{way}, all, cold")]
        assert np.median(cold) == pytest.approx(of["all, cold"]["ttft_s"], rel=0.01)
        assert max(cold) == pytest.approx(of["all, cold"]["ttft_max_s"], rel=0.01)
        most = max(y for _, y in used.points(way))
        assert most == pytest.approx(others["kv_tokens"], rel=0.01)
    for users, tokens in used.points("one copy per user"):
        assert tokens == pytest.approx(round(users) * 60_480, rel=0.01)


def flood() -> None:
    goodput, p99, p50 = read_panels("flood")
    for panel, key in ((goodput, "goodput_per_s"), (p99, "ttft_p99_s"), (p50, "ttft_p50_s")):
        for name in panel.lines:
            panel.assert_shows(name, pairs(rows_of("flood", way=name), "load", key))
        assert set(panel.lines) == {row["way"] for row in rows_of("flood")}


def needle() -> None:
    root = ElementTree.parse(STUDIES / "needle.svg").getroot()
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    cells = [f"{r['length']:,}, {r['depth']}: {r['whole']:.1%}" for r in rows_of("needle")]
    assert sorted(titles) == sorted(cells)


CHECKS: Mapping[str, Callable[[], None]] = {
    check.__name__.replace("_", "-"): check
    for check in (prefill, decode, phases, memory, kv, hol, hol_fleet, saturation,
                  shared_document, flood, needle)
}  # fmt: skip
"""The functions that check the chart of a study."""


@pytest.mark.parametrize("name", CHECKS)
def test_a_chart_shows_the_results(name: str) -> None:
    CHECKS[name]()


def wrong(result: Any) -> Any:
    """The same with every figure a tenth too large."""
    if isinstance(result, dict):
        return {key: wrong(value) for key, value in result.items()}
    if isinstance(result, list):
        return [wrong(value) for value in result]
    return result * 1.1 if isinstance(result, float) else result


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_sees_other_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = results
    monkeypatch.setitem(globals(), "results", lambda of: wrong(right(of)))
    with pytest.raises(AssertionError):
        CHECKS[name]()


def test_every_chart_has_a_check() -> None:
    """Charts that are drawn from results/headline.json are compared by test_generated."""
    found = {path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.svg")}
    assert found - DRAWINGS - set(FILES) == {f"docs/assets/studies/{name}.svg" for name in CHECKS}


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "needle"])
def test_a_chart_can_be_read(name: str) -> None:
    """No two series look alike, and the key and notes cover none."""
    root = ElementTree.parse(STUDIES / f"{name}.svg").getroot()
    for drawn, panel in zip(root.iter(f"{SVG}g"), read_panels(name), strict=True):
        assert len(set(looks(drawn))) == len(looks(drawn))
        assert covered(drawn, panel.lines.values()) == []
