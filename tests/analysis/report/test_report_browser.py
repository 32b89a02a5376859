"""The HTML pages in a real browser: they draw, their scripts run, the console stays empty."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from fakes.made_runs import write_pair
from ports import free_ports
from stages.proxy_stage import RawBackend, stage

from forebay.analysis.report.report import build_report
from forebay.analysis.runs.load import load_runs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt install chromium")


async def opened(url: str, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after five seconds, and its console messages."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        dom, log = await asyncio.wait_for(process.communicate(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    console = [line for line in log.decode().splitlines() if "CONSOLE" in line]
    return dom.decode(), console


@pytest.mark.real_time
async def test_the_live_page_shows_each_backend(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"

    async with (
        RawBackend().running() as backend,
        stage(
            [backend.url],
            backends=[{"name": "gpu0", "url": backend.url}, {"name": "gpu1", "url": dead}],
            mode="observe",
        ) as on,
    ):
        async with on.post() as answer:
            assert answer.status == 200
        await on.proxy.watch.look()
        page, console = await opened(on.proxy.admin_url + "/", tmp_path / "profile")
    assert console == []
    text = re.sub(r' (?:data-label|title)="[^"]*"', "", page)
    assert '<td class="up">gpu0</td><td>0 / 640</td>' in text
    assert '<td class="down">gpu1, down</td>' in text
    remedy = "start it, and check that the proxy reaches its URL"
    assert re.search(
        rf"<li>gpu1 has been down for \d+ s: no connection. Remedy: {remedy}</li>", text
    )
    assert "<li>the proxy only observes: it queues and rejects nothing</li>" in text
    assert "ready · 0 active" in text
    assert re.search(r"<td>chat</td><td>[\d.]+</td>(<td>[^<]*</td>){2}<td>", text)


def test_the_reports_own_script_is_let_through_and_no_other(tmp_path: Path) -> None:
    html = build_report(load_runs(write_pair(tmp_path))).html
    path = tmp_path / "report.html"
    path.write_text(html.replace("</main>", "<script>document.title = 'mine'</script></main>"))
    page, console = asyncio.run(opened(path.as_uri(), tmp_path / "profile"))
    assert "Hover over the plot for values." in page
    assert "<title>mine" not in page
    [refused] = console
    assert "Content Security Policy" in refused
