"""The servers' /metrics in the run folder, on the time axis of the requests."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from aiohttp import web
from rich.console import Console
from stages.replay_server import Server, answer, rows, run_one, serve

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.results.printed_table import summary_table
from forebay.replay.results.server_metrics import ENERGIES, GAUGES, MetricsTable, metrics_urls
from forebay.replay.runner import replay
from forebay.traces.ground.errors import InputError

URL = "http://a/metrics"


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


class Pages:
    """A server whose page counts its readers. `broken` pages answer 500. `more` is added."""

    def __init__(self, broken: tuple[int, ...] = (), more: str = "") -> None:
        self.broken = broken
        self.more = more
        self.asked_s: list[float] = []
        self.headers: list[str | None] = []

    async def page(self, request: web.Request) -> web.Response:
        self.asked_s.append(asyncio.get_running_loop().time())
        self.headers.append(request.headers.get("authorization"))
        number = len(self.asked_s)
        text = f'# TYPE reads counter\nreads_total{{who="a b",at="x"}} {number}\nsize NaN\n'
        text += self.more
        return web.Response(status=500 if number in self.broken else 200, text=text)


def a_run(out: Path, pages: Pages, seconds: int = 3, **options: Any) -> dict[str, Any]:
    """A replay of some virtual seconds against a target, beside which `pages` are sampled."""

    async def main() -> dict[str, Any]:
        app = web.Application()
        app.router.add_get("/metrics", pages.page)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with serve(Server(answer)) as server:
                trace = rows(seconds + 1, gap_s=1.0)
                urls = metrics_urls([f"http://{host}:{port}"])
                asked = ReplayOptions(trace, [server.url], out, quiet=True, metrics=urls, **options)
                return (await replay(asked)).values
        finally:
            await runner.cleanup()

    return run(main())


def test_pages_are_sampled_each_second_of_the_run_and_once_more_at_its_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pages = Pages(broken=(3,))
    a_run(out, pages, api_key="sk-1")
    table = read(out / "metrics.parquet")
    reads = [row for row in table if row["name"] == "reads_total"]
    assert [row["value"] for row in reads] == [2, 4, 5, 6]  # one before the run; one broken
    assert json.loads(reads[0]["labels"]) == {"at": "x", "who": "a b"}
    up = [(row["s"], row["value"]) for row in table if row["name"] == "up"]
    assert [value for _, value in up] == [1, 0, 1, 1, 1]
    assert [s for s, _ in up[:4]] == pytest.approx([0, 1, 2, 3], abs=0.1)
    requests = read(out / "requests.parquet")
    assert up[-1][0] >= max(row["done_s"] for row in requests)
    assert {row["source"] for row in table} == set(
        json.loads((out / "run.json").read_bytes())["metrics"]
    )
    assert pages.headers == [None] * len(pages.headers)  # the key is the target's alone


def test_the_next_run_in_the_folder_has_no_metrics_of_this_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    a_run(out, Pages(), 1)
    assert (out / "metrics.parquet").exists()
    run_one(out, rows(2), force=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "latency.hlog", "requests.parquet", "run.json", "summary.json",
    ]  # fmt: skip


def test_a_page_that_cannot_be_read_at_first_stops_the_run_before_it_sends(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--metrics http://.*: cannot be read \(answered 500\)"):
        a_run(tmp_path / "run", Pages(broken=(1,)))
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_run_knows_the_energy_of_its_answers(tmp_path: Path) -> None:
    """The samples were only in metrics.parquet, and nothing read them."""
    page = "".join(
        f'{series}{{gpu="{gpu}",UUID="{uuid}",pod="{pod}"}} {value}\n'
        for gpu, (uuid, pod) in enumerate((("a", "x"), ("a", "y"), ("b", "x")))
        for series, value in (("DCGM_FI_DEV_POWER_USAGE", 500), ("DCGM_FI_DEV_GPU_UTIL", 80))
    )
    found = a_run(tmp_path / "run", Pages(broken=(3,), more=page), 20)
    assert found["power_w"] == pytest.approx(1_000)  # a GPU with two pods counts once
    assert found["gpu_use"] == pytest.approx(0.8)
    assert found["kv_use"] is None
    energy_j = 1_000 * found["duration_s"]
    assert found["energy_j_per_request"] == pytest.approx(energy_j / 21)
    tokens = found["total_tokens_per_s"] * found["duration_s"]
    assert found["energy_j_per_million_tokens"] == pytest.approx(energy_j / tokens * 1e6)
    text = io.StringIO()
    Console(file=text, width=120).print(summary_table(found))
    energy = f"{found['energy_j_per_request']:,.0f} J a request"
    assert f"GPU use 80%   GPU power 1,000 W   energy {energy}" in text.getvalue()
    # Without samples nothing is known, and nothing is 0.
    without, _ = run_one(tmp_path / "without", rows(2))
    assert {without.values[name] for name in (*GAUGES, *ENERGIES)} == {None}


def test_means_of_gauges_are_areas_between_their_samples(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "m.parquet", tmp_path / "m.arrow")
    for at_s, watts in ((0.5, 100.0), (10.0, 100.0), (11.0, 300.0), (14.0, 300.0)):
        page = f"DCGM_FI_DEV_POWER_USAGE {watts}\nDCGM_FI_DEV_GPU_UTIL 9223372036854775794\n"
        table.add(at_s, URL, f"{page}vllm:kv_cache_usage_perc NaN\n")
    means = table.gauges.means("power_w", [0.0, 10.0, 12.0, 14.0])
    assert means.tolist() == pytest.approx([100.0, 250.0, 300.0])
    assert table.gauges.means("kv_use", [0.0, 14.0]) is None
    assert table.gauges.means("gpu_use", [0.0, 14.0]) is None
    # A device without samples for a long time makes the mean unknown.
    assert table.gauges.means("power_w", [0.0, 23.0]).tolist() == pytest.approx([4_800 / 23])
    assert table.gauges.means("power_w", [0.0, 25.0]) is None
    assert table.gauges.latest(14.0) == {"power_w": 300.0}
    assert table.gauges.latest(14.5) == {}
    table.abandon()


async def test_the_simulated_engines_page_says_what_the_requests_say(tmp_path: Path) -> None:
    out = tmp_path / "run"

    async with start_engine(EngineConfig("phi-3-mini", "h200-nvl")) as engine:
        urls = metrics_urls([engine.url])
        options = ReplayOptions(rows(9), [engine.url], out, quiet=True, metrics=urls)
        summary = (await replay(options)).values
    assert summary["kv_use"] == 0.0  # it is read before and after these few requests
    table = [row for row in read(out / "metrics.parquet") if row["name"].startswith("vllm:")]
    last_s = max(row["s"] for row in table)
    last = {row["name"]: row["value"] for row in table if row["s"] == last_s}
    requests = read(out / "requests.parquet")
    assert last["vllm:generation_tokens_total"] == sum(row["output_tokens"] for row in requests)
    assert last["vllm:prompt_tokens_total"] == sum(row["prompt_tokens"] for row in requests)


def test_time_stamps_and_strange_lines_of_pages(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "m.parquet", tmp_path / "m.arrow")
    for at in (1, 2):
        table.add(float(at), URL, f'dcgm{{gpu="0"}} {at * 10} 17000000{at}000\nplain {at}\n')
    assert len(table._series) == 3  # a time stamp makes no new series
    with pytest.raises(ValueError, match="invalid metric name"):
        table.add(3.0, URL, "good 1\n<html><body>not metrics at all</body>")
    for line in (".'{,\t='.e 1},,", "word"):  # the parser itself has an IndexError for the first
        with pytest.raises(ValueError, match=r"is no sample|could not convert|invalid"):
            table.add(3.0, URL, line)
    table.add(4.0, URL, None)
    table.close()
    table.close()
    assert not (tmp_path / "m.arrow").exists()
    found = [(row["s"], row["name"], row["value"]) for row in read(tmp_path / "m.parquet")]
    assert found == [
        (1.0, "dcgm", 10.0), (1.0, "plain", 1.0), (1.0, "up", 1.0),
        (2.0, "dcgm", 20.0), (2.0, "plain", 2.0), (2.0, "up", 1.0),
        (4.0, "up", 0.0),
    ]  # fmt: skip


def test_a_killed_run_has_the_samples_up_to_its_last_ten_seconds(tmp_path: Path) -> None:
    """The file had no footer, so nothing of it could be read."""
    table = MetricsTable(tmp_path / "m.parquet", tmp_path / "m.arrow")
    for second in range(25):
        table.add(float(second), URL, f"plain {second}\nlater {second}\n" if second > 12 else "")
    with pyarrow.memory_map(str(tmp_path / "m.arrow")) as stream:
        samples = pyarrow.ipc.open_stream(stream).read_all().to_pylist()
    assert max(row["s"] for row in samples) == 21.0
    assert {row["name"] for row in samples} == {"up", "plain", "later"}
    assert all(row["value"] == row["s"] for row in samples if row["name"] != "up")
    table.abandon()


def test_large_pages_are_written_in_groups(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "m.parquet", tmp_path / "m.arrow")
    page = "".join(f'many{{at="{at}"}} {at}\n' for at in range(1_500))
    for second in range(4):
        table.add(float(second), URL, page)
    table.close()
    assert pyarrow.parquet.ParquetFile(tmp_path / "m.parquet").num_row_groups == 2
    found = read(tmp_path / "m.parquet")
    assert len(found) == 4 * 1_501
    assert all(
        row["value"] == int(json.loads(row["labels"])["at"]) for row in found if row["name"] != "up"
    )


@pytest.mark.parametrize("text", ["host:8000", "ftp://host/metrics", "http://", "http://h:x/"])
def test_other_words_are_no_urls(text: str) -> None:
    with pytest.raises(InputError, match=r"--metrics: .* is not a URL; write"):
        metrics_urls([text])


def test_the_default_path_is_metrics() -> None:
    given = ["http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/gpu/metrics"]
    assert metrics_urls(given) == ("http://h:1/metrics", "http://h:1/gpu/metrics")
