"""Draw the live page and `forebay top` for docs/how-to/monitor.md, and a report for README.

Fifteen minutes of chats pass in virtual time, in front of two simulated engines. Long documents
come for 90 seconds, and later one engine is stopped for a minute. Then a browser gets the answers
of the admin port as they are. It needs chromium on PATH, and takes about a minute.

    PYTHONPATH=.typing:tests/support python tests/bench/screenshots.py [--out docs/assets]

The report is that of `make demo` on an idle machine: `--report runs/demo/report.html`. The
committed pictures were reduced to 256 colours.
"""

import argparse
import asyncio
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
from proxy_stage import Stage, stage
from rich.console import Console

from forebay.proxy.diagnose.frame import TimedScene, earlier, frame_of
from forebay.proxy.diagnose.scene import Scene, samples_of
from forebay.proxy.diagnose.top_cli import rendered
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import RunningEngine, start_engine

THRESHOLD: dict[str, Any] = {"long_prefill_token_threshold": 2_048}
MINUTES = 16
DOCUMENTS_AT_S, DOCUMENTS = 300.0, 30
STOPPED_AT_S, STOPPED_S = 620.0, 60.0
ADMIN = "http://127.0.0.1:9090"
PATHS = ("/", "/status", "/history", "/metrics", "/metrics?ago=60")
WIDE, REPORT = (1280, 1230), (1000, 1280)
PHONE = (390, 1580)
# A browser without a screen has windows of 500 pixels at least, so a phone is a frame in one.
FRAME = (
    '<body style="margin:0"><iframe src="/" style="border:0" '
    f'width="{PHONE[0]}" height="{PHONE[1]}">'
)
FONT = "ui-monospace, Menlo, Consolas, monospace"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}">
<style>{styles} .{unique_id}-matrix {{ font-family: FONT; font-size: {char_height}px;
line-height: {line_height}px }}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#1e1e2e"/>
<g transform="translate(9, 9)" class="{unique_id}-matrix">{backgrounds}{matrix}</g></svg>
""".replace("FONT", FONT)


async def ask(on: Stage, words: int, name: str, tokens: int) -> None:
    body = {"prompt": f"{name} " + "word " * words, "max_tokens": tokens, "stream": True,
            "model": "llama-3-8b", "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    async with on.post(body) as response:
        await response.read()


async def traffic(on: Stage) -> set[asyncio.Task[None]]:
    """Send chats all the time, and long documents for 90 seconds. Return all requests."""
    tasks = set()
    start_s = asyncio.get_running_loop().time()
    for number in range(MINUTES * 60):
        for at in range(1 + number % 2):
            session = f"session {(7 * number + at) % 23}"
            tasks.add(asyncio.create_task(ask(on, 600 + number % 900, session, 40 + number % 60)))
        if 0 <= number - DOCUMENTS_AT_S < 3 * DOCUMENTS and number % 3 == 0:
            tasks.add(asyncio.create_task(ask(on, 60_000, f"document {number}", 20)))
        await asyncio.sleep(max(0.0, start_s + number + 1 - asyncio.get_running_loop().time()))
    return tasks


async def answers() -> dict[str, bytes]:
    """Return what the admin port answers after the traffic, by path."""

    async def engine(stack: AsyncExitStack, port: int = 0) -> RunningEngine:
        config = EngineConfig(seed=1, served_model_name="llama-3-8b", **THRESHOLD)
        return await stack.enter_async_context(start_engine(config, port=port))

    async with AsyncExitStack() as all_engines, AsyncExitStack() as second:
        urls = [(await engine(all_engines)).url, (await engine(second)).url]
        names = [{"name": f"gpu{at}", "url": url, **THRESHOLD} for at, url in enumerate(urls)]
        async with stage(urls, backends=names) as on:
            sending = asyncio.create_task(traffic(on))
            await asyncio.sleep(STOPPED_AT_S)
            await second.aclose()
            await asyncio.sleep(STOPPED_S)
            await engine(all_engines, int(urls[1].rpartition(":")[2]))
            requests = await sending
            found = {}
            for path in PATHS:
                async with on.client.get(on.proxy.admin_url + path) as response:
                    found[path] = await response.read()
            await asyncio.gather(*requests, return_exceptions=True)
            return found


def photograph(url: str, path: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("no chromium on PATH: apt install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=1500",
             "--hide-scrollbars", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
             f"--screenshot={path}", url],
            check=True, timeout=120.0, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def live_pages(found: dict[str, bytes], out: Path) -> None:
    class Admin(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = FRAME.encode() if self.path == "/phone" else found.get(self.path)
            page = self.path in ("/", "/phone")
            self.send_response(404 if body is None else 200)
            self.send_header("content-type", "text/html" if page else "text/plain")
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Admin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        for name in ("light", "dark"):
            photograph(url, out / f"live-{name}.png", WIDE, dark=name == "dark")
        photograph(url + "phone", out / "live-phone.png", PHONE)
    finally:
        server.shutdown()


def terminal(found: dict[str, bytes], out: Path) -> None:
    samples, ago = (samples_of(found[path].decode()) for path in PATHS[3:])
    minute = orjson.loads(found["/history"])["minute"]
    scene = TimedScene(time.monotonic(), Scene(orjson.loads(found["/status"]), [], samples), minute)
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True, highlight=False)
        console.print(rendered(frame_of(scene, earlier(scene, ago)), ADMIN))
        console.print()  # room for the descenders of the last line
    console.save_svg(str(out / "top.svg"), code_format=SVG, unique_id="top")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    parser.add_argument("--report", type=Path, help="only the pictures of this page")
    given = parser.parse_args()
    out = given.out
    if given.report is not None:
        for name in ("light", "dark"):
            url = given.report.resolve().as_uri()
            photograph(url, out / f"report-{name}.png", REPORT, dark=name == "dark")
        return
    found = run(answers())
    live_pages(found, out)
    terminal(found, out)


if __name__ == "__main__":
    main()
