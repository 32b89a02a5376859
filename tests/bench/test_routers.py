"""The harness that compares routers: what it plans, believes, adds up and writes down."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from routers import processes
from routers.bench_routers import main
from routers.contenders import CONTENDERS
from routers.courses import COURSES
from routers.engines import simulated
from routers.page import generated, seconds_spread
from routers.peers import Peer, Setting
from routers.plan import append_record, is_done, latest, next_scale, read_records
from routers.processes import last_line, parse_metrics, wait_calm
from routers.results import Estimate, groups, percentile, summarise
from routers.run import LATE_SHARE, Run, Signs, judge, late_steps, measure
from routers.traffic import Traffic, at_rate, prepare

from forebay.analysis.statistics.intervals import ConfidenceInterval
from forebay.analysis.statistics.units import NEVER, NONE
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

Record = dict[str, Any]


def record(router: str = "forebay", seed: int = 0, **more: Any) -> Record:
    """A valid run of 100 chats of one second each, by default."""
    figures: Record = {
        "requests": 100, "completed": 100, "goodput_per_s": 5.0, "attainment": 1.0,
        "hit_ratio": 0.5, "prompt_tokens": [100, 100], "rejected": {}, "failed": {},
        "ttft": {"chat": summarise(np.full(100, 1.0), 100)},
    }  # fmt: skip
    figures |= more.pop("figures", {})
    return {
        "format": 1, "engines": "sim", "count": 2, "model": "m", "endpoint": "chat",
        "workload": "documents", "router": router, "seed": seed, "time_scale": 2.0, "version": "1",
        "date": "2026-11-21T10:00:00Z", "behind": "simulated", "slo": "chat.ttft=2s", "trace": "t",
        "ideal_hit_ratio": 0.5, "load": 0.8,
        "machine": {"cores": 2, "system": "s", "python": "3", "reference_ms": 80.0},
        "verdict": "valid", "why": "", "figures": figures, "command": "x", **more,
    }  # fmt: skip


def chats(seconds: float, answered: int = 100) -> Record:
    return {"completed": answered, "ttft": {"chat": summarise(np.full(answered, seconds), 100)}}


@pytest.mark.parametrize(
    ("signs", "verdict", "names"),
    [
        (Signs("valid", "0 late", 0.0, 0.5), "valid", ""),
        (Signs("valid", "0 late", LATE_SHARE, 0.97), "valid", ""),
        (Signs("client-limited", "12 of 99 late", 0.0, 0.5), "invalid", "load generator"),
        (Signs("cap-limited", "held back", 0.0, 0.5), "invalid", "load generator"),
        (Signs("valid", "0 late", 0.02, 0.5), "invalid", "engines"),
        (Signs("valid", "0 late", 0.0, 0.99), "invalid", "machine"),
    ],
)
def test_a_run_with_another_bottleneck_than_the_router_is_invalid(
    signs: Signs, verdict: str, names: str
) -> None:
    found, why = judge(signs)
    assert found == verdict
    assert names in why


def test_late_steps_are_counted_from_the_bucket_above_the_limit() -> None:
    def engine(below: Mapping[str, int], steps: int) -> dict[str, float]:
        name = "forebay_engine_step_lag_seconds"
        return {f"{name}_count": steps, **{f"{name}_bucket le={le}": n for le, n in below.items()}}

    engines = [engine({"0.01": 80, "0.02": 98}, 100), engine({"0.01": 50, "0.02": 100}, 100)]
    assert late_steps(engines, 0.02) == pytest.approx(0.01)
    assert late_steps(engines, 0.015) == pytest.approx(0.01)  # the next bound above
    assert late_steps(engines, 0.01) == pytest.approx(0.35)
    assert late_steps([engine({"0.02": 0}, 0)], 0.02) == 0.0


def test_metrics_are_read_by_name_with_labels_added_up() -> None:
    text = (
        '# HELP a b\nvllm:prompt_tokens_total{engine="0",model_name="m"} 12.0\n'
        'success_total{reason="stop"} 1.0\nsuccess_total{reason="length"} 2.0\n'
        'lag_bucket{le="0.02"} 7.0\nlag_bucket{le="+Inf"} 8.0\nlag_count 8.0\n'
    )
    assert parse_metrics(text) == {
        "vllm:prompt_tokens_total": 12.0, "success_total": 3.0, "lag_bucket le=0.02": 7.0,
        "lag_bucket le=inf": 8.0, "lag_count": 8.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "done"),
    [
        ([], False),
        ([record()], True),
        ([record(verdict="invalid")], False),  # once more
        ([record(verdict="invalid"), record(verdict="invalid")], True),
        ([record(version="0")], False),  # another version of the router
        ([record(trace="older")], False),  # of a workload that was changed
        ([{**record(), "error": "does not start"}], False),
        ([record(seed=1), record("direct"), record(workload="shared documents")], False),
    ],
)
def test_a_run_is_repeated_until_it_is_valid_or_was_tried_twice(
    earlier: list[Record], done: bool
) -> None:
    assert is_done(record(), earlier, attempts=2) is done


def test_an_invalid_run_is_repeated_at_half_the_speed() -> None:
    assert next_scale(4.0, record(), []) == 4.0
    assert next_scale(4.0, record(), [record(verdict="invalid"), record(seed=1)]) == 2.0


@pytest.mark.parametrize("name", ["results.jsonl", "results.jsonl.gz"])
def test_results_are_lines_that_a_second_call_finds(tmp_path: Path, name: str) -> None:
    file = tmp_path / "new" / name
    assert read_records(file) == []
    append_record(file, record())
    append_record(file, record(seed=1))
    assert [kept["seed"] for kept in read_records(file)] == [0, 1]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"format": 1, "eng', r"results\.jsonl:2: not JSON .*delete this line"),
        ('{"id": "a trace"}', "not a result of this harness"),
    ],
)
def test_a_broken_line_is_an_error(tmp_path: Path, line: str, error: str) -> None:
    file = tmp_path / "results.jsonl"
    append_record(file, record())
    with file.open("a") as more:
        more.write(line)
    with pytest.raises(InputError, match=error):
        read_records(file)


def test_an_invalid_repetition_does_not_replace_a_valid_run() -> None:
    again = record(version="2", verdict="invalid")
    assert latest([record(version="1"), again]) == [record(version="1")]
    assert latest([record(version="1"), record(version="2"), again]) == [record(version="2")]
    assert latest([record(), record(time_scale=4.0)]) == [record(time_scale=4.0)]


def test_two_versions_of_ours_are_never_in_one_figure() -> None:
    def seeds(found: list[Record]) -> dict[str, list[int]]:
        (entries,) = groups(found).values()
        return {one.router: [of["seed"] for of in one.valid] for one in entries}

    old = [
        record(name, seed, date="2026-11-22T10:00:00Z")
        for name in ("forebay", "direct")
        for seed in range(4)
    ]
    new = [record("forebay", seed, version="2") for seed in range(2)]
    again = record("direct", 0, version="2")
    # A second valid run of the new version replaces all of the old one; routers of others add up.
    new_date = "2026-11-24T10:00:00Z"
    new = [one | {"date": new_date} for one in new]
    assert seeds([*old, new[0], again]) == {"forebay": [0, 1, 2, 3], "direct": [0, 1, 2, 3]}
    assert seeds([*old, *new, again]) == {"forebay": [0, 1], "direct": [0, 1, 2, 3]}
    invalid = new[1] | {"verdict": "invalid", "why": "engines: late"}
    assert seeds([*old, new[0], invalid]) == {"forebay": [0, 1, 2, 3], "direct": [0, 1, 2, 3]}


def test_binned_latencies_keep_percentiles_to_a_hundredth() -> None:
    dice = np.random.default_rng(1)
    parts = [dice.lognormal(0.0, 1.0, 500) for _ in range(3)]
    summaries = [summarise(part, 510) for part in parts]
    ordered = np.sort(np.concatenate(parts))
    for share in (0.5, 0.9, 0.99):
        found = percentile(summaries, share)
        assert found is not None
        assert found.value == pytest.approx(ordered[int(share * 1500) - 1], rel=0.011)
    assert percentile([], 0.5) is percentile([summarise(np.array([]), 10)], 0.5) is None


def test_only_valid_runs_are_added_up_and_a_peer_that_fails_is_no_zero() -> None:
    records = [
        record("direct", 0, figures=chats(2.0)),
        record("direct", 1, figures=chats(9.0), verdict="invalid", why="engines: late"),
        {**record("litellm"), "error": "Missing: pip install litellm: no wheel"},
    ]
    for one in records:
        if "error" in one:
            del one["figures"], one["verdict"]
    (entries,) = groups(records).values()
    direct, litellm = entries
    p99 = direct.ttft("chat", 0.99)
    assert p99 is not None
    assert p99.value == pytest.approx(2.0, rel=0.011)
    assert p99.interval is None  # one seed tells nothing of the spread
    assert litellm.ttft("chat", 0.99) is None
    shown = generated(records)
    assert "not started: Missing: pip install litellm: no wheel" in shown
    assert "1 (1 invalid)" in shown
    assert "9 s" not in shown


@pytest.mark.parametrize(
    ("estimate", "told"),
    [
        (None, NONE),
        (Estimate(18.04, None), "18 s"),
        (Estimate(18.04, ConfidenceInterval(14.5, 20.0)), "18 s (14.5–20)"),
        (Estimate(0.178, ConfidenceInterval(0.146, 0.185)), "178 ms (146–185)"),
        (Estimate(1.1, ConfidenceInterval(0.9, 1.2)), "1.1 s (900 ms–1.2 s)"),
        (Estimate(2.0, ConfidenceInterval(1.0, math.inf)), f"2 s (1 s–{NEVER})"),
        (Estimate(2.0, ConfidenceInterval(2.0, 2.0)), "2 s"),
    ],
)
def test_an_interval_is_told_in_the_unit_of_its_figure(
    estimate: Estimate | None, told: str
) -> None:
    assert seconds_spread(estimate) == told


def test_every_router_gets_every_engine_and_waits_by_the_clock_of_the_engines(
    tmp_path: Path,
) -> None:
    at = Setting(7001, 7002, (8001, 8002, 8003), tmp_path, 4.0, "m")
    for name, contender in CONTENDERS.items():
        words = contender.command(at)
        written = " ".join(file.read_text() for file in tmp_path.iterdir())
        everything = " ".join(words) + written if words else contender.shown_command(at)
        assert all(str(port) in everything for port in at.backends), name
        assert str(tmp_path) not in contender.shown_command(at), name
        for file in tmp_path.iterdir():
            file.unlink()
    CONTENDERS["haproxy by length"].command(at)
    haproxy = (tmp_path / "haproxy.cfg").read_text()
    assert "use_backend documents if { req.hdr_val(content-length) gt 20000 }" in haproxy
    assert haproxy.index("timeout queue 3750ms") < haproxy.index("timeout queue 500ms")
    assert "option http-no-delay" in haproxy
    CONTENDERS["forebay"].command(at)
    assert "max_wait: 7500ms" in (tmp_path / "forebay.yaml").read_text()
    assert "dispatch_ahead: 75ms" in (tmp_path / "forebay.yaml").read_text()
    plain = yaml.safe_load((tmp_path / "forebay.yaml").read_text())
    CONTENDERS["forebay"].command(replace(at, chunk=2_048))
    chunked = yaml.safe_load((tmp_path / "forebay.yaml").read_text())
    for backend in plain["backends"]:
        backend["long_prefill_token_threshold"] = 2_048
    assert chunked == plain
    CONTENDERS["nginx least_conn"].command(at)
    assert "proxy_buffering off" in (tmp_path / "nginx.conf").read_text()


def test_traffic_comes_at_the_asked_share_of_capacity() -> None:
    rows = [TraceRequest(str(n), 5.0 + n, 10, 1) for n in range(11)]
    made = at_rate(rows, 2.0)
    assert (made[0].arrival_s, made[-1].arrival_s) == (0.0, 5.0)
    with pytest.raises(InputError, match="two arrivals"):
        at_rate(rows[:1], 2.0)
    course = COURSES["documents"]
    once, again = (prepare(course, 3, "Llama-3-8B", "h200", 2) for _ in range(2))
    assert once.sha256 == again.sha256
    offered = (len(once.requests) - 1) / once.requests[-1].arrival_s
    assert offered == pytest.approx(0.8 * once.capacity_per_s, rel=1e-3)


def test_chunked_engines_get_what_the_others_get_to_the_byte() -> None:
    pairs = [(COURSES[one.traffic_of], one) for one in COURSES.values() if one.chunk]
    assert len(pairs) == len(COURSES) / 2
    for plain, chunked in pairs:
        differing = {
            field.name for field in fields(plain)
            if getattr(plain, field.name) != getattr(chunked, field.name)
        }  # fmt: skip
        assert differing == {"name", "about", "chunk", "traffic_of"}
    of = [prepare(one, 1, "Llama-3-8B", "h200", 2) for one in pairs[0]]
    assert of[0] == of[1]  # the name too, which salts the text
    without, having = (simulated(2, "Llama-3-8B", "h200", 2.0, chunk) for chunk in (0, 2_048))
    assert having.command == f"{without.command} --long-prefill-token-threshold 2048"
    assert (without.chunk, having.chunk) == (0, 2_048)


def test_bad_options_are_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["bench_routers.py", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "--routers: 'nope' is none of forebay, direct" in said("--routers", "nope")
    assert "--workloads: 'nope' is none of" in said("--workloads", "nope")
    assert "--seeds 1 or more" in said("--seeds", "0")


def test_a_log_is_told_by_its_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("starting\nError: no such policy\n\n  ---\n")
    assert last_line(log) == "Error: no such policy"
    log.write_text("")
    assert last_line(log) == "it said nothing"


@pytest.mark.parametrize(
    ("busy", "waited_s"),
    [
        ([0.1] * 8, 2.0),
        ([0.1] * 3 + [0.9] + [0.2] * 8, 3.0),  # all the while, not now and then
        ([0.9] * 16, 4.0),  # as long as it may
    ],
)
def test_a_run_waits_for_others_to_leave_the_machine(
    busy: Sequence[float], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([at for share in busy for at in ((0, 0), (round(share * 100), 100))])
    monkeypatch.setattr(processes, "machine_ticks", lambda: next(ticks))
    monkeypatch.setattr(processes, "cores_awake", lambda: nullcontext([]))
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert wait_calm(4.0) == waited_s
    assert next(ticks, None) is None


def test_a_router_and_the_bare_engines_are_measured_alike(tmp_path: Path) -> None:
    """Real processes: three short runs, of which one has a router that cannot start."""
    rows = tuple(
        TraceRequest(f"r{n}", n * 0.05, 6_144 + 64, 2, blocks=(*range(12), 100 + n))
        for n in range(8)
    )
    traffic = Traffic("tiny", rows, "document.ttft=60s", 131_072, 1.0)
    engines = simulated(2, "Llama-3-8B", "h200", 4.0)
    broken = replace(CONTENDERS["direct"], peer=Peer("broken", lambda at: ["false"], lambda: "1"))
    with engines.fresh(tmp_path) as ports:
        same = replace(engines, fresh=lambda folder: nullcontext(ports))
        direct, ours, neither = (
            measure(Run(contender, traffic, 0, same, "chat"), None)
            for contender in (CONTENDERS["direct"], CONTENDERS["forebay"], broken)
        )
    for found in (direct, ours):
        figures = found["figures"]
        assert (figures["requests"], figures["completed"]) == (8, 8)
        assert figures["attainment"] == 1.0
        assert figures["ttft"]["document"]["answered"] == 8
        assert sum(figures["prompt_tokens"]) >= 8 * 6_208  # the chat template's own come on top
        assert found["verdict"] in ("valid", "invalid")  # as busy as this machine is
        assert "error" not in found
    assert direct["figures"]["prompt_tokens"][0] == direct["figures"]["prompt_tokens"][1]
    assert ours["figures"]["hit_ratio"] > 0.9  # the engines kept what the run before had asked
    assert "forebay.yaml" in ours["command"]
    assert neither["error"] == "Missing: ended with status 1: it said nothing"
    assert "figures" not in neither


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has this priority")
def test_each_core_has_one_that_steps_aside_for_everybody() -> None:
    until = time.monotonic() + 30
    with processes.cores_awake() as idlers:
        assert len(idlers) == len(os.sched_getaffinity(0))
        while {os.sched_getscheduler(pid) for pid in idlers} != {os.SCHED_IDLE}:
            assert time.monotonic() < until, "they run like everybody else"
            os.sched_yield()
    for pid in idlers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
