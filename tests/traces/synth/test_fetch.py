"""Published traces arrive whole or not at all; without a network there is one clear line."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
from commands import printed, refusal, remarks

from forebay.traces.ground.errors import InputError
from forebay.traces.synth.fetch import PUBLISHED, Published, fetch

DATA = b'{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}\n'


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("content-length", str(len(DATA) + self.path.startswith("/short")))
        self.end_headers()
        self.wfile.write(DATA)
        if self.path == "/short-and-slow":
            sleep(1)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def mirror() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_trace_is_fetched_and_reads(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    same = replace(
        PUBLISHED["mooncake-synthetic"], sha256=hashlib.sha256(DATA).hexdigest(), bytes=len(DATA)
    )
    monkeypatch.setitem(PUBLISHED, "mooncake-synthetic", same)
    words = ("traces", "fetch", "mooncake-synthetic", "--url", f"{mirror}/x")
    said = remarks(*words)
    assert "licence Apache-2.0 -> synthetic_trace.jsonl" in said
    printed(*said.partition("next:  forebay ")[2].split())
    assert (tmp_path / "trace.jsonl").is_file()
    assert "already exists" in refusal(*words)


@pytest.mark.parametrize(
    ("path", "sha256", "size", "words"),
    [
        ("/none", None, None, "Not Found"),
        ("/short", None, None, "ended after"),
        ("/x", "0" * 64, None, f"its SHA-256 is {hashlib.sha256(DATA).hexdigest()}"),
        ("/x", None, len(DATA) + 1, f"is {len(DATA)} bytes long, not {len(DATA) + 1}"),
    ],
)
def test_what_is_not_whole_is_not_kept(
    mirror: str, tmp_path: Path, path: str, sha256: str | None, size: int | None, words: str
) -> None:
    target = tmp_path / "T"
    with pytest.raises(InputError, match=words):
        fetch(Published(mirror + path, "none", "", sha256, size), str(target))
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_stalls_is_no_fault_of_the_disk(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.traces.synth.fetch.TIMEOUT_S", 0.3)
    with pytest.raises(InputError, match=r"slow: cannot be fetched \(timed out\); download it"):
        fetch(Published(f"{mirror}/short-and-slow", "none", ""), str(tmp_path / "T"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "no-url", "http://127.0.0.1:x/"])
def test_no_network_is_one_line(url: str, tmp_path: Path) -> None:
    target = str(tmp_path / "T")
    said = refusal("traces", "fetch", "azure-code", "-o", target, "--url", url)
    assert url in said


def test_the_list_and_a_name_that_is_not_on_it() -> None:
    assert printed("traces", "fetch").count("\n") == len(PUBLISHED)
    assert "mooncake-synthetic" in refusal("traces", "fetch", "moncake")


def test_most_files_have_a_hash_and_a_size() -> None:
    """The rest is known by its address only: archives made on demand, and what nobody published."""
    hashed = [one for one in PUBLISHED.values() if one.sha256 is not None]
    assert len(hashed) >= 18
    assert all(re.fullmatch("[0-9a-f]{64}", one.sha256 or "") for one in hashed)
    assert len({one.sha256 for one in hashed}) == len(hashed)
    for name, one in PUBLISHED.items():
        if not name.startswith("zeroscrolls"):
            assert re.search("[0-9a-f]{40}|/releases/download/", one.url), name
