"""The replayer against a tiny server: real sockets, virtual time; schedules, records, files."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from stages.replay_server import Server, rows, run_one, serve, table, text

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.clock.virtual_loop import run
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.runner import replay
from forebay.replay.send.pacer import Pacer
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import read_hlog
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import prompt_text


def test_a_whole_run(tmp_path: Path) -> None:
    trace = rows(1200, session="s", tenant="t", document="d")
    summary, server = run_one(tmp_path / "run", trace)
    told = summary.values
    assert (told["requests"], told["completed"], told["rejected"], told["failed"]) == (
        *(1200, 1200),
        *({}, {}),
    )
    assert told["verdict"] == "valid"
    assert told["attainment"] == 1.0
    assert told["offered_rate_per_s"] == pytest.approx(100)
    assert told["goodput_per_s"] == pytest.approx(100)
    assert told["hit_ratio"] == pytest.approx(0.5)  # the server says 16 of 32
    assert told["prompt_tokens_per_backend"] == {server.url.removeprefix("http://"): 1200 * 32}
    assert told["ttft_ms"]["chat"]["p50"] == pytest.approx(10, rel=2e-3)
    assert told["ttft_ms"]["chat"]["p99"] == pytest.approx(10, rel=2e-3)
    assert told["ttft_ms"]["chat"]["p99.9"] == pytest.approx(10, rel=2e-3)
    assert told["tpot_ms"]["all"]["p50"] == pytest.approx(5, rel=2e-3)
    assert told["itl_ms"]["all"]["count"] == told["icl_ms"]["all"]["count"] == 3600
    assert told["e2e_ms"]["all"]["max"] == pytest.approx(25, rel=2e-3)
    assert told["schedule_lag_ms"]["max"] < 0.1
    assert told["ttft_ms"]["document"] == {
        **dict.fromkeys(("p50", "p90", "p95", "p99", "p99.9", "max")),
        "count": 0,
    }


def test_the_files_of_a_run(tmp_path: Path) -> None:
    trace = rows(250, session="s", tenant="t", document="d")
    summary, server = run_one(tmp_path / "run", trace, seed=3, salt="x")
    assert summary.folder == tmp_path / "run"
    assert sorted(path.name for path in summary.folder.iterdir()) == [
        *("latency.hlog", "requests.parquet", "run.json", "summary.json"),
    ]
    assert orjson.loads((summary.folder / "summary.json").read_bytes()) == summary.values
    record = orjson.loads((summary.folder / "run.json").read_bytes())
    assert record["trace"]["rows"] == record["schedule"]["requests"] == 250
    assert (record["seed"], record["salt"], record["arrivals"]) == (3, "x", "trace")
    assert record["targets"][0]["url"] == server.url
    assert record["model"] == "tiny"
    assert record["max_model_len"] == 131_072
    assert record["definitions"]["ttft"]
    kept = table(summary.folder)
    assert [row["id"] for row in kept] == [request.id for request in trace]
    row = kept[7]
    assert row["intended_s"] == pytest.approx(0.07) == row["sent_s"]
    assert row["ttft_response_s"] == pytest.approx(0.010)
    assert row["e2e_service_s"] == pytest.approx(0.025)
    assert (row["bucket"], row["session"], row["tenant"], row["document"]) == ("chat", *"std")
    assert (row["outcome"], row["reason"], row["status"]) == ("ok", None, 200)
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (32, 16, 4)
    assert len({row["request_id"] for row in kept}) == 250
    assert {row["request_id"] for row in kept} == {
        headers["x-request-id"] for headers in server.headers
    }
    logs = read_hlog(summary.folder / "latency.hlog")
    assert {tag.partition(".")[0] for tag in logs} == {
        *("ttft_response", "ttft_service", "e2e_response", "e2e_service"),
        *("tpot", "itl", "icl", "stall", "sched_lag"),
    }
    starts = [interval.start_s for interval in logs["ttft_response.chat"]]
    assert starts == pytest.approx([0.0, 1.0, 2.0])  # a line a second
    assert sum(one.histogram.total_count for one in logs["ttft_response.chat"]) == 250


def test_requests_are_what_vllm_wants(tmp_path: Path) -> None:
    trace = [
        TraceRequest("r0", 0.0, 1030, 7, blocks=(1, 2, 3)),
        TraceRequest("r1", 0.1, 3, 1, text='say "hé"\n'),
        TraceRequest("r2", 0.2, 9000, 0),
    ]
    _, server = run_one(tmp_path / "run", trace, salt="s")
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts == [prompt_text(request, "s") for request in trace]
    assert [len(prompt) for prompt in (prompts[0], prompts[2])] == [4 * 1030, 4 * 9000]
    assert [body["max_tokens"] for body in server.bodies] == [7, 1, 1]
    first = {key: value for key, value in server.bodies[0].items() if key != "prompt"}
    assert first == {
        "path": "/v1/completions",
        "model": "tiny",
        "max_tokens": 7,
        "min_tokens": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.headers[0]["content-type"] == "application/json"


def test_chat_endpoint(tmp_path: Path) -> None:
    trace = rows(3, blocks=(1,))
    summary, server = run_one(tmp_path / "run", trace, endpoint="chat", api_key="k", salt="")
    assert summary.values["completed"] == 3
    assert server.bodies[0]["path"] == "/v1/chat/completions"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": prompt_text(trace[0], "")}]
    assert server.headers[0]["authorization"] == "Bearer k"


# ---- honest time


def test_a_frozen_server_shows(tmp_path: Path) -> None:
    """2 s freeze at 200 a second: what every closed-loop tool hides (coordinated omission)."""
    trace = rows(2000, gap_s=0.005, output_tokens=1)
    summary, server = run_one(tmp_path / "open", trace, Server(frozen=(4.0, 6.0)))
    told = summary.values
    assert told["ttft_ms"]["all"]["p50"] == pytest.approx(10, rel=0.01)
    assert told["ttft_ms"]["all"]["p90"] == pytest.approx(1010, rel=0.02)  # half of the 20 % frozen
    assert told["ttft_ms"]["all"]["p99"] == pytest.approx(1910, rel=0.02)
    assert told["schedule_lag_ms"]["max"] < 0.1  # and it was not we who were late
    assert told["verdict"] == "valid"
    assert server.arrived_s == pytest.approx([at * 0.005 for at in range(2000)], abs=1e-6)


def test_a_cap_shows_as_cap_wait_and_in_the_verdict(tmp_path: Path) -> None:
    """The same under a cap of 16: the service looks fast, the response time keeps the truth."""
    trace = rows(2000, gap_s=0.005, output_tokens=1)
    server = Server(frozen=(4.0, 6.0))
    summary, _ = run_one(tmp_path / "capped", trace, server, max_in_flight=16)
    told = summary.values
    assert told["completed"] == 2000  # late ones were sent late, none skipped
    assert told["ttft_service_ms"]["all"]["p90"] == pytest.approx(10, rel=0.02)
    assert told["ttft_ms"]["all"]["p99"] > 1800
    assert told["verdict"] == "cap-limited"
    assert 4.0 < told["verdict_at_s"] < 4.2
    kept = table(summary.folder)
    assert max(row["cap_wait_s"] for row in kept) > 1.8
    assert max(row["pacing_lag_s"] for row in kept) < 0.001
    for row in kept:
        lag_s = row["sent_s"] - row["intended_s"]
        assert row["pacing_lag_s"] + row["cap_wait_s"] == pytest.approx(lag_s, abs=1e-9)


def test_pacing_never_drifts_and_is_never_early() -> None:
    async def main() -> list[float]:
        clock = Clock()
        late = []
        async with Pacer(clock, SpareTime(clock)) as pacer:
            clock.restart()
            for number in range(200):
                await pacer.until(number / 2000)
                late.append(clock.now() - number / 2000)
        return late

    for late in (run(main()), asyncio.run(main())):  # virtual time, and the timer of this machine
        assert min(late) >= -1e-9
    assert max(run(main())) < 1e-6


def test_a_burst_is_sent_at_once(tmp_path: Path) -> None:
    summary, server = run_one(tmp_path / "run", rows(300, gap_s=0.0))
    assert summary.values["completed"] == 300
    assert server.arrived_s == pytest.approx([0.0] * 300, abs=1e-6)


async def test_several_targets_take_turns(tmp_path: Path) -> None:
    async with serve() as one, serve() as two:
        trace = rows(10)
        asked = ReplayOptions(trace, [one.url, two.url + "/v1/"], tmp_path / "run", quiet=True)
        summary, one, two = await replay(asked), one, two
    assert [headers["x-request-id"].split("-")[1] for headers in one.headers] == list("02468")
    assert [headers["x-request-id"].split("-")[1] for headers in two.headers] == list("13579")
    assert list(summary.values["prompt_tokens_per_backend"].values()) == [160, 160]


def test_closed_loop(tmp_path: Path) -> None:
    """Two at a time, 25 ms each: ten take 125 ms, and there is no schedule to be late for."""
    summary, _ = run_one(tmp_path / "run", rows(10), arrivals=Arrivals("closed", 2))
    assert summary.values["duration_s"] == pytest.approx(0.125)
    assert summary.values["offered_rate_per_s"] == pytest.approx(80)
    assert summary.values["verdict"] == "valid"
    short, _ = run_one(
        tmp_path / "short", rows(10), arrivals=Arrivals("closed", 2), duration_s=0.06
    )
    assert (short.values["requests"], short.values["failed"]) == (6, {})
    assert short.values["window_s"] == 0.06


@pytest.mark.parametrize("duration_s", [None, 3600.0, 0.11])  # the last two leave at 0.1
def test_a_duration_that_cuts_no_closed_loop_off_changes_nothing(
    tmp_path: Path, duration_s: float | None
) -> None:
    """Ten answers in 125 ms are 80 a second, whatever time was left to send more."""
    summary, _ = run_one(
        tmp_path / "run", rows(10), arrivals=Arrivals("closed", 2), duration_s=duration_s
    )
    told = summary.values
    assert (told["requests"], told["completed"]) == (10, 10)
    assert told["window_s"] == pytest.approx(0.125)
    assert told["offered_rate_per_s"] == pytest.approx(80)
    assert told["goodput_per_s"] == pytest.approx(80)
    assert told["goodput_by_bucket_per_s"]["chat"] == pytest.approx(80)


def test_time_scale(tmp_path: Path) -> None:
    """Ten simulated seconds a second: the wall runs a tenth, every reported time is simulated."""

    async def queued(server: Server, request: Any, body: dict[str, Any]) -> Any:
        from stages.replay_server import DONE, stream, usage

        response = await stream(request, **{"x-forebay-queue-ms": "3"})
        await asyncio.sleep(0.001)
        await response.write(text(" abc") + usage(8, 1) + DONE)
        return response

    summary, server = run_one(
        tmp_path / "run", rows(100, gap_s=1.0), Server(queued), time_scale=10.0
    )
    assert server.arrived_s[-1] == pytest.approx(9.9)
    kept = table(summary.folder)
    assert kept[99]["intended_s"] == kept[99]["sent_s"] == pytest.approx(99.0)
    assert kept[0]["ttft_response_s"] == pytest.approx(0.010)
    assert kept[0]["queue_ms"] == pytest.approx(30)
    assert summary.values["offered_rate_per_s"] == pytest.approx(1.0)
    assert summary.values["hit_ratio"] is None  # no server said what was cached
    assert orjson.loads((summary.folder / "run.json").read_bytes())["time_scale"] == 10.0


def test_warm_up_is_not_measured(tmp_path: Path) -> None:
    summary, server = run_one(tmp_path / "run", rows(3), warmup=2)
    assert len(server.bodies) == 5
    assert summary.values["requests"] == 3


# ---- stopping


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    summary, server = run_one(tmp_path / "run", rows(100, gap_s=0.1), stop_at_s=(5.05,))
    assert summary.interrupted
    told = summary.values
    assert (told["requests"], told["completed"], told["failed"]) == (100, 51, {"never_sent": 49})
    assert told["attainment"] == 1.0  # of the requests that were sent
    assert told["offered_rate_per_s"] == pytest.approx(10, rel=0.02)
    assert len(server.bodies) == 51
    last = table(summary.folder)[-1]
    assert (last["outcome"], last["reason"], last["sent_s"]) == ("failed", "never_sent", None)
    assert last["intended_s"] == pytest.approx(9.9)


def test_a_second_ctrl_c_gives_up_what_is_under_way(tmp_path: Path) -> None:
    server = Server(first_s=1000.0)
    summary, _ = run_one(tmp_path / "run", rows(10, gap_s=1.0), server, stop_at_s=(2.5, 3.5))
    assert summary.interrupted
    assert summary.values["failed"] == {"cancelled": 3, "never_sent": 7}
    assert summary.values["duration_s"] == pytest.approx(3.5)


def test_ctrl_c_while_waiting_for_the_limit(tmp_path: Path) -> None:
    server = Server(first_s=5.0)
    summary, _ = run_one(tmp_path / "run", rows(10), server, stop_at_s=(1.0,), max_in_flight=2)
    assert summary.values["failed"] == {"never_sent": 8}
    assert summary.values["completed"] == 2


def test_a_drain_is_bounded(tmp_path: Path) -> None:
    server = Server(first_s=1000.0)
    summary, _ = run_one(tmp_path / "run", rows(3), server, drain_timeout_s=20.0)
    assert summary.ended == "drain timeout"
    assert summary.values["failed"] == {"cancelled": 3}
    assert summary.values["duration_s"] == pytest.approx(20.02)


# ---- bad input: nothing is sent, nothing is overwritten


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate_per_s": 0.0}, "--rate"),
        ({"targets": ["ftp://x"]}, "--target: 'ftp://x'"),
        ({"targets": ["127.0.0.1:80"]}, "--target"),
        ({"targets": ["http://127.0.0.1:99999"]}, "--target"),
        ({"targets": ["http://127.0.0.1:9"]}, "cannot be reached"),
        ({"targets": []}, "--target"),
        ({"model": "gpt-9"}, "--model gpt-9: .* serves? it but tiny"),
        ({"endpoint": "embed"}, "--endpoint"),
        ({"time_scale": 0.0}, "--time-scale"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"too_long": "split"}, "--too-long"),
        ({"format_name": "csv"}, "--format"),
        ({"trace": Path("nothing.jsonl")}, "nothing.jsonl: no such file"),
        ({"trace": []}, "no requests"),
        (
            {"max_model_len": 35},
            r"row 1 \(id 'r0'\) needs 32 \+ 4 tokens.*context is 35.*--too-long",
        ),
    ],
)
async def test_bad_input(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    out = tmp_path / "run"

    async with serve() as server:
        asked = ReplayOptions(rows(3), [server.url], out, quiet=True)
        with pytest.raises(InputError, match=says) as error:
            await replay(replace(asked, **options))
        assert "\n" not in str(error.value)
        assert server.bodies == []
    assert not out.exists()


def test_a_folder_with_a_run_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    first, _ = run_one(tmp_path / "run", rows(3))
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    server = Server()
    with pytest.raises(InputError, match="already holds a run"):
        run_one(tmp_path / "run", rows(5), server)
    assert server.bodies == []
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before
    again, _ = run_one(tmp_path / "run", rows(5), force=True)
    assert again.values["requests"] == 5


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        run_one(tmp_path / "run", rows(3))
    assert (tmp_path / "run").read_text() == "mine"


def test_a_failing_run_leaves_the_old_one(tmp_path: Path) -> None:
    run_one(tmp_path / "run", rows(3))
    with pytest.raises(InputError, match="context"):
        run_one(tmp_path / "run", rows(3, input_tokens=200_000), force=True)
    with pytest.raises(asyncio.CancelledError):
        run_cancelled(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("latency.hlog", "requests.parquet", "run.json", "summary.json"),
    ]
    assert orjson.loads((tmp_path / "run" / "summary.json").read_bytes())["requests"] == 3


def run_cancelled(out: Path) -> None:
    async def main() -> None:
        async with serve() as server:
            asked = ReplayOptions(rows(50), [server.url], out, quiet=True, force=True)
            task = asyncio.create_task(replay(asked))
            await asyncio.sleep(0.2)
            task.cancel()
            await task

    run(main())


@pytest.mark.parametrize(
    ("too_long", "sent", "counted"), [("truncate", 3, "truncated"), ("drop", 2, "dropped")]
)
def test_rows_beyond_the_context(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    too_long: str,
    sent: int,
    counted: str,
) -> None:
    trace = [
        TraceRequest("r0", 0.0, 1030, 4, blocks=(1, 2, 3)),
        TraceRequest("r1", 0.1, 10, 4),
        TraceRequest("r2", 0.2, 20, 4, text="x" * 80),
    ]
    server = Server(max_model_len=1000)
    summary, _ = run_one(tmp_path / "run", trace, server, too_long=too_long, salt="")
    assert summary.values["requests"] == sent
    record = orjson.loads((summary.folder / "run.json").read_bytes())
    assert record["trace"][f"{counted}_too_long"] == 1
    assert "1 rows longer than the model's context" in capsys.readouterr().err
    if too_long == "truncate":
        whole = prompt_text(trace[0], "")
        assert server.bodies[0]["prompt"] == whole[: 4 * 996]  # the prefix stays shared


def test_a_row_beyond_the_context_that_is_cut_off_by_the_duration(tmp_path: Path) -> None:
    trace = [*rows(3), TraceRequest("r3", 60.0, 200_000, 4)]
    summary, _ = run_one(tmp_path / "run", trace, duration_s=30.0)
    assert summary.values["requests"] == 3


def test_a_trace_file_with_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = b'{"id": "r0", "arrival_s": 0, "input_tokens": 8, "output_tokens": 2}\n'
    path.write_bytes(good + b"rubbish\n" + good.replace(b"r0", b"r1"))
    with pytest.raises(InputError, match=r"t\.jsonl:2: "):
        run_one(tmp_path / "run", path)
    summary, _ = run_one(tmp_path / "run", path, skip_bad=True)
    record = orjson.loads((summary.folder / "run.json").read_bytes())
    assert (record["trace"]["rows"], record["trace"]["skipped_bad"]) == (2, 1)


def test_two_runs_are_equal_in_everything_but_their_name(tmp_path: Path) -> None:
    def contents(name: str) -> list[dict[str, Any]]:
        arrivals = Arrivals("poisson")
        summary, _ = run_one(tmp_path / name, rows(200), arrivals=arrivals, rate_per_s=50, seed=5)
        return [{**row, "request_id": None, "backend": None} for row in table(summary.folder)]

    assert contents("one") == contents("two")


def test_memory_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window holds so many requests and bytes, but always lets one through."""
    from forebay.replay.send.bodies import PreparedQueue, PreparedRequest

    async def main() -> tuple[int, int]:
        request = rows(1)[0]
        window = PreparedQueue(most=3, most_bytes=100)
        put = 0

        async def fill(size: int, count: int) -> None:
            nonlocal put
            for at in range(count):
                await window.put(PreparedRequest(at, request, [b"x" * size], size))
                put += 1

        task = asyncio.create_task(fill(10, 5))
        await window.wait_filled()
        small = put
        for _ in range(5):
            await window.get()
        await task
        put = 0
        task = asyncio.create_task(fill(1000, 2))
        await asyncio.sleep(1)
        large = put
        task.cancel()
        return small, large

    assert run(main()) == (3, 1)
