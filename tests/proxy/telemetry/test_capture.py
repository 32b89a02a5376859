"""Traffic through the proxy becomes a trace that replays and holds no text of prompts."""

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import Said
from stages.proxy_stage import RawBackend, by_request, settle, silent, stage

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.core.model import Request
from forebay.proxy.telemetry.logs.capture import MOST_PENDING, SALT, Capture, Rows, capturing
from forebay.proxy.telemetry.record import RequestRecord
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import parse_row, read_trace

SECRET = "a secret of the tests"
LATER = 1e6  # after all requests
BUCKETS = [{"name": "all", "up_to": 9000, "max_queue": 0}]


def rows(salt: str = SECRET) -> Rows:
    return Rows(salt.encode(), block_bytes=2048, bytes_per_token=4.0)


def record(number: int, **fields: Any) -> RequestRecord:
    made = RequestRecord(f"r{number}", 100.0 + number, **fields)
    made.request = made.request or Request(f"r{number}", 600, 30, (7,))
    return made


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.integers(0, 8))
def test_rows_come_in_order_of_arrival_however_requests_end(
    ends: list[int], unreadable: set[int], until: int
) -> None:
    made, to_rows = [record(n) for n in range(8)], rows()
    for one in made:
        to_rows.started(one)
    for n in unreadable:
        made[n].request = None
    got: list[TraceRequest] = []
    for n in ends[:until]:
        new = to_rows.finished(made[n], 200, LATER)
        assert new == [] or n == min(set(range(8)) - set(ends[: ends.index(n)]))
        got += map(to_rows.row, new)
    got += map(to_rows.row, to_rows.rest())
    left = [n for n in range(8) if n not in unreadable]
    assert [row.arrival_s for row in got] == [n - left[0] for n in left]
    assert to_rows.rest() == []


def test_a_row_has_counts_blocks_tenant_class_and_times() -> None:
    def row(salt: str = SECRET, **fields: Any) -> TraceRequest:
        to_rows, one = rows(salt), record(3, **fields)
        to_rows.started(one)
        [due] = to_rows.finished(one, 200, LATER)
        return to_rows.row(due)

    times: dict[str, Any] = {"sent_at": 103.5, "first_token_at": 104.0, "backend": "gpu0"}
    seen = {"sent_s": 0.5, "ttft_s": 1.0, "e2e_s": LATER - 103.0, "backend": "gpu0"}
    uncounted = row(**times)
    assert (uncounted.status, uncounted.observed) == (200, seen)
    answered = row(**times, prompt_tokens=600, cached_tokens=128)
    assert answered.observed == {**seen, "cached_tokens": 128}
    estimated = row()
    assert (estimated.arrival_s, estimated.input_tokens, estimated.output_tokens) == (0.0, 600, 30)
    assert estimated.blocks is not None
    assert len(estimated.blocks) == 2
    assert 7 not in estimated.blocks
    counted = row(prompt_tokens=1500, cached_tokens=512, output_tokens=12)
    assert (counted.input_tokens, counted.output_tokens) == (1500, 12)
    assert counted.blocks is not None
    assert counted.blocks[0] == estimated.blocks[0]
    assert len(set(counted.blocks)) == 3
    assert len(row(prompt_tokens=100).blocks or ()) == 1
    assert row("another secret of tests").blocks != estimated.blocks
    tenants = [row(tenant=name).tenant for name in ("acme", "acme", "bolt", "")]
    assert tenants[0] == tenants[1] != tenants[2]
    assert tenants[3] is None
    assert "acme" not in str(tenants[0])
    urgent = row(request=Request("x", 600, 30, (7,), service_class="interactive"))
    assert urgent.service_class == "interactive"


def captured(path: Path) -> list[TraceRequest]:
    return list(read_trace(path))


async def test_traffic_through_the_proxy_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SALT, SECRET)
    path = tmp_path / "traffic.jsonl"
    document = "the annual report of the company. " * 400

    async with RawBackend(by_request).running() as backend:
        keys: Any = {"capture": {"path": str(path)}, "buckets": BUCKETS}
        async with stage([backend.url], slots=1, **keys) as on:
            for question in ("What is the profit?", "And the loss?"):
                body = {"prompt": document + question, "max_tokens": 9, "stream": True}
                await on.read(body)
                await asyncio.sleep(1)
            assert await on.status(b"{") == 400
            backend.serve = silent
            leaving = asyncio.create_task(_status(on.post()))
            await settle()
            assert await on.status({"prompt": "refused", "max_tokens": 5}) == 429
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await settle()
            said = (await on.told("/status"))["capture"]
            assert (said["dropped"], said["stopped"]) == (0, None)
    first, second, left, refused = captured(path)
    assert (first.status, left.status, refused.status) == (200, 499, 429)
    for row in (first, second):
        assert row.observed is not None
        assert row.observed["backend"] == "b0"
        assert 0.0 <= row.observed["sent_s"] <= row.observed["ttft_s"] <= row.observed["e2e_s"]
    assert refused.observed is not None
    assert refused.observed.keys() == {"e2e_s"}
    assert second.arrival_s - first.arrival_s >= 1
    assert first.blocks is not None
    assert second.blocks is not None
    assert (first.input_tokens, first.output_tokens) == (7, 3)  # as the backend counts
    assert first.blocks == second.blocks
    assert (left.output_tokens, refused.output_tokens) == (3, 5)
    assert b"profit" not in path.read_bytes()
    outcomes = simulate(captured(path), Scenario()).outcomes
    assert all(one.finished_s is not None for one in outcomes)


async def _status(request: Any) -> int:
    async with request as answer:
        return int(answer.status)


def test_no_start_loses_what_another_took(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    keys: Any = {"backends": [{"url": "http://h:1"}], "capture": {"path": str(path)}}
    config = load_config(None, keys, {})

    async def once(config: Config, environ: dict[str, str]) -> Path:
        async with capturing(config, environ, print) as capture:
            assert capture is not None
            one = record(1)
            capture.started(one)
            capture.finished(one, 200, LATER)
            return capture.path

    environ = {SALT: SECRET}
    paths = [asyncio.run(once(config, environ)) for _ in range(3)]
    assert [p.name for p in paths] == ["traffic.jsonl", "traffic.2.jsonl", "traffic.3.jsonl"]
    assert [len(captured(p)) for p in paths] == [1, 1, 1]
    for salt in ({}, {SALT: "short"}):
        with pytest.raises(InputError, match=f"capture.path: set {SALT} to a secret of 16"):
            asyncio.run(once(config, salt))
    keys["capture"]["path"] = str(tmp_path / "none" / "x.jsonl")
    with pytest.raises(InputError, match=r"capture.path: cannot write .*No such file"):
        asyncio.run(once(load_config(None, keys, {}), environ))


class Slow(io.BytesIO):
    """A disk that takes nothing until `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.taken: list[bytes] = []

    def write(self, data: Any) -> int:
        self.asked.set()
        assert self.goes_on.wait(30)
        self.taken.append(data)
        return len(data)


def test_rows_behind_a_long_request_are_hashed_off_the_loop_and_none_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most that one request can hold up, behind a row that waits for the disk already."""
    hashed_in: set[int] = set()
    hashed, said, file = Rows._hash, Said(), Slow()

    def recorded(self: Rows, data: bytes) -> int:
        hashed_in.add(threading.get_ident())
        return hashed(self, data)

    monkeypatch.setattr(Rows, "_hash", recorded)
    monkeypatch.setattr(
        "forebay.proxy.telemetry.logs.capture.CLOSE_S", 60.0
    )  # other tests keep the machine busy
    capture = Capture(rows(), Path("x.jsonl"), file, 1e9, said)
    writer = capture._thread.ident

    def ended(*records: RequestRecord) -> None:
        for one in records:
            capture.finished(one, 200, LATER)

    first, second, *others = [record(number) for number in range(MOST_PENDING + 2)]
    for one in (first, second, *others):
        capture.started(one)
    ended(first)
    assert file.asked.wait(30)
    ended(second)
    ended(*others[1:], others[0])
    file.goes_on.set()
    capture.close()
    assert hashed_in == {writer}
    assert (capture.written, capture.dropped, said) == (MOST_PENDING + 2, 0, [])
    ids = [parse_row(line).id for line in file.taken]
    assert ids == [f"captured-{number}" for number in range(1, MOST_PENDING + 3)]


def test_a_row_is_as_its_request_stood_when_it_came_due() -> None:
    """One that has not ended when it must be let go may still change: the row does not."""
    to_rows, one = rows(), record(1, output_tokens=5)
    to_rows.started(one)
    [due] = to_rows.rest()
    one.used(2_000, 0, 9)
    assert (to_rows.row(due).input_tokens, to_rows.row(due).output_tokens) == (600, 5)


class Full(io.BytesIO):
    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("file", "most_bytes", "why", "written"),
    [(Full(), 1e9, "No space left", 0), (io.BytesIO(), 250, "capture.max_size", 1)],
)
@pytest.mark.real_time
async def test_a_capture_that_cannot_go_on_says_so_and_the_proxy_does(
    file: io.BytesIO, most_bytes: float, why: str, written: int
) -> None:
    said = Said()

    capture = Capture(rows(), Path("x.jsonl"), file, most_bytes, said)
    for number in range(3):
        one = record(number)
        capture.started(one)
        capture.finished(one, 200, LATER)
    capture.close()
    capture = capture
    assert (capture.written, capture.written + capture.dropped) == (written, 3)
    [line] = said
    assert line.startswith("capture: x.jsonl stopped: ")
    assert why in line


class FullAtTheEnd(io.BytesIO):
    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("file", "output_tokens", "why"),
    [(FullAtTheEnd(), 7, "No space left"), (io.BytesIO(), 1 << 70, "internal error: ")],
)
def test_the_thread_of_a_capture_does_not_die_unheard(
    file: io.BytesIO, output_tokens: int, why: str
) -> None:
    said = Said()
    capture = Capture(rows(), Path("x.jsonl"), file, 1e9, said)
    one = record(1, output_tokens=output_tokens)
    capture.started(one)
    capture.finished(one, 200, LATER)
    capture.close()
    [line] = said
    assert line.startswith("capture: x.jsonl stopped: ")
    assert why in line
    assert capture.status()["stopped"]
