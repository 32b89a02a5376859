"""The HTML pages in a real browser: they draw, their scripts run, the console stays empty."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from made_runs import write_pair
from proxy_stage import RawBackend, stage

from forebay.analysis.report import build_report
from forebay.analysis.run import load_runs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt install chromium")


async def opened(url: str, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after three seconds, and its console messages."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", url,
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


def test_the_live_page_shows_each_backend(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            RawBackend().running() as backend,
            stage([backend.url], backends=[{"name": "gpu0", "url": backend.url}]) as on,
        ):
            async with on.post() as answer:
                assert answer.status == 200
            page, console = await opened(on.proxy.admin_url + "/", tmp_path / "profile")
        assert console == []
        assert re.search(r'<td class="up">gpu0</td><td>0 / 512</td>', page)
        assert "ready · 0 active" in page
        assert "Waiting by bucket: 0 chat" in page

    asyncio.run(main())


def test_the_reports_own_script_is_let_through_and_no_other(tmp_path: Path) -> None:
    html = build_report(load_runs(write_pair(tmp_path))).html
    path = tmp_path / "report.html"
    path.write_text(html.replace("</main>", "<script>document.title = 'mine'</script></main>"))
    page, console = asyncio.run(opened(path.as_uri(), tmp_path / "profile"))
    assert "Hover over the plot for values." in page
    assert "<title>mine" not in page
    [refused] = console
    assert "Content Security Policy" in refused
