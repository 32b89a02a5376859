"""Metrics by backend: requests, latency, states and reasons for waiting, with bounded series."""

import asyncio
import json
from contextlib import suppress
from importlib.resources import files
from typing import Any, get_args

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stages.proxy_stage import (
    EVENT,
    STREAM_HEAD,
    WHOLE,
    Call,
    RawBackend,
    answer,
    by_request,
    chunk,
    on_stage,
    stage,
)

from forebay.proxy.config.sources import load_config
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.health import Health
from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.policy.start import Block
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.telemetry.metrics.backend_metrics import WAIT_REASONS, BackendMetrics

Series = dict[tuple[str, ...], float]


def series(text: str, name: str) -> Series:
    """The samples of a metric by the values of their labels, in the order of the label names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def by_user(call: Call) -> None:
    match json.loads(call.body).get("user", "ok"):
        case "ok":
            await asyncio.sleep(0.5)
            await by_request(call)
        case "cut":
            await call.send(STREAM_HEAD + chunk(EVENT))
            call.reset()
        case "slow":
            await asyncio.sleep(9.0)
        case status:
            await call.send(answer(int(status), WHOLE))


@pytest.mark.parametrize(
    ("user", "outcome"),
    [
        ("ok", "ok"),
        ("404", "client_error"),
        ("500", "failed"),
        ("429", "failed"),
        ("cut", "cut"),
        ("slow", "client_left"),
    ],
)
async def test_each_request_is_counted_once_by_its_outcome(user: str, outcome: str) -> None:
    async with on_stage(by_user) as (on, _):
        body = {"prompt": "x", "stream": True, "max_tokens": 3, "user": user}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(5), on.post(body) as response:
                await response.read()
        await asyncio.sleep(1)
        text = on.proxy.metrics.text().decode()
        assert series(text, "forebay_backend_requests_total") == {("b0", "chat", outcome): 1.0}
        lasted = series(text, "forebay_backend_request_duration_seconds_count")
        assert lasted == ({("b0", "chat"): 1.0} if outcome == "ok" else {})


async def test_time_to_first_token_counts_from_dispatch_beside_its_prediction() -> None:
    async with on_stage(by_user) as (on, _):
        await on.read({"prompt": "x", "stream": True, "max_tokens": 3})
        text = on.proxy.metrics.text().decode()
        name = "forebay_backend_time_to_first_token_seconds"
        assert series(text, f"{name}_sum")["b0", "chat"] == pytest.approx(0.5, abs=0.1)
        edges = [float(edge) for _, _, edge in series(text, f"{name}_bucket")]
        assert edges[-2:] == [600.0, float("inf")]
        predicted = series(text, f"{name.replace('backend_', 'backend_predicted_')}_total")
        assert predicted["b0", "chat"] > 0


async def test_states_and_how_often_each_was_entered() -> None:
    async with on_stage(None) as (on, (backend,)):
        backend.healthy = False
        await asyncio.sleep(5)
        text = on.proxy.metrics.text().decode()
        states = series(text, "forebay_backend_state")
        assert states == {
            ("b0", "up"): 0.0,
            ("b0", "down"): 1.0,
            ("b0", "asleep"): 0.0,
            ("b0", "ejected"): 0.0,
            ("b0", "half_open"): 0.0,
        }
        backend.healthy = True
        await asyncio.sleep(5)
        text = on.proxy.metrics.text().decode()
        assert series(text, "forebay_backend_state")["b0", "up"] == 1.0
        assert series(text, "forebay_backend_transitions_total") == {
            ("b0", "probe_passed", "up"): 2.0,
            ("b0", "probes_failed", "down"): 1.0,
        }
        (b0,) = (await on.told("/status"))["backends"]
        assert (b0["state"], b0["reason"]) == ("up", "probe_passed")
        assert 0 < b0["state_s"] < 10


async def test_a_removed_backend_loses_its_series() -> None:
    async with RawBackend().running() as backend, RawBackend().running() as other:
        kept = {"name": "b0", "url": backend.url}
        keys: dict[str, Any] = {"listen": {"port": 0, "admin_port": 0}, "backends": [kept]}
        async with stage([backend.url, other.url], load=lambda: load_config(None, keys, {})) as on:
            for number in range(40):
                await on.read({"prompt": f"{number}" * 5000, "max_tokens": 3})
            on.proxy.metrics.upstream_error("b1", "connect")
            assert 'backend="b1"' in on.proxy.metrics.text().decode()
            await on.proxy.reloader.reload()
            await asyncio.sleep(2)
            on.proxy.metrics.upstream_error("b1", "connect")  # of a request that came late
            text = on.proxy.metrics.text().decode()
            assert 'backend="b1"' not in text
            assert series(text, "forebay_backend_requests_total")["b0", "chat", "ok"] > 0


def test_every_reason_for_waiting_has_a_label() -> None:
    assert set(WAIT_REASONS) == {"turn", *get_args(Block)} - {""}
    page = files("forebay.proxy.admin").joinpath("live.html").read_text()
    assert [label for label in WAIT_REASONS.values() if f'{label}: "' not in page] == []


class TestWaiting:
    def text_of(self, shaper: Shaper, recorder: DecisionRecorder) -> str:
        registry = CollectorRegistry()
        registry.register(BackendMetrics(shaper, Health(shaper.backends), recorder.receipts))
        return generate_latest(registry).decode()

    def shaper(self, recorder: DecisionRecorder, **keys: Any) -> Shaper:
        made = Shaper([BackendSpec("b0", **keys)], [Bucket("chat", 10_000)], recorder=recorder)
        made.backend_up("b0", 0.0)
        return made

    def test_by_what_keeps_the_next_one_and_the_rest_behind_it(self) -> None:
        recorder = DecisionRecorder(100)
        shaper = self.shaper(recorder, max_concurrency=1)
        for number in range(4):
            shaper.arrive(Request(str(number), 100, 10), 1.0)
        assert series(self.text_of(shaper, recorder), "forebay_waiting_requests") == {
            ("b0", "chat", "max_concurrency"): 1.0,
            ("b0", "chat", "behind_others"): 2.0,
        }

    def test_the_seconds_that_were_waited(self) -> None:
        recorder = DecisionRecorder(100)
        shaper = self.shaper(recorder, max_concurrency=1)
        shaper.arrive(Request("a", 100, 10), 1.0)
        shaper.arrive(Request("b", 100, 10), 1.0)
        shaper.first_token("a", 1.5)
        shaper.finish("a", 4.0)
        shaper.first_token("b", 4.5)
        assert not series(self.text_of(shaper, recorder), "forebay_waiting_requests")
        shaper.finish("b", 5.0)
        text = self.text_of(shaper, recorder)
        assert series(text, "forebay_wait_seconds_total") == {("chat", "max_concurrency"): 3.0}

    def test_no_room_in_the_kv_cache(self) -> None:
        recorder = DecisionRecorder(100)
        shaper = self.shaper(recorder, max_concurrency=9, kv_tokens=10_000)
        for number in range(2):
            shaper.arrive(Request(str(number), 9_000, 100, tuple(range(number * 9, 9))), 1.0)
            shaper.first_token(str(number), 2.0)
        assert series(self.text_of(shaper, recorder), "forebay_waiting_requests") == {
            ("b0", "chat", "kv_full"): 1.0
        }
