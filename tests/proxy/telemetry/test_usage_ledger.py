"""The usage ledger: a line for each request that was served, whatever the disk does."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from said import Said
from stages.proxy_stage import Call, RawBackend, Stage, answer, by_request, on_stage, settle, silent

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.core.model import Request
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.telemetry.logs import usage_ledger
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.errors import InputError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(number: int, **fields: Any) -> RequestRecord:
    made = RequestRecord(f"r{number}", 100.0, backend="b0", sent_at=100.5, written=True, **fields)
    made.request = Request(f"r{number}", 600, 30)
    return made


def eventually(true: Callable[[], bool]) -> None:
    """In real time: a thread writes."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@asynccontextmanager
async def on_a_proxy(
    tmp_path: Path, serve: Any = None
) -> AsyncIterator[tuple[Stage, list[RawBackend], list[dict[str, Any]]]]:
    """A proxy with a ledger, its backends, and the lines of the ledger once it has stopped."""
    path, found = tmp_path / "usage.jsonl", list[dict[str, Any]]()
    async with on_stage(serve, usage={"path": str(path)}) as (on, backends):
        yield on, backends, found
    found += lines(path)


class TestLines:
    async def test_a_line_names_model_status_and_tokens(self, tmp_path: Path) -> None:
        async with (
            on_a_proxy(tmp_path) as (on, _, found),
            on.post({"model": "tiny", "prompt": "hello", "max_tokens": 3}) as response,
        ):
            await response.read()
        (line,) = found
        assert line["model"] == "tiny"
        assert (line["status"], line["counted"], line["backend"]) == (200, True, "b0")
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 0, 1)
        assert line["duration_ms"] >= 0
        assert line["time"].endswith("+00:00")

    async def test_every_request_that_an_engine_serves_has_a_line_with_its_path(
        self, tmp_path: Path
    ) -> None:
        async def serve(call: Call) -> None:
            counts = b"/v1/embeddings" in call.head.encode()
            usage = b'"usage": {"prompt_tokens": 5, "total_tokens": 5}' if counts else b'"a": 1'
            await call.send(answer(200, b"{%s}" % usage))

        form = {"content-type": "multipart/form-data; boundary=b"}
        audio = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
        none = ["/tokenize", "/v1/messages/count_tokens"]
        asked = [*DIALECTS, "/v1/embeddings", "/rerank", "/v1/audio/transcriptions", *none]

        async with on_a_proxy(tmp_path, serve) as (on, _, found):
            for path in asked:
                body: Any = {"model": "tiny", "input": "x" * 400}
                if path in ("/v1/chat/completions", "/v1/messages"):
                    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
                elif path == "/v1/completions":
                    body = {"model": "tiny", "prompt": "x"}
                headers = {}
                if "audio" in path:
                    body, headers = audio, form
                assert await on.status(body, path=path, headers=headers) == 200, path
            assert await on.status_of(on.url + "/v1/models") == 200
        assert [line["operation"] for line in found] == asked[: -len(none)]
        embeddings, rerank, transcription = found[4:]
        assert (embeddings["counted"], embeddings["prompt_tokens"]) == (True, 5)
        assert embeddings["backend"] == "b0"
        assert (rerank["counted"], rerank["model"]) == (False, "tiny")
        assert 80 < rerank["prompt_tokens"] < 160
        assert transcription["prompt_tokens"] == 0

    async def test_a_stream_is_counted_though_its_client_does_not_ask(self, tmp_path: Path) -> None:
        """The usage is asked for, and not sent on."""
        async with on_a_proxy(tmp_path) as (on, backends, found):
            assert b"usage" not in await on.read({"prompt": "hello", "stream": True})
            assert json.loads(backends[0].calls[0].body)["stream_options"] == {
                "include_usage": True
            }
        (line,) = found
        assert line["counted"]
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 4, 3)

    async def test_a_client_that_left_is_charged_by_the_estimate(self, tmp_path: Path) -> None:
        async with on_a_proxy(tmp_path, silent) as (on, _, found):

            async def ask() -> None:
                async with on.post({"prompt": "hello " * 1000, "stream": True}):
                    pass

            task = asyncio.create_task(ask())
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await settle()
        (line,) = found
        assert (line["status"], line["counted"]) == (499, False)
        assert 1000 <= line["prompt_tokens"] <= 2000
        assert line["cached_tokens"] is line["output_tokens"] is line["ttft_ms"] is None

    async def test_a_client_that_left_before_a_server_got_anything_has_no_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def never(self: Origin) -> Any:
            await asyncio.sleep(3600)

        async with on_a_proxy(tmp_path, silent) as (on, backends, found):
            monkeypatch.setattr(Origin, "_take_idle", lambda self: None)
            monkeypatch.setattr(Origin, "_connect", never)

            async def ask() -> None:
                async with on.post({"prompt": "hello " * 1000, "stream": True}):
                    pass

            task = asyncio.create_task(ask())
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await settle()
            assert not backends[0].calls
        assert found == []

    async def test_a_request_that_no_backend_served_has_no_line(self, tmp_path: Path) -> None:
        async with on_a_proxy(tmp_path, by_request) as (on, _, found):
            assert await on.status(b"{") == 400
            assert await on.status_of(on.url + "/version") == 200
            link = on.proxy.backends.links["b0"]
            link.origin.close()
            link.origin = Origin("http://127.0.0.1:9", 1.0)
            assert await on.status({"input": "x"}, path="/v1/embeddings") == 503
            assert await on.status() == 503
        assert found == []

    async def test_without_it_bodies_pass_byte_for_byte(self) -> None:
        async with on_stage(None) as (on, backends):
            body = b'{"prompt": "hello", "stream": true, "priority": 1}'
            await on.read(body)
            assert backends[0].calls[0].body == body


class TestDisk:
    def test_a_file_that_is_moved_away_is_opened_anew(self, tmp_path: Path) -> None:
        path, old = tmp_path / "usage.jsonl", tmp_path / "usage.1.jsonl"
        with UsageLedger(path, Said()) as ledger:
            ledger.finished(record(1), 200, 101.0)
            eventually(lambda: path.stat().st_size > 0)
            path.rename(old)
            ledger.finished(record(2), 200, 102.0)
            eventually(path.exists)
        assert [line["request_id"] for line in lines(old)] == ["r1"]
        assert [line["request_id"] for line in lines(path)] == ["r2"]

    def test_a_start_adds_to_what_is_there(self, tmp_path: Path) -> None:
        path = tmp_path / "usage.jsonl"
        for number in range(3):
            with UsageLedger(path, Said()) as ledger:
                ledger.finished(record(number), 200, 101.0)
        assert [line["request_id"] for line in lines(path)] == ["r0", "r1", "r2"]

    def test_a_start_behind_half_a_line_says_so(self, tmp_path: Path) -> None:
        """A process was killed while it wrote. The next line is whole."""
        path, said = tmp_path / "usage.jsonl", Said()
        path.write_bytes(b'{"request_id":"a"}\n{"request_id":"b","ten')
        with UsageLedger(path, said) as ledger:
            ledger.finished(record(1), 200, 101.0)
        assert [line for line in said if "half a line" in line] == said[:1]
        whole, half, new = path.read_bytes().splitlines()
        assert (whole, half) == (b'{"request_id":"a"}', b'{"request_id":"b","ten')
        assert json.loads(new)["request_id"] == "r1"
        with UsageLedger(path, said := Said()):
            assert said == []

    async def test_no_file_can_be_read_by_all(self, tmp_path: Path) -> None:
        """Captures and histograms tell who asks for what, as the ledger does."""
        names = ("usage.jsonl", "metrics.hlog", "capture.jsonl")
        usage, hlog, capture = (tmp_path / name for name in names)
        before = os.umask(0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FOREBAY_CAPTURE_SALT", "s" * 32)
                async with on_stage(
                    None,
                    usage={"path": str(usage)},
                    metrics={"hlog": str(hlog)},
                    capture={"path": str(capture)},
                ) as (on, _):
                    assert await on.status() == 200
        finally:
            os.umask(before)
        modes = [path.stat().st_mode & 0o777 for path in (usage, hlog, capture)]
        assert modes == [0o640] * 3

    @pytest.mark.parametrize("moved", [False, True])
    def test_a_full_disk_loses_nothing_once_it_has_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
    ) -> None:
        """Not even the line of which it took half, even if the file is moved away then."""
        path, said = tmp_path / "usage.jsonl", Said()
        room = [25]
        write = os.write

        def limited(file: int, data: bytes) -> int:
            if not room[0]:
                raise OSError(28, "No space left on device")
            taken = write(file, data[: room[0]])
            room[0] -= taken
            return taken

        monkeypatch.setattr(usage_ledger, "RETRY_S", 0.01)
        monkeypatch.setattr(os, "write", limited)
        with UsageLedger(path, said) as ledger:
            for number in range(50):
                ledger.finished(record(number), 200, 101.0)
            eventually(lambda: len(said) > 0)
            time.sleep(0.1)
            assert ledger.status()["stopped"] == "No space left on device"
            if moved:
                path.rename(tmp_path / "old")
            room[0] = 10**9
        if not moved:
            half, _, rest = path.read_text().partition("\n")
            assert len(half) == 25
            path.write_text(rest)
        assert [line["request_id"] for line in lines(path)] == [f"r{n}" for n in range(50)]
        assert (ledger.status()["written"], ledger.status()["stopped"]) == (50, None)
        assert len(said) == 1
        assert "No space left on device" in said[0]

    def test_a_disk_that_never_has_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory is bounded, requests go on, the end comes, and the log tells what is lost."""

        def full(file: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        said = Said()
        monkeypatch.setattr(usage_ledger, "MOST_WAITING", 10)
        monkeypatch.setattr(os, "write", full)
        with UsageLedger(tmp_path / "usage.jsonl", said) as ledger:
            for number in range(1_100):
                ledger.finished(record(number), 200, 101.0)
            assert ledger.dropped > 0
        assert any("lines are dropped" in line for line in said)
        assert any("lacks lines" in line for line in said)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"usage\.path: cannot write .*No such file"):
            UsageLedger(tmp_path / "none" / "usage.jsonl", Said())
