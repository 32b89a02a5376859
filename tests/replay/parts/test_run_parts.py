"""replay/parts/run_parts.py: several processes measure what one does."""

import asyncio
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from stages.replay_server import rows, run_one, serve, table

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.virtual_loop import run
from forebay.replay.parts import run_parts
from forebay.replay.parts.divide import Part, PartJob, divide
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.plan.target import Served
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.merge import merge_parts
from forebay.replay.results.recorder import Live
from forebay.replay.results.summary import RunTotals
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import Stop
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

PARTS = 3


def talk(count: int = 60) -> list[TraceRequest]:
    """Ten sessions of three turns that wait, and rows without a session."""
    found = []
    for at, row in enumerate(rows(count, output_tokens=3)):
        row = replace(row, output_tokens=3 + at % 7)
        if at % 2:
            session, turn = divmod(at // 2, 3)
            parent = f"r{at - 2}" if turn else None
            row = replace(row, session=f"s{session}", parent=parent, think_s=0.02 if turn else None)
        found.append(row)
    return found


def part_run(out: Path, trace: list[TraceRequest], number: int, **more: Any) -> None:
    """Run one part in virtual time."""

    async def start(clock: Clock) -> None:
        clock.restart()

    async def report(_live: Live, _plan: ReplayPlan, _clock: Clock) -> None: ...

    async def main() -> None:
        async with serve() as up:
            options = ReplayOptions(trace, [up.url], out, processes=PARTS, quiet=True, **more)
            job = PartJob(options, number, PARTS, SERVED, f"p{number}", reports=False)
            await replay(options, Stop(), Part(job, start, report))

    run(main())


SERVED = Served("tiny", 131_072)


def test_the_live_figures_of_processes_are_added_up() -> None:
    live, encoded = run_parts._LiveSum(2), Live()
    for time_us in (10_000, 30_000):
        encoded.ttft.record_value(time_us)
    counts: dict[str, Any] = {"sent": 9, "done": 4, "unread": 1, "output_tokens": 80, "failed": {}}
    counts["ttft"] = encoded.ttft.encode().decode("ascii")
    live.update(0, counts | {"sent": 3, "rejected": {"queue_full": 7}})
    live.update(0, counts | {"rejected": {"queue_full": 1}})
    live.update(1, counts | {"rejected": {"queue_full": 1, "kv_full": 2}})
    total = live.total
    assert (total.sent, total.done, total.output_tokens, total.in_flight) == (18, 8, 160, 4)
    assert total.rejected == {"queue_full": 2, "kv_full": 2}
    assert total.ttft.total_count == 4


@pytest.mark.parametrize("linked", [True, False])
def test_parts_add_up_to_the_whole(tmp_path: Path, linked: bool) -> None:
    more: dict[str, Any] = {"rate_per_s": 40.0, "arrivals": Arrivals("poisson"), "seed": 5}
    more |= {"turns": "wait" if linked else "trace", "keep_answers": True}
    whole, _ = run_one(tmp_path / "whole", talk(), **more)
    places = [tmp_path / str(number) for number in range(PARTS)]
    for number, place in enumerate(places):
        part_run(place, talk(), number, **more)
    assert all(len(table(place)) >= 5 for place in places)

    options = ReplayOptions(talk(), [""], tmp_path / "merged")
    totals = RunTotals([bucket.name for bucket in options.buckets], options.stated_slos())
    with RunFolder(options.out, answers=True) as folder:
        merging = merge_parts(places, "complete", 0.0, 1.0, folder, totals, [])
        measured = asyncio.run(merging)
        window_s = whole.values["window_s"]
        merged = totals.summary(measured.histograms, window_s, closed=False, scale=1.0)
        folder.commit({}, merged)
    assert measured.sent == len(talk())
    for values in (merged, whole.values):
        values.pop("prompt_tokens_per_backend")  # each server has a port of its own
        values.pop("warnings")  # of the caches, which the command adds
    whole.values.pop("warm_caches", None)
    figures, wanted = _flat(merged), _flat(whole.values)
    for key, value in figures.items():
        exact = not isinstance(value, float)
        assert value == (wanted[key] if exact else pytest.approx(wanted[key], rel=1e-3)), key
    ours, theirs = table(tmp_path / "merged"), table(whole.folder)
    for one, other in zip(ours, theirs, strict=True):
        for column in ("id", "session", "outcome", "output_tokens", "prompt_tokens"):
            assert one[column] == other[column]
        assert one["intended_s"] == pytest.approx(other["intended_s"], abs=1e-6)
    kept = [(at / "answers.jsonl").read_bytes().splitlines() for at in (options.out, whole.folder)]
    assert sorted(kept[0]) == sorted(kept[1])


def _flat(figures: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in figures.items():
        place = f"{path}.{key}"
        found |= _flat(value, place) if isinstance(value, dict) else {place: value}
    return found


def test_linked_sessions_stay_together() -> None:
    trace = [replace(row, session=f"s{at}") for at, row in enumerate(rows(200))]
    parts = divide(trace, 4)
    assert min(parts.count(number) for number in range(4)) > 25
    assert divide(trace, 4) == parts
    linked = [*trace, TraceRequest("last", 9.0, 8, 1, session="x", waits_for=("r3", "r4", "r5"))]
    assert len({divide(linked, 4)[at] for at in (3, 4, 5, 200)}) == 1


async def _replay(out: Path, stop: Stop | None = None, **more: Any) -> Summary:
    async with serve(first_s=more.pop("first_s", 0.01)) as up:
        trace = more.pop("trace", talk())
        options = ReplayOptions(trace, [up.url], out, quiet=True, processes=2, **more)
        return await replay(options, stop)


def test_two_processes_make_one_run(tmp_path: Path) -> None:
    summary = asyncio.run(_replay(tmp_path / "run"))
    assert (summary.ended, summary.values["requests"], summary.values["completed"]) == (
        "complete",
        60,
        60,
    )
    assert [row["id"] for row in table(summary.folder)] == [row.id for row in talk()]
    names = sorted(path.name for path in summary.folder.iterdir())
    assert names == ["latency.hlog", "requests.parquet", "run.json", "summary.json"]
    assert orjson.loads((summary.folder / "run.json").read_bytes())["processes"] == 2


def test_a_killed_process_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Watched(run_parts._Child):
        async def ready(self) -> None:
            await super().ready()
            made.append(cast(Any, self.part))

        async def ended(self) -> str:
            if self.part is made[0]:
                cast(Any, self.part)._process.kill()
            return await super().ended()

    monkeypatch.setattr(run_parts, "_Child", Watched)
    with pytest.raises(InputError, match=r"process \d of 2 was ended by signal 9"):
        asyncio.run(_replay(tmp_path / "run", first_s=60.0))
    assert list((tmp_path / "run").iterdir()) == []
    assert [part._process.returncode for part in made] == [-9, -9]


def test_an_interrupt_reaches_all_processes(tmp_path: Path) -> None:
    stop = Stop()
    stop.request()
    stop.request()
    summary = asyncio.run(_replay(tmp_path / "run", stop, trace=rows(50, gap_s=100.0)))
    assert summary.interrupted
    assert summary.values["requests"] == 50
    assert summary.values["failed"]["never_sent"] >= 48


@pytest.mark.timeout(300)
def test_two_nodes_of_a_ray_cluster_measure_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes on this machine; the trace is a file, which is sent to them."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'forebay[ray]'")
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # stays on loopback
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, talk(200))

    async def run_one(out: Path, **more: Any) -> Summary:
        async with serve(first_s=0.05) as up:
            options = ReplayOptions(trace, [up.url], out, quiet=True, **more)
            return await replay(options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "node_ip_address": "127.0.0.1"}
        )
        try:
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
            cluster.wait_for_nodes()
            nodes = asyncio.run(run_one(tmp_path / "nodes", ray=cluster.address))
        finally:
            cluster.shutdown()
    record = orjson.loads((nodes.folder / "run.json").read_bytes())
    assert len(record["nodes"]) == 2
    assert all(abs(node["ahead_s"]) <= node["error_s"] < 0.005 for node in record["nodes"])
    whole = asyncio.run(run_one(tmp_path / "whole"))
    for key in ("requests", "completed", "rejected", "failed", "requests_by_bucket"):
        assert nodes.values[key] == whole.values[key]
    assert [row["id"] for row in table(nodes.folder)] == [row.id for row in talk(200)]
    for one, other in zip(table(nodes.folder), table(whole.folder), strict=True):
        assert one["output_tokens"] == other["output_tokens"]


def test_each_process_needs_a_request_in_flight(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--processes: 2 is not 1 to 1"):
        asyncio.run(_replay(tmp_path / "run", arrivals=Arrivals("closed", 1)))
