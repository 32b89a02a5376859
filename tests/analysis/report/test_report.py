"""The HTML report: one well-formed file that loads nothing and shows the figures of the runs."""

import csv
import io
import json
import os
import re
import shlex
import threading
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import forebay, printed, refusal
from fakes.made_runs import SLOS, answered, refused, write_pair, write_run

from forebay.analysis.charts import svg
from forebay.analysis.compare.compare import compare_all
from forebay.analysis.compare.figures import figures, run_figures
from forebay.analysis.compare.tables import markdown
from forebay.analysis.report import report
from forebay.analysis.report.plots import load_plots, percentile_plot, timeline_plot
from forebay.analysis.report.report import build_report, write_text
from forebay.analysis.report.tables import origin, spent_times
from forebay.analysis.runs.load import load_run, load_runs
from forebay.analysis.runs.provenance import repeat_command
from forebay.proxy.cli import main
from forebay.replay.plan.slo import Slo
from forebay.replay.results.server_metrics import MetricsTable
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<img src=x onerror=alert(1)>\"'&</script>"


class Checked(HTMLParser):
    """Fails on a tag closed out of turn; collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split()).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(pair: tuple[Path, Path]) -> str:
    return build_report(load_runs(pair)).html


def test_page_is_well_formed(page: str) -> None:
    checked = Checked(page)
    assert checked.tags.count("h1") == 1
    assert checked.tags.count("script") == 1
    headings = [i for i, tag in enumerate(checked.tags) if tag == "h2"]
    assert len(headings) == 10


def test_each_chart_of_simulated_runs_says_so(tmp_path: Path) -> None:
    """A screenshot of one chart cannot be taken for a measurement."""
    rows = [answered(i, "chat", i * 1.0, 0.1) for i in range(30)]
    info = {"simulated": True, "gpus": 2, "gpu_mix": ["h200"]}
    made, live = write_run(tmp_path / "made", rows, info=info), write_run(tmp_path / "live", rows)
    note = '<span class="soft small">simulated: 2 × H200, virtual time</span>'
    page = build_report([load_run(made)]).html
    assert "<h1>made (simulated)</h1>" in page
    titles = re.findall(r"<figure><h3>(.*?)</h3>", page)
    assert len(titles) == 6
    assert all(title.endswith(note) for title in titles)
    mixed = build_report(load_runs([live, made])).html
    assert mixed.count(note.replace("simulated", "made simulated")) == 9
    tables = compare_all(load_runs([live, made]))
    assert markdown(tables, []).endswith("\nmade: simulated: 2 × H200, virtual time.\n")
    assert "made: simulated: 2 × H200, virtual time" in tables[0].warnings
    table = printed("compare", live, made)
    assert "all requests · simulated" in table
    assert "valid" not in table
    assert "simulated: " not in build_report([load_run(live)]).html


def test_a_column_has_one_unit(tmp_path: Path) -> None:
    rows = [answered(i, "chat", i * 1.0, 0.01, queue_ms=0.0) for i in range(30)]
    rows += [answered(99, "document", 3.0, 9.0, queue_ms=2500.0), refused(100, "chat", 1.0)]
    rows.append(refused(101, "document", 1.0, reason="late", reject_latency_s=8.0))
    html = build_report([load_run(write_run(tmp_path / "r", rows))]).html
    for title in ("Where the time went", "Rejected and failed requests"):
        table = html.partition(f"<h2>{title}")[2].partition("</table>")[0]
        cells = re.findall(r'<td class="n">([\d.]+ m?s)</td>', table)
        assert len(cells) >= 6
        assert {cell.split()[1] for cell in cells} == {"s"}, cells
    queue = re.findall(r"<th scope=\"row\">proxy queue \w+</th><td class=\"n\">([^<]*)</td>", html)
    assert queue[:2] == ["0.0 ms", "0.0 ms"]
    assert queue[2:] == ["2.50 s"]
    ttft = re.findall(r"<th scope=\"row\">TTFT \w+</th><td class=\"n\">([^<]*)</td>", html)
    assert ttft == ["10.0 ms", "–", "10.0 ms", "–", "9.00 s"]


def test_every_latency_has_a_curve(page: str) -> None:
    labels = re.findall(r'aria-label="([^"]*) by percentile, (\w+) requests', page)
    assert labels == [
        ("Time to first token", "chat"),
        ("Time to first token", "document"),
        *(
            (name, bucket)
            for bucket in ("chat", "document")
            for name in ("End-to-end latency", "Time per output token", "Longest stall",
                         "Queue of the proxy")
        ),
    ]  # fmt: skip


def test_the_time_of_single_requests_adds_up(tmp_path: Path) -> None:
    rows = [
        answered(i, "chat", i * 1.0, (i + 1) / 10, queue_ms=50.0, request_id=f"q{i}",
                 ttft_service_s=(i + 1) / 10 - 0.02)
        for i in range(200)
    ]  # fmt: skip
    run = load_run(write_run(tmp_path / "r", rows))
    (side,) = run_figures([run])
    spent = {times.rank: times for times in spent_times(side, "chat", 10)}
    assert list(spent) == ["p50", "p90", "longest"]  # 2 samples beyond p99 are too few
    median = spent["p50"]
    assert median.request_id == "q99"
    assert median.parts == pytest.approx({"late": 0.02, "queue": 0.05, "first": 9.93, "rest": 1.0})
    assert sum(median.parts.values()) == pytest.approx(11.0)  # its E2E
    text = Checked(build_report([run]).html).text
    assert "Where the time went" in text
    assert "q199" in text


def test_three_runs_and_their_seeds_are_told_apart(tmp_path: Path) -> None:
    rows = [answered(i, "chat", i * 1.0, 0.1) for i in range(30)]
    runs = load_runs(
        [write_run(tmp_path / f"r{seed}", rows, info={"seed": seed}) for seed in (1, 2, 3)]
    )
    html = build_report(runs).html
    text = Checked(html).text
    for seed in (1, 2, 3):
        assert f"r{seed}, seed {seed}" in text
        assert f"chat, r{seed}" in text  # a plot over time of its own
        assert f'class="dots run{seed - 1}"' in html


def test_the_figures_as_markdown_and_csv(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "r.md"
    printed("report", *pair, "--markdown", "-o", out)
    lines = out.read_text().splitlines()
    assert lines[0].startswith("forebay is better than round-robin in chat TTFT")
    assert "|  | round-robin | forebay | B/A |" in lines
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {5}
    table = list(csv.DictReader(io.StringIO(printed("compare", *pair, "--csv"))))
    by_key = {(row["section"], row["figure"]): row for row in table}
    runs = load_runs(pair)
    for name, run in zip(("round-robin", "forebay"), runs, strict=True):
        exact = figures(run, "chat").latency["ttft"].values["p95"]
        assert float(by_key["chat", "ttft_p95"][name]) == exact
    assert "give one of them" in refusal("compare", *pair, "--csv", "--json")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tensor-parallel-size 2 --max-num-batched-tokens 2048 --max-num-seqs 64 "
        "--no-enable-prefix-caching --scheduler-reserve-full-isl --kv-cache-dtype fp8 "
        "--gpu-memory-utilization 0.8 --quantization fp8",
        "--vllm-version 0.20 --no-async-scheduling --api-server-count 2",
    ],
)
def test_the_command_of_a_simulation_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "t.jsonl", (TraceRequest(f"r{i}", i * 0.1, 900, 8) for i in range(30)))
    line = "simulate t.jsonl --rate 7 --arrivals poisson --seed 3 --policy direct --gpus 1 --out a"
    assert main(shlex.split(f"{line} {flags}")) == 0
    again = repeat_command(load_run(tmp_path / "a"))
    assert again.startswith("forebay simulate t.jsonl --gpus 1")
    assert set(flags.split()) <= set(again.split())
    assert main(shlex.split(again)[1:]) == 0
    first, second = (load_run(tmp_path / name) for name in ("a", "a-again"))
    by_chance = {"cpu_s": None}
    assert {**first.summary, **by_chance} == {**second.summary, **by_chance}
    assert first.info["engine"] == second.info["engine"]


def test_curves_of_searches_are_compared(tmp_path: Path) -> None:
    names = (HOSTILE.replace("/", ""), "other")
    for name, most in zip(names, (8.0, 9.0), strict=True):
        (tmp_path / name).mkdir()
        curve = [
            {"rate_per_s": load, "completed_per_s": min(load, most), "attainment": 1 / load,
             "ttft_p50_s": 0.05 * load, "ttft_p99_s": None if load > 5 else 1.0}
            for load in (1.0, 4.0, 16.0)
        ]  # fmt: skip
        result = {"sentence": f"At {most:g} requests/s", "curve": curve}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
        (tmp_path / name / "search.json").write_text(json.dumps({"target": ["sim:a@b"]}))
    out, folders = tmp_path / "page.html", [tmp_path / name for name in names]
    printed("report", *folders, "-o", out)
    checked = Checked(out.read_text())
    assert f"{names[0]} (simulated): At 8 requests/s" in checked.text
    assert "other (simulated) 16.00 /s 9.00 /s 6.2 % 800 ms –" in checked.text
    assert "requests per second completed" in checked.text
    assert "img" not in checked.tags
    assert "script" not in checked.tags
    (tmp_path / "other/result.json").write_text('{"curve": [{"rate_per_s": "x"}]}')
    said = refusal("report", *folders, "-o", out, "--force")
    assert "holds no curve; repeat the search" in said


def test_page_needs_nothing_else(page: str) -> None:
    """No address but those of the run's own targets, in text; no attribute that loads anything."""
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"}
    loaded = [(name, value) for name, value in Checked(page).attributes if name in loading]
    assert loaded == [("href", "data:,")]
    assert set(re.findall(r"https?://[\w.:/-]+", page)) == {
        "http://127.0.0.1:8001",
        "http://www.w3.org/2000/svg",  # a name, not an address
    }
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_page_says_what_the_runs_say(page: str) -> None:
    text = Checked(page).text
    assert "forebay compared with round-robin" in text
    assert (
        "forebay is better than round-robin in chat TTFT, document TTFT (of answered requests) "
        "and goodput; forebay left " in text
    )
    assert "chat: p99 time to first token 0.45 s with forebay, 7.65 s with round-robin" in text
    assert "deadline_unattainable 429 7 0.4 %" in text  # reason, status, count, share
    assert "gpu0 880" in text
    assert "simulated time, 4 times as fast as real time" in text
    for known in ("poisson", "abababab", "python 3.11.7", "schedule lag", "valid (0 of 1760"):
        assert known in text


def test_worse_is_reported_as_worse(pair: tuple[Path, Path]) -> None:
    page = build_report(load_runs([pair[1], pair[0]]))
    assert page.summary.startswith("round-robin is worse than forebay in chat TTFT")
    assert 'class="summary worse"' in page.html
    assert "worse-text" in page.html
    assert "round-robin is better" not in page.html


def test_refusals_are_timed_by_the_clock(tmp_path: Path) -> None:
    """8 ms of simulated time at four times the clock are 2 ms."""
    rows = [refused(i, "chat", float(i), reject_latency_s=0.008) for i in range(3)]
    page = build_report([load_run(write_run(tmp_path / "r", rows))]).html
    assert '<td class="n">2.00 ms</td>' in page


def test_a_run_with_only_rejects_has_a_page(tmp_path: Path) -> None:
    rows = [refused(i, "chat", float(i)) for i in range(50)]
    page = build_report([load_run(write_run(tmp_path / "r", rows))])
    text = Checked(page.html).text
    assert "No request of this bucket was answered." in text
    assert "queue_full 429 50 100.0 %" in text
    assert "0 of 50 answered" in page.summary


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    page = build_report([load_run(write_run(tmp_path / "r", []))])
    assert "There were no requests." in Checked(page.html).text


def test_an_empty_bucket_on_one_side(tmp_path: Path) -> None:
    a = [answered(i, "chat", float(i), 1.0) for i in range(30)]
    b = [*a, answered(99, "document", 5.0, 9.0)]
    runs = load_runs([write_run(tmp_path / "a", a), write_run(tmp_path / "b", b)])
    text = Checked(build_report(runs).html).text
    assert "document: too few answered requests for a percentile (1 with b, 0 with a)." in text


def test_a_report_takes_one_run_to_ten(pair: tuple[Path, Path]) -> None:
    alone = Checked(build_report([load_run(pair[0])]).html)
    assert "second / first" not in alone.text
    with pytest.raises(InputError, match="11 runs: a report takes 1 to 10"):
        build_report(load_runs([pair[0]] * 11))
    with pytest.raises(InputError, match="0 runs"):
        build_report([])


def test_ten_runs_can_be_told_apart(pair: tuple[Path, Path]) -> None:
    page = build_report(load_runs([pair[0], *[pair[1]] * 9])).html
    checked = Checked(page)
    classes = " ".join(value for name, value in checked.attributes if name == "class").split()
    assert {f"run{number}" for number in range(10)} <= set(classes)
    # Each comparison is one sentence, which unfolds its figures.
    assert len(re.findall(r'<details class="summary \w+"><summary>', page)) == 9


def _area(path: str) -> float:
    """The area that an outline of straight lines fills, by the rule of odd crossings."""
    xs, ys = np.array([corner.split() for corner in path[1:-1].split("L")], float).T
    across = np.array([(x, y) for x in np.arange(-6, 6, 0.1) for y in np.arange(-6, 6, 0.1)])
    inside = np.zeros(len(across), bool)
    for x, y, to_x, to_y in zip(xs, ys, np.roll(xs, -1), np.roll(ys, -1), strict=True):
        crosses = (y > across[:, 1]) != (to_y > across[:, 1])
        if y != to_y:
            inside ^= crosses & (across[:, 0] < x + (across[:, 1] - y) / (to_y - y) * (to_x - x))
    return float(inside.sum()) / 100


def test_every_mark_can_be_seen() -> None:
    drawn = [svg.mark(number, 0.0, 0.0, "mark", "") for number in range(1, svg.MARKS)]
    paths = [re.search(r' d="([^"]*)"', one) for one in drawn]
    assert min(_area(path[1]) for path in paths if path) > 30  # square pixels; a circle has 55


def test_hostile_texts_stay_text(tmp_path: Path) -> None:
    info = {"model": HOSTILE, "trace": {"path": HOSTILE}, HOSTILE: HOSTILE, "seed": HOSTILE}
    summary = {"verdict": HOSTILE, "verdict_reason": HOSTILE, "slos": [HOSTILE]}
    runs = []
    for number in range(3):
        rows = [answered(i, HOSTILE, 0.0, 1.0 + number, backend=HOSTILE) for i in range(40)]
        rows.append(refused(99, HOSTILE, 1.0, reason=HOSTILE))
        folder = write_run(tmp_path / str(number), rows, summary, info)
        runs.append(load_run(folder, name=f"{HOSTILE}{number}"))
    for some in (runs[:1], runs[:2], runs):
        page = build_report(some, [Slo(HOSTILE, "ttft", 1.5)], title=HOSTILE).html
        checked = Checked(page)
        assert "img" not in checked.tags
        assert checked.tags.count("script") == 1
        assert not [name for name, _ in checked.attributes if name.startswith("on")]
        assert HOSTILE in checked.text
        curves = next(value for name, value in checked.attributes if name == "data-curves")
        assert [curve["name"] for curve in json.loads(curves)] == [run.name for run in some]


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    style = Path(report.__file__).with_name("report.css").read_text(encoding="utf-8")
    light, dark = style.split("prefers-color-scheme: dark")
    for name in re.findall(r"var\((--[a-z0-9]+)\)", style):
        if name != "--c":
            assert f"{name}:" in light
            assert f"{name}:" in dark


class TestPlots:
    def test_plots_are_xml_inside_their_frame(self, pair: tuple[Path, Path]) -> None:
        drawn_runs = run_figures(load_runs(pair))
        for drawn in (
            percentile_plot(drawn_runs, "chat", 10),
            percentile_plot(drawn_runs, "document", 10),
            timeline_plot(drawn_runs, "chat"),
            timeline_plot(drawn_runs, "document"),
        ):
            root = ElementTree.fromstring(drawn)
            height = float(root.attrib["viewBox"].split()[3])
            for node in root.iter("text"):
                assert 0 <= float(node.attrib["x"]) <= 480
                assert 0 <= float(node.attrib["y"]) <= height
            for node in root.iter("path"):
                for x, y in re.findall(r"M([\d.]+) ([\d.]+)", node.attrib["d"]):
                    assert 60 <= float(x) <= 480
                    assert 5 <= float(y) <= height

    def test_all_runs_and_buckets_have_one_axis(self, tmp_path: Path) -> None:
        """10 ms to 1 s beside 1 s to 100 s would look alike."""
        slow = [answered(i, "document", i * 1.0, 20.0) for i in range(40)]
        fast = [answered(i, "chat", i * 0.5, 0.02) for i in range(40)]
        runs = load_runs([write_run(tmp_path / "a", slow), write_run(tmp_path / "b", fast)])
        sides = run_figures(runs)
        drawn = (
            percentile_plot(sides, "chat", 10),
            percentile_plot(sides, "document", 10),
            timeline_plot(sides, "document", [0]),
            timeline_plot(sides, "chat", [1]),
        )
        ticks = [re.findall(r'<text x="58"[^>]*>([^<]*)', plot) for plot in drawn]
        assert ticks[0][-1] == "10 s"
        assert all(labels == ticks[0] for labels in ticks)
        times = [re.findall(r'y="[^"]*" class="tick"[^>]*>(\d+)<', plot) for plot in drawn[2:]]
        assert times[0] == times[1] == ["0", "10", "20", "30", "40", "50", "60"]

    def test_the_load_over_time(self, tmp_path: Path) -> None:
        """Two requests a second of 9.5 s each, of which half wait 5 s in the proxy."""
        rows = [
            answered(i, "chat", i / 2, 8.5, backend=f"gpu{i % 2}", queue_ms=5000.0 * (i % 2))
            for i in range(200)
        ]
        rows += [refused(200 + i, "chat", 50.0 + i / 4) for i in range(40)]
        short = [answered(i, "chat", i / 4, 0.5) for i in range(8)]
        runs = load_runs([write_run(tmp_path / "a", rows), write_run(tmp_path / "b", short)])
        (_, busy), (_, idle) = load_plots(run_figures(runs))
        most = [re.findall(r"([\w ]+?) at most ([\d.]+)", drawn) for drawn in (busy, idle)]
        assert [name.strip() for name, _ in most[0]] == [
            *("requests due per second", "requests in flight", "rejected or failed per second"),
            *("in flight at gpu0", "in flight at gpu1"),
        ]
        assert [float(high) for _, high in most[0]] == pytest.approx([6, 19, 4, 9.5, 4.5], rel=0.1)
        assert [float(high) for _, high in most[1]] == pytest.approx([2.3, 3.4, 0, 3.4], rel=0.1)
        # The same scale in both runs, for all servers too.
        for drawn in (busy, idle):
            highs = re.findall(r'class="tick" text-anchor="end">([\d.]+)<', drawn)
            assert [high for high in highs if high != "0"][:4] == ["8", "20", "5", "10"]
            ElementTree.fromstring(drawn)

    def test_power_and_use_stand_below_the_load(self, tmp_path: Path) -> None:
        """The samples of --metrics were in the folder of the run, and no page showed them."""
        rows = [answered(i, "chat", i / 2, 0.5) for i in range(200)]
        figures = {"power_w": 1_400.0, "energy_j_per_request": 704.0}
        run = write_run(tmp_path / "a", rows, figures)
        table = MetricsTable(run / "metrics.parquet", run / "metrics.arrow")
        for second in range(101):
            busy = 0.5 if second < 50 else 1.0
            page = f"vllm:kv_cache_usage_perc {busy / 2}\n" + "".join(
                f'DCGM_FI_DEV_{name}{{UUID="{gpu}"}} {value}\n'
                for gpu in "ab"
                for name, value in (("GPU_UTIL", 100 * busy), ("POWER_USAGE", 700 * busy))
            )
            table.add(float(second), "http://a/metrics", page)
        table.close()
        without = write_run(tmp_path / "b", rows, {"power_w": None, "energy_j_per_request": 352.0})
        runs = load_runs([run, without])
        (_, drawn), (_, plain) = load_plots(run_figures(runs))
        assert re.findall(r"(GPU use|GPU power|KV cache use), (%|kW) at most ([\d.]+)", drawn) == [
            ("GPU use", "%", "100"), ("GPU power", "kW", "1.4"), ("KV cache use", "%", "50"),
        ]  # fmt: skip
        assert "GPU" not in plain
        lines = {line.key: line.texts for line in compare_all(runs)[0].lines}
        assert lines["power_w"] == ["1,400 W", "–"]
        assert lines["energy_j_per_request"] == ["704.0 J", "352.0 J"]
        assert "gpu_use" not in lines
        # A damaged file is an error that names it.
        (run / "metrics.parquet").write_bytes(b"PAR1")
        with pytest.raises(InputError, match=r"metrics\.parquet: damaged parquet"):
            build_report(runs)

    def test_axis_is_labelled_as_hdr_does(self, pair: tuple[Path, Path]) -> None:
        root = ElementTree.fromstring(percentile_plot(run_figures(load_runs(pair)), "chat", 10))
        labels = [node.text for node in root.iter("text")]
        for label in ("0%", "50%", "90%", "99%", "99.9%", "100 ms", "1 s", "10 s"):
            assert label in labels
        places = {n.text: float(n.attrib["x"]) for n in root.iter("text") if "%" in (n.text or "")}
        assert places["99%"] - places["90%"] == pytest.approx(
            places["99.9%"] - places["99%"], abs=0.2
        )

    def test_marks_stand_only_where_samples_do(self, tmp_path: Path) -> None:
        rows = [answered(i, "chat", float(i), 1.0 + i) for i in range(100)]
        run = load_run(write_run(tmp_path / "r", rows))
        titles = re.findall(
            r"<title>(.*?)</title>", percentile_plot(run_figures([run]), "chat", 10)
        )
        assert titles == ["r: p50 50.0 s", "r: p90 90.0 s"]
        assert "p99" in percentile_plot(run_figures([run]), "chat", 1)

    def test_figures_of_the_summary_are_shown_by_their_count(self, tmp_path: Path) -> None:
        lag = {"count": 50, "p50": 0.1, "p99": 0.6, "max": 2.0}
        rows = [answered(i, "chat", float(i), 1.0 + i) for i in range(50)]
        told = {"schedule_lag_ms": lag, "ttft_ms": {"chat": lag}}
        run = load_run(write_run(tmp_path / "r", rows, told))
        assert run.number("schedule_lag_ms", "p99") == 0.6
        assert run.shown("schedule_lag_ms", "p99") is None
        assert origin(run).texts["schedule lag"] == "p50 0.1 ms, max 2 ms"

    def test_failures_draw_a_dotted_line(self, tmp_path: Path) -> None:
        rows = [answered(i, "chat", float(i), 1.0 + i) for i in range(100)]
        run = load_run(write_run(tmp_path / "r", rows))
        assert "curve lost" not in percentile_plot(run_figures([run]), "chat", 10)
        rows += [refused(200 + i, "chat", float(i)) for i in range(100)]
        run = load_run(write_run(tmp_path / "s", rows))
        drawn = percentile_plot(run_figures([run]), "chat", 10)
        path = re.search(r'<path d="([^"]*)" class="curve lost run0"', drawn)
        assert path is not None
        median = re.search(r'<text x="([\d.]+)"[^>]*>50%', drawn)
        assert median is not None
        assert path[1].endswith(f"H{median[1]}V12.0")  # half unanswered: off the top at p50

    def test_a_long_run_stays_small(self, tmp_path: Path) -> None:
        rows = [
            answered(i, "chat", i * 0.01, 0.05 + (i * 7919 % 1000) / 500) for i in range(20_000)
        ]
        run = load_run(write_run(tmp_path / "r", rows))
        assert len(percentile_plot(run_figures([run]), "chat", 10)) < 60_000
        assert len(timeline_plot(run_figures([run]), "chat")) < 300_000

    def test_zero_latency_and_one_request_do_not_break_the_axes(self, tmp_path: Path) -> None:
        run = load_run(write_run(tmp_path / "r", [answered(0, "chat", 0.0, 0.0)]))
        ElementTree.fromstring(percentile_plot(run_figures([run]), "chat", 10))
        ElementTree.fromstring(timeline_plot(run_figures([run]), "chat"))


class TestCommand:
    def test_writes_the_page_and_says_so(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        words = ("report", *pair, "-o", out, "--title", "Night <1>")
        done = forebay(*words)
        assert (done.returncode, done.stdout) == (0, "")
        assert "forebay is better than round-robin" in done.stderr
        assert "Night &lt;1&gt;" in out.read_text(encoding="utf-8")
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        done = forebay(*words, "--json", "--force")
        assert json.loads(done.stdout)["path"] == str(out)
        assert (done.returncode, done.stderr) == (0, "")

    def test_never_overwrites_unasked(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        out.write_text("mine")
        words = ("report", pair[0], "-o", out)
        assert "exists; give another name, or --force to overwrite it" in refusal(*words)
        assert out.read_text() == "mine"
        printed(*words, "--force")
        assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    def test_places_that_cannot_be_written(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        page = build_report([load_run(pair[0])], SLOS).html
        with pytest.raises(InputError, match="is a folder; name a file"):
            write_text(page, tmp_path)
        with pytest.raises(InputError, match="cannot be written"):
            write_text(page, tmp_path / "no" / "such" / "r.html")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(InputError, match=r"r\.html: cannot be written \(Not a directory\)"):
            write_text(page, tmp_path / "file" / "r.html")

    def test_a_link_a_pipe_and_standard_output_are_written_to(
        self, pair: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """A pipe stands for a device: none of them is replaced by a file."""
        kept, link, pipe = tmp_path / "kept.html", tmp_path / "link.html", tmp_path / "pipe"
        kept.write_text("old")
        link.symlink_to(kept)
        os.mkfifo(pipe)
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")), daemon=True)
        reader.start()
        for out in (link, pipe):
            printed("report", pair[0], "-o", out, "--force")
        reader.join(10)
        assert link.is_symlink()
        assert pipe.is_fifo()
        assert read == [kept.read_text("utf-8")]
        assert read[0].startswith("<!DOCTYPE html>")
        words = ("report", pair[0], "-o", "-")
        assert printed(*words) == read[0]
        assert "give -o FILE" in refusal(*words, "--json")
        assert {path.name for path in tmp_path.iterdir()} == {"kept.html", "link.html", "pipe"}

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["{new}/no-run", "-o", "{new}/r.html"], "no-run: not there; give a run folder"),
            (["-o", "{new}/r.html"], "Missing argument"),
            (["{new}/no-run"], "no-run: not there"),  # without -o: report.html
            (
                ["{run}", "-o", "{new}/r.html", "--title", "t\udcff"],
                "--title t\ufffd: is not UTF-8",
            ),
            (["{run}", "-o", "{new}/r\udcff.html", "--json"], "r\ufffd.html: is not UTF-8"),
            (["{new}/run\udcff", "-o", "{new}/r.html"], "run\ufffd: its name is not UTF-8"),
        ],
    )
    def test_bad_input_writes_nothing(
        self,
        pair: tuple[Path, Path],
        tmp_path: Path,
        words: list[str],
        told: str,
    ) -> None:
        given = [word.format(run=pair[0], new=tmp_path) for word in words]
        err = refusal("report", *given)
        assert told in err
        assert list(tmp_path.iterdir()) == []
