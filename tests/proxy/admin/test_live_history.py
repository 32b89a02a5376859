"""The last 15 minutes that the live page shows: bounded, and by bucket, tenant and model."""

from typing import Any

import pytest
from said import Said
from stages.proxy_stage import on_stage

from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.log_events import LogEvent
from forebay.proxy.telemetry.metrics.live_history import MOST_NAMES, OTHERS, LiveHistory
from forebay.proxy.telemetry.recent_events import MOST, RecentEvents
from forebay.proxy.telemetry.record import CLIENT_GONE, RequestRecord
from forebay.proxy.workers.worker_histories import added_up


def of(tenant: str = "", model: str = "m", reason: str = "", bucket: str = "chat") -> RequestRecord:
    return RequestRecord(
        "id", 0.0, bucket=bucket, tenant=tenant, model=model, reason=reason, prompt_tokens=100
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[LiveHistory, Clock]:
    clock = Clock()
    return LiveHistory(
        Shaper([BackendSpec("gpu0", 64)], [Bucket("chat", 4_096, max_queue=64)]), clock
    ), clock


def test_a_flood_is_seen_by_tenant_and_over_time() -> None:
    history, clock = made()
    for second in range(0, 900, 5):
        clock.now = second + 4.0
        for _ in range(2):
            history.first_token(of("good"), 0.1)
            history.finished(of("good"), 200)
        if 600 <= second < 700 or second >= 880:
            for _ in range(8):
                history.finished(of("acme", reason="queue_full"), 429)
        clock.now = second + 5.0
        history.take(clock.now)
    told = history.fields()
    samples, minute = told["samples"], told["minute"]
    assert len(samples) == 180
    assert (samples[0]["age_s"], samples[-1]["age_s"]) == (895.0, 0.0)
    flooded = [sample["age_s"] for sample in samples if sample["buckets"]["chat"]["rejected"]]
    assert flooded == [*(float(age) for age in range(295, 195, -5)), 15.0, 10.0, 5.0, 0.0]
    assert samples[0]["backends"] == {"gpu0": {"up": False, "running": 0, "kv_share": None}}
    assert samples[0]["waiting"] == {"chat": 0}
    assert minute["seconds"] == 60.0
    acme, good = minute["tenants"]
    assert (acme["name"], acme["requests"], acme["rejected"]) == ("acme", 32, 32)
    assert (good["name"], good["requests"], good["prompt_tokens"]) == ("good", 24, 2_400)
    assert good["ttft_p95_s"] == pytest.approx(0.1, rel=0.05)
    assert acme["ttft_p95_s"] is None
    assert [model["name"] for model in minute["models"]] == ["m"]


def test_the_history_stays_bounded() -> None:
    history, clock = made()
    for second in range(5_000):
        clock.now = float(second)
        for number in range(30):
            history.finished(of(f"t{second % 7}-{number}", model=f"m{number}"), 200)
        if second % 5 == 0:
            history.take(clock.now)
    told = history.fields()
    assert len(told["samples"]) == 180
    assert len(told["minute"]["models"]) == MOST_NAMES + 1
    by_name = {model["name"]: model["requests"] for model in told["minute"]["models"]}
    assert sum(by_name.values()) == 30 * told["minute"]["seconds"]
    assert by_name[OTHERS] > by_name["m0"]


def test_times_are_within_five_percent() -> None:
    history, _ = made()
    times = [0.001 * 1.013**n for n in range(1_000)]
    for ttft_s in times:
        history.first_token(of(), ttft_s)
    (told,) = history.fields()["minute"]["buckets"]
    assert told["ttft_p50_s"] == pytest.approx(times[499], rel=0.06)
    assert told["ttft_p95_s"] == pytest.approx(times[949], rel=0.06)
    history.first_token(of(bucket="b"), 0.0)
    history.first_token(of(bucket="c"), 1e9)
    told = {
        bucket["name"]: bucket["ttft_p50_s"] for bucket in history.fields()["minute"]["buckets"]
    }
    assert told["b"] == 0.0
    assert told["c"] == pytest.approx(1_000, rel=0.06)


def test_no_quantile_is_above_the_longest_time() -> None:
    history, clock = made()
    for _ in range(3):
        clock.now += 5.0
        history.take(clock.now)
        for ttft_s in (0.3, 1.06):
            history.first_token(of(), ttft_s)
    (told,) = history.fields()["minute"]["buckets"]
    assert told["ttft_p99_s"] == told["ttft_p95_s"] == 1.06
    assert told["ttft_p50_s"] == pytest.approx(0.3, rel=0.05)


def test_clients_that_left_and_other_errors_are_counted() -> None:
    history, _ = made()
    stopped = of("acme")
    stopped.first_token_at = 1.0
    history.finished(of("acme"), CLIENT_GONE)
    history.finished(stopped, CLIENT_GONE)  # it has seen its first token
    history.finished(of("acme", reason="queue_full"), 429)
    history.finished(of("acme"), 404)
    history.finished(of("acme"), 200)
    (told,) = history.fields()["minute"]["tenants"]
    counts = {key: told[key] for key in ("requests", "rejected", "left", "failed")}
    assert counts == {"requests": 5, "rejected": 1, "left": 1, "failed": 1}


def test_events_are_kept_and_said() -> None:
    said, clock = Said(), Clock()
    events = RecentEvents(said, clock)
    events(LogEvent.BACKEND_DOWN, "gpu0 is down", "gpu0", "probes_failed")
    clock.now = 10.0
    events(LogEvent.REJECTIONS_GO_ON, "requests are still rejected")
    events(LogEvent.REJECTIONS_BEGAN, "x" * 1_000)
    assert len(said) == 3
    newest, oldest = events.within(900.0)
    assert (newest["age_s"], len(newest["message"])) == (0.0, 300)
    assert oldest == {
        "age_s": 10.0, "event": "backend_down", "level": "warning", "message": "gpu0 is down",
        "backend": "gpu0",
    }  # fmt: skip
    assert [one["event"] for one in events.within(5.0)] == ["rejections_began"]
    for _ in range(2 * MOST):
        events(LogEvent.RELOAD_APPLIED, "changed")
    assert len(events.within(900.0)) == MOST


async def test_the_admin_port_has_it() -> None:
    async with on_stage(None) as (on, _):
        async with on.post({"prompt": "x", "model": "m", "stream": True}) as answer:
            assert answer.status == 200
            await answer.read()
        told = await on.told("/history")
        (model,) = told["minute"]["models"]
        assert (model["name"], model["requests"], model["rejected"]) == ("m", 1, 0)
        assert model["ttft_p50_s"] is not None
        assert "backend_up" in {event["event"] for event in told["events"]}


def test_workers_are_added_up() -> None:
    def worker(requests: int, p95_s: float | None, age_s: float) -> dict[str, Any]:
        line = {"name": "m", "requests": requests, "rejected": 1, "left": 2, "failed": 3,
                "prompt_tokens": 10, "ttft_p50_s": None, "ttft_p95_s": p95_s,
                "ttft_p99_s": p95_s}  # fmt: skip
        minute = {"seconds": 60.0, "buckets": [line], "tenants": [], "models": [line]}
        return {"every_s": 5.0, "kept_s": 900.0, "samples": [], "minute": minute,
                "events": [{"age_s": age_s, "event": "backend_up"}]}  # fmt: skip

    told = added_up({0: worker(5, None, 9.0), 1: worker(5, 0.5, 3.0), 2: worker(1, 0.2, 6.0)})
    (model,) = told["minute"]["models"]
    assert (model["requests"], model["rejected"], model["ttft_p95_s"]) == (11, 3, 0.5)
    assert (model["left"], model["failed"], model["ttft_p99_s"]) == (6, 9, 0.5)
    assert [event["worker"] for event in told["events"]] == [1, 2, 0]
