"""`forebay doctor` finds staged faults, each by its own check, and nothing where all is well."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from stages.incident_scenes import THRESHOLD, ask, scene_of
from stages.proxy_stage import RawBackend, Stage, note_a_chat, stage, until

from forebay.proxy.cli import main
from forebay.proxy.diagnose import doctor_cli
from forebay.proxy.diagnose.checks import CHECKS, examine
from forebay.proxy.diagnose.config_file import examine_file
from forebay.proxy.diagnose.doctor.finding import Finding
from forebay.proxy.diagnose.doctor.servers import states
from forebay.proxy.diagnose.scene import MetricSample, Scene, samples_of
from forebay.proxy.telemetry.metrics.past_metrics import PastMetrics
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine

LOCKED = ServerOptions(api_key=["k"], enable_prompt_tokens_details=True)


async def chats(on: Stage, count: int = 60) -> None:
    for number in range(0, count, 3):
        await asyncio.gather(*(ask(on, 2_000, number + i) for i in range(3)))


async def documents_beside_chats(on: Stage) -> None:
    note_a_chat(on)
    documents = [asyncio.create_task(ask(on, 60_000, i)) for i in range(6)]
    for number in range(60):
        await ask(on, 300, 100 + number)
        await asyncio.sleep(0.1)
    await asyncio.gather(*documents)


async def documents_after_chats(on: Stage) -> None:
    """Speeds are known before the documents come, so the safety margin rejects no chat."""
    await chats(on)
    await documents_beside_chats(on)


async def hasty(on: Stage) -> None:
    await chats(on)
    long = [asyncio.create_task(ask(on, 60_000, i)) for i in range(2)]
    await asyncio.sleep(0.1)
    for number in (8, 9):
        assert await ask(on, 60_000, number, headers={"x-request-timeout": "1"}) == 429
    await asyncio.gather(*long)


Work = Callable[[Stage], Awaitable[None]]


def found_in(
    second: dict[str, Any],
    work: Work = chats,
    options: ServerOptions | None = None,
    beside: Callable[[RunningEngine], Awaitable[Any]] | None = None,
    **keys: Any,
) -> list[Finding]:
    """Return the findings for two engines, the second of which has these options."""
    keys.setdefault("each", THRESHOLD)

    async def main() -> list[Finding]:
        async with AsyncExitStack() as stack:
            threshold = keys["each"].get("long_prefill_token_threshold", 0)
            first: dict[str, Any] = {
                "seed": 1, "served_model_name": "tiny", "long_prefill_token_threshold": threshold,
            }  # fmt: skip
            engines = [
                await stack.enter_async_context(start_engine(EngineConfig(**first))),
                await stack.enter_async_context(
                    start_engine(
                        EngineConfig(**{**first, **second}),
                        options=options or ServerOptions(enable_prompt_tokens_details=True),
                    )
                ),
            ]
            on = await stack.enter_async_context(stage([e.url for e in engines], **keys))
            await work(on)
            task = asyncio.ensure_future(beside(engines[1])) if beside else None
            await asyncio.sleep(1.0)
            scene = await scene_of(on)
            if task is not None:
                await task
            return examine(scene)

    return list(run(main()))


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found_in({}) == []
    assert found_in({}, documents_beside_chats) == []


async def much_work(engine: RunningEngine) -> None:
    import aiohttp

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        body = {"model": "tiny", "prompt": f"{number} x", "max_tokens": 2_000, "ignore_eos": True}
        async with client.post(f"{engine.url}/v1/completions", json=body) as response:
            await response.read()

    async with aiohttp.ClientSession() as client:
        await asyncio.gather(*(one(client, number) for number in range(12)))


@pytest.mark.parametrize(
    ("staged", "check", "text"),
    [
        ({"second": {"time_scale": 0.25}}, "speed of backends", "b1 needs 4."),
        ({"second": {"enable_prefix_caching": False}}, "prefix caching", "b1 runs without prefix"),
        ({"second": {}, "models": {"gpt": "tinny"}}, "models",
         "models: gpt stands for tinny, which no backend serves"),
        ({"second": {}, "options": LOCKED}, "backends answer",
         "b1 does not list its models"),
        ({"second": {}, "beside": much_work}, "other clients",
         "b1 has 12 requests, and the proxy sent it 0"),
        ({"second": {}, "work": documents_after_chats, "each": {}},
         "long prompts", "s for the backend that is reserved for chats"),
        ({"second": {}, "work": hasty}, "rejections",
         "2 of 64 requests were rejected: 2 deadline_unattainable"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else None,
)  # fmt: skip
def test_a_staged_fault_is_found(staged: dict[str, Any], check: str, text: str) -> None:
    found = found_in(**staged)
    assert [one.check for one in found] == [check], found
    assert text in found[0].text
    assert found[0].remedy


def test_several_models_are_no_fault() -> None:
    assert found_in({"served_model_name": "other"}) == []


def test_a_key_for_the_backends_is_used() -> None:
    assert found_in({}, options=LOCKED, upstream_api_key="k") == []


async def test_a_backend_that_dies_and_one_that_fails() -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(RawBackend().running())
        dying = RawBackend()
        urls = [good.url, "http://127.0.0.1:9"]
        async with stage(urls, wait_up=1, each=THRESHOLD) as on:
            found = examine(await scene_of(on))
        assert {one.check for one in found} == {"backends take work", "backends answer"}
        assert found[0].severity == "error"
        assert "b1 has been down for" in found[0].text
        assert found[0].remedy.startswith("start it")
        assert not any("answers none of" in one.text for one in found)  # one for one cause
        dying.healthy = None
        async with dying.running(), stage([dying.url], wait_up=0, each=THRESHOLD) as on:
            await asyncio.sleep(1.0)
            found = examine(await scene_of(on))
        assert any("no backend takes work" in one.text for one in found)
        hangs = RawBackend()
        async with hangs.running(), stage([good.url, hangs.url], each=THRESHOLD) as on:
            hangs.healthy = hangs.metrics = None
            await until(lambda: not on.proxy.backends.links["b1"].up)
            found = examine(await scene_of(on))
        assert [one.text for one in found if one.text.startswith("b1 ")] == [found[0].text]
        assert found[0].remedy.startswith("restart it if it hangs")  # one for one cause


# Every check, on what a proxy would tell.


def backend(name: str, **other: Any) -> dict[str, Any]:
    cost = {"observations": 50, "proven_tokens": 10_000, "relative_error": 0.01,
            "scale": [1.0, 1.0, 1.0]}  # fmt: skip
    paths = {"/v1/chat/completions": "exact", "/v1/responses": "corrected"}
    index = {"mode": "corrected", "answers": 50, "kept_share": 1.0, "paths": paths}
    made: dict[str, Any] = {
        "name": name, "up": True, "draining": False, "in_flight": 0, "in_flight_elsewhere": 0,
        "max_concurrency": 640, "long_prefill_token_threshold": None, "scheduler": "vllm",
        "state": "up", "state_s": 9.0,
        "why": "its health check passed", "prefill_cost": cost, "prefix_index": index,
    }  # fmt: skip
    for key, value in other.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) else value
    return made


def status(*backends: dict[str, Any], **other: Any) -> dict[str, Any]:
    config = {"last_reload": "none yet", "needs_restart": []}
    made = {
        "ready": True, "shedding_classes": 0, "short_of": [], "capture": None, "usage": None,
        "config": config, "unserved_names": {},
        "share": {"links": []}, "backends": list(backends or (backend("a"), backend("b"))),
    }  # fmt: skip
    return {**made, **other}


def fact(name: str, **other: Any) -> dict[str, Any]:
    engine = {"running": 0.0, "waiting": 0.0, "preemptions": 0.0, "prefix_caching": True}
    made = {"name": name, "answers": True, "version": "0.20.2", "models": ["m"], "engine": engine}
    return {**made, **other}


def sample(name: str, value: float, **labels: str) -> MetricSample:
    return MetricSample(f"forebay_{name}", labels, value)


SERVED = [sample("backend_requests_total", 100.0, backend="a", outcome="ok"),
          sample("backend_requests_total", 100.0, backend="b", outcome="ok"),
          sample("responses_total", 200.0)]  # fmt: skip


def worker(index: int, told: dict[str, Any] | None, restarts: int = 0) -> dict[str, Any]:
    return {"worker": index, "pid": 1, "restarts": restarts, "status": told}


Case = tuple[str, dict[str, Any], Sequence[dict[str, Any]], Sequence[MetricSample]]


def of_case(case: Case) -> Scene:
    return Scene(case[1], list(case[2]), list(case[3]))


CASES: list[Case] = [
    ("a has been ejected for 9 s", status(backend("a", up=False, state="ejected", why="late")),
     (), ()),
    ("a serves other and no longer m, and has had no request since",
     status(backend("a", models=["other"], lost_model="m"), backend("b", models=["m"])), (), ()),
    ("b: long prompts are computed whole, so every chat behind one waits for it",
     status(backend("a"), backend("b", long_prompts_block=True)), (), ()),
    ("first tokens of a took 2.0 times as long as predicted (40 requests)", status(), (), [
        sample("backend_time_to_first_token_seconds_count", 40.0, backend="a", bucket="chat"),
        sample("backend_time_to_first_token_seconds_sum", 20.0, backend="a", bucket="chat"),
        sample("backend_predicted_time_to_first_token_seconds_total", 10.0, backend="a",
               bucket="chat")]),
    ("b keeps only 30% of the prefixes",
     status(backend("a"), backend("b", prefix_index={"kept_share": 0.3})), (), ()),
    ("the proxy only observes", status(mode="observe"), (), ()),
    ("tenant acme sent 87% of the requests (870 of 1000) and had 100% of the rejections (21 of",
     status(), (), [
        sample("tenant_requests_total", 849.0, tenant="acme", status="200"),
        sample("tenant_requests_total", 21.0, tenant="acme", status="429"),
        sample("tenant_requests_total", 130.0, tenant="good", status="200")]),
    ("requests waited 62 s for room in the KV cache, 78% of all time in the queue; a has 1,000",
     status(backend("a", kv_tokens=1_000, kv_reserved_tokens=940), backend("b")), (), [
        sample("wait_seconds_total", 62.0, bucket="chat", reason="kv_full"),
        sample("wait_seconds_total", 18.0, bucket="chat", reason="busy")]),
    ("bucket document: 10 of 210 requests took 90% of the time to first tokens (9.0 s each)",
     status(), (), [
        sample("backend_time_to_first_token_seconds_sum", 90.0, backend="a", bucket="document"),
        sample("backend_time_to_first_token_seconds_count", 10.0, backend="a", bucket="document"),
        sample("backend_time_to_first_token_seconds_sum", 10.0, backend="a", bucket="chat"),
        sample("backend_time_to_first_token_seconds_count", 200.0, backend="a", bucket="chat"),
        sample("backend_predicted_time_to_first_token_seconds_total", 100.0, backend="a"),
        sample("rejects_total", 3.0, bucket="document", reason="deadline_unattainable"),
        sample("responses_total", 300.0, bucket="chat"),
        sample("responses_total", 13.0, bucket="document")]),
    ("a has restarted: it counts 60 prompts, and answered 100 in this time; its prefix cache is "
     "cold (25% of its prompt tokens were cached)", status(),
     [fact("a", engine={"prompts": 60.0})], [
        *SERVED, sample("prompt_tokens_total", 1_000.0, backend="a"),
        sample("cached_tokens_total", 250.0, backend="a")]),
    ("first tokens of a took 0.50 s, 0.10 s of it in its engine (mean of 100): the rest is its API "
     "server, which tokenizes one text after another and should need 19 ms", status(),
     [fact("a", engine={"prompts": 100.0, "prompt_tokens": 500_000.0, "prefills": 100.0,
                        "queue_s": 4.0, "prefill_s": 6.0, "prefix_hits": 1.0})], [
        *SERVED,
        sample("backend_time_to_first_token_seconds_count", 100.0, backend="a"),
        sample("backend_time_to_first_token_seconds_sum", 50.0, backend="a"),
        sample("backend_predicted_time_to_first_token_seconds_total", 50.0, backend="a")]),
    ("clients took 30.0 s to send their prompts, 60% of the time to first tokens (1.50 s each)",
     status(), (), [
        sample("client_wait_seconds_total", 30.0, direction="upload"),
        sample("time_to_first_token_seconds_count", 20.0, bucket="chat"),
        sample("time_to_first_token_seconds_sum", 50.0, bucket="chat")]),
    ("clients took 75.0 s to send their prompts, 150.0 times the time to first tokens",
     status(), (), [
        sample("client_wait_seconds_total", 75.0, direction="upload"),
        sample("time_to_first_token_seconds_count", 20.0, bucket="chat"),
        sample("time_to_first_token_seconds_sum", 0.5, bucket="chat")]),
    ("prompts of a do not reach one block of its prefix cache, so none is found there: they have "
     "300 tokens on average, a block has 784", status(),
     [fact("a", engine={"prefix_hits": 0.0, "prompts": 50.0, "prompt_tokens": 15_000.0,
                        "block_tokens": 784}),
      fact("b", engine={"prefix_hits": 9.0, "prompts": 50.0, "prompt_tokens": 15_000.0,
                        "block_tokens": 784})], ()),
    ("a has KV blocks of 784 tokens for its recurrent states, and long_prefill_token_threshold "
     "2,048: vLLM computes 1,568 in a step",
     status(backend("a", long_prefill_token_threshold=2048),
            backend("b", long_prefill_token_threshold=1568)),
     [fact("a", engine={"block_tokens": 784}), fact("b", engine={"block_tokens": 784})], ()),
    ("b drops cache_salt on these paths, so tenants can tell there from the timing what others "
     "have sent: /v1/messages", status(), [fact("b", ignores_salt=["/v1/messages"])], ()),
    ("none of 100 answers of b says how many",
     status(backend("a"), backend("b", prefix_index={"mode": "believed"})), (), SERVED),
    ("different versions (a 0.20.2, b 0.26.0)", status(), [fact("a"), fact("b", version="0.26.0")],
     ()),
    ("a runs vLLM 0.9.1; 0.11 is the oldest", status(), [fact("a", version="0.9.1")], ()),
    ("b preempted requests 9 times", status(),
     [fact("b", engine={"preemptions": 9.0})], SERVED),
    ("5 of 105 requests to a failed: 3 connect, 2 timeout", status(), (), [
        *SERVED, sample("upstream_errors_total", 2.0, backend="a", kind="timeout"),
        sample("upstream_errors_total", 3.0, backend="a", kind="connect")]),
    ("2 streams of a had nothing but heartbeats until timeouts.first_token", status(), (), [
        *SERVED, sample("upstream_errors_total", 2.0, backend="a", kind="only_heartbeats")]),
    ("4 of 10 rejections that were checked afterwards were unnecessary", status(), (), [
        sample("refusals_in_hindsight_total", 4.0, verdict="false"),
        sample("refusals_in_hindsight_total", 6.0, verdict="right"),
        sample("refusals_in_hindsight_total", 99.0, verdict="unjudged")]),
    ("10 of 100 first tokens of bucket document came after its target", status(), (), [
        sample("admitted_total", 900.0, bucket="chat", outcome="met"),
        sample("admitted_total", 10.0, bucket="document", outcome="missed"),
        sample("admitted_total", 90.0, bucket="document", outcome="met")]),
    ("late by more than 20 ms in 5% of 200 measurements", status(), (), [
        sample("event_loop_lag_seconds_count", 200.0),
        sample("event_loop_lag_seconds_bucket", 190.0, le="0.02")]),
    ("sheds 2 of 3 service classes: it is short of open files",
     status(shedding_classes=2, short_of=["open_files"]), (), ()),
    ("900 of 1000 file descriptors", status(), (), [
        MetricSample("process_open_fds", {}, 900.0), MetricSample("process_max_fds", {}, 1000.0)]),
    ("worker 1 (pid 1) does not answer",
     {"ready": True, "workers": [worker(0, status()), worker(1, None)]}, (), ()),
    ("worker 0 has died 2 times", {"ready": True, "workers": [worker(0, status(), 2)]}, (), ()),
    ("sheds 1 of 3 service classes",  # both workers do
     {"ready": True, "workers": [
         worker(n, status(shedding_classes=1, short_of=["event_loop"])) for n in (0, 1)]}, (), ()),
    ("no connection to other proxies through redis: refused", status(
        share={"links": [{"name": "redis", "connected": False, "trouble": "refused"}]}), (), ()),
    ("capture dropped 3 of 10 rows",
     status(capture={"path": "c", "written": 7, "dropped": 3, "stopped": None}), (), ()),
    ("usage to u stopped: No space left",
     status(usage={"path": "u", "written": 7, "dropped": 0, "stopped": "No space left"}), (), ()),
    ("capture to c stopped: disk full",
     status(capture={"path": "c", "written": 7, "dropped": 3, "stopped": "disk full"}), (), ()),
    ("reload failed, keeping the running one: x",
     status(config={"last_reload": "reload failed, keeping the running one: x",
                    "needs_restart": []}), (), ()),
    ("changes of listen are not in force",
     status(config={"last_reload": "unchanged", "needs_restart": ["listen"]}), (), ()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told", "facts", "samples"), CASES, ids=[c[0] for c in CASES])
def test_each_check(
    text: str,
    told: dict[str, Any],
    facts: Sequence[dict[str, Any]],
    samples: Sequence[MetricSample],
) -> None:
    found = examine(of_case((text, told, facts, samples)))
    assert len(found) == 1, found
    assert any(text in one.text for one in found)


def learned(name: str, scale: float, model: str = "m", tokens: int = 50_000) -> dict[str, Any]:
    cost = {"observations": 100, "scale": 3 * [scale], "relative_error": 0.1,
            "proven_tokens": tokens}  # fmt: skip
    return backend(name, models=[model], prefill_cost=cost)


def speeds_of(*backends: dict[str, Any], **slowness: list[float]) -> list[str]:
    """Return what is said of the speeds of backends, with what prompts of known hits took."""
    facts = [fact(backend["name"]) for backend in backends]
    ended = {name: {"slowness": times, "ended_after_s": []} for name, times in slowness.items()}
    found = examine(Scene(status(*backends), facts, SERVED, outcomes={"backends": ended}))
    return [one.text for one in found]


def test_backends_of_other_models_may_be_slower() -> None:
    backends = [learned("a", 1.0, "small"), learned("b", 10.0, "large")]
    times = {"a": [1.0, 1.0], "b": [10.0, 10.0], "c": [3.5, 3.5]}
    assert speeds_of(*backends, **times) == []
    (text,) = speeds_of(*backends, learned("c", 3.5, "large"), **times)
    assert text.startswith("b needs 2.9 times as long as c for the same work (10,000 prompt tokens")


@pytest.mark.parametrize(
    ("tokens", "slowness"),
    [
        (50_000, []),  # all hits were only believed
        (50_000, [1.0, 1.0, 9.0, 9.0, 9.0]),  # hits that are known say that it is as fast
        (50_000, [4.0]),
        (300, [4.0, 4.0, 4.0]),  # no prompt came near the length of the claim
    ],
)
def test_no_server_is_called_slow_by_what_was_not_measured(
    tokens: int, slowness: list[float]
) -> None:
    a, b = learned("a", 1.0, tokens=tokens), learned("b", 4.0, tokens=tokens)
    assert speeds_of(a, b, a=[1.0, 1.0, 1.0], b=slowness) == []
    measured = speeds_of(learned("a", 1.0), learned("b", 4.0), a=[1.0, 1.0], b=[4.0, 4.0])
    assert [text.partition(" times")[0] for text in measured] == ["b needs 4.0"]


def test_every_check_has_a_case() -> None:
    met = {one.check for case in CASES for one in examine(of_case(case))}
    live = {"backends answer", "speed of backends", "models", "other clients", "idle time-outs",
            "flags of backends", "avoided backends", "requests of clients", "clients that left",
            }  # fmt: skip
    assert set(CHECKS) == met | live
    assert examine(Scene(status(), [fact("a"), fact("b")], SERVED)) == []


def test_a_server_that_has_just_restarted_is_not_said_to_hide_its_cache() -> None:
    told = status(backend("a", prefix_index={"mode": "believed", "answers": 0}), backend("b"))
    says = [*SERVED, sample("cached_tokens_answers_total", 77.0, backend="a")]
    assert examine(Scene(told, [fact("a"), fact("b")], says)) == []


def test_a_rejection_has_the_remedy_of_its_cause() -> None:
    flood = [
        sample("tenant_requests_total", 900.0, tenant="acme", status="429"),
        sample("tenant_requests_total", 100.0, tenant="good", status="200"),
        sample("rejects_total", 900.0, bucket="chat", reason="queue_full"),
        sample("responses_total", 1_000.0),
    ]
    first, second = examine(Scene(status(), [fact("a"), fact("b")], flood))
    assert (first.check, second.check) == ("tenants", "rejections")
    assert "tenants.known.acme.tokens_per_s" in first.remedy
    assert second.remedy == first.remedy
    alone = [one for one in flood if one.labels.get("tenant") != "acme"]
    (found,) = examine(Scene(status(), [fact("a"), fact("b")], alone))
    assert found.remedy.startswith("add a GPU")


def test_a_proxy_short_of_cpu_is_no_reason_for_another_gpu() -> None:
    samples = [
        sample("event_loop_lag_seconds_count", 200.0),
        sample("event_loop_lag_seconds_bucket", 100.0, le="0.02"),
        sample("rejects_total", 90.0, bucket="chat", reason="deadline_unattainable"),
        sample("responses_total", 1_000.0),
    ]
    first, second = examine(Scene(status(), [fact("a"), fact("b")], samples))
    assert (first.check, second.check) == ("event loop and memory", "rejections")
    assert second.remedy == first.remedy
    assert "GPU" not in second.remedy


def test_faults_of_clients_and_of_the_proxy_are_none_of_a_server() -> None:
    kinds = ("no_model", "4xx_event", "too_large", "shortage", "draining")
    samples = [sample("upstream_errors_total", 50.0, backend="a", kind=kind) for kind in kinds]
    ended = {
        "tenants": {"acme": {"requests": 100, "left_after_s": [0.5] * 9 + [0.7] * 11},
                    "good": {"requests": 900, "left_after_s": [0.5] * 20}},
        "errors": [["acme", "m", 400, 30], ["good", "m", 400, 30], ["good", "x", 401, 300]],
        "backends": {},
    }  # fmt: skip
    scene = Scene(status(), [fact("a"), fact("b")], [*SERVED, *samples], outcomes=ended)
    assert [(one.severity, one.text) for one in examine(scene)] == [
        ("warning", "30 of 100 requests of tenant acme were wrong: the servers answered 400 for "
                    "model m"),
        ("warning", "tenant acme left 20 of 100 requests before the first token, after 0.70 s in "
                    "the median"),
    ]  # fmt: skip


def test_old_errors_are_over_once_the_window_has_passed() -> None:
    """12 failures before the window: an error since the start, and nothing now."""
    then = [*SERVED, sample("upstream_errors_total", 12.0, backend="b", kind="connect")]
    now = [sample("backend_requests_total", 300.0, backend="a", outcome="ok"),
           sample("backend_requests_total", 300.0, backend="b", outcome="ok"),
           *then[2:]]  # fmt: skip
    whole = Scene(status(), [fact("a"), fact("b")], now, None, then)
    assert [one.check for one in examine(whole)] == ["errors of backends"]
    recent = whole.recent()
    assert recent.total("forebay_backend_requests_total", backend="b") == 200.0
    assert recent.total("forebay_upstream_errors_total") == 0.0
    assert examine(recent) == []
    anew = Scene(status(), [], [sample("responses_total", 5.0)], None, SERVED)
    assert anew.recent().total("forebay_responses_total") == 5.0  # it has restarted


def test_the_metrics_of_five_minutes_ago() -> None:
    at = 0.0
    past = PastMetrics(lambda: b"now %d" % at, lambda: at)
    assert past.ago(300.0) == b""
    for minute in range(20):
        at = minute * 60.0
        past.take()
    at += 10.0
    assert past.ago(300.0) == b"now 840"  # the latest that is old enough
    assert past.age(300.0).endswith(b"\nforebay_snapshot_age_seconds 310.000\n")
    assert past.ago(1_500.0) == past.age(1_500.0) == b""  # before the start of the process
    for minute in range(20, 200):
        at = minute * 60.0
        past.take()
    assert past.ago(1e6) == b"now %d" % (79 * 60)  # the oldest that is kept


async def test_the_window_is_read_from_a_running_proxy() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(start_engine(EngineConfig(seed=1)))
        on = await stack.enter_async_context(stage([engine.url], each=THRESHOLD))
        await chats(on, 3)
        await asyncio.sleep(61.0)
        await chats(on, 6)
        counts = {}
        for query in ("", "?ago=30", "?ago=3000"):
            async with on.client.get(f"{on.proxy.admin_url}/metrics{query}") as response:
                scene = Scene({}, [], samples_of(await response.text()))
            counts[query] = scene.total("forebay_responses_total")
        assert counts == {"": 9.0, "?ago=30": 3.0, "?ago=3000": 0.0}


def test_the_work_of_several_workers_counts_together() -> None:
    busy = status(backend("a", in_flight=6), backend("b"))
    told = {"ready": True, "workers": [worker(0, busy), worker(1, busy)]}
    assert examine(Scene(told, [fact("a", engine={"running": 12.0})])) == []
    assert examine(Scene(told, [fact("a", engine={"running": 40.0})]))[0].check == "other clients"


class TestFile:
    def found(self, tmp_path: Path, text: str, **environ: str) -> list[str]:
        path = tmp_path / "forebay.yaml"
        path.write_text(text)
        told = Scene(status(), [fact("a"), fact("b")])
        return [one.text for one in examine_file(path, environ, told)]

    BACKENDS = "backends: [{name: a, url: 'http://h:1'}, {name: b, url: 'http://h:2'}]\n"

    def test_nothing(self, tmp_path: Path) -> None:
        assert self.found(tmp_path, self.BACKENDS) == []

    def test_mistakes(self, tmp_path: Path) -> None:
        assert "did you mean buckets?" in self.found(tmp_path, "bukets: []")[0]
        keys = f"tenants: {{keys: {tmp_path / 'keys'}}}\n"
        assert "cannot read" in self.found(tmp_path, self.BACKENDS + keys)[0]
        (tmp_path / "keys").write_text("t: short\n")
        (tmp_path / "keys").chmod(0o644)
        short, readable = self.found(tmp_path, self.BACKENDS + keys, FOREBAY_CACHE_SECRET="x" * 32)
        assert "1 API keys are shorter than" in short
        assert "can be read by other users (mode 644)" in readable

    def test_keys_that_are_not_in_force(self, tmp_path: Path) -> None:
        other = "backends: [{name: a, url: 'http://h:1', max_concurrency: 8}, {name: c, url: 'http://h:2'}]"
        found = self.found(tmp_path, other)
        assert sorted(found) == [
            "max_concurrency of a is 8 in the file, 640 in force",
            "the file has backend c; the running proxy has not",
            "the running proxy has backend b; the file has not",
        ]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        text = f"{self.BACKENDS}capture: {{path: {tmp_path}/none/c.jsonl}}\n"
        found = self.found(tmp_path, text, FOREBAY_CAPTURE_SALT="s" * 32)
        assert found == [f"capture.path: there is no folder {tmp_path}/none"]


def test_a_sleeping_backend() -> None:
    asleep = backend("a", up=False, state="asleep", why="vLLM's sleep mode")
    found = list(states(Scene(status(asleep, backend("b")), [])))
    assert found == [
        (
            "warning",
            "a has been asleep for 9 s: vLLM's sleep mode",
            "wake it by POST /wake_up when it is needed",
        )
    ]


def test_a_backend_that_was_ejected_for_its_slowness() -> None:
    """Its log says nothing of a GPU that runs at a low clock."""
    why = "first tokens 3.1 times as late as predicted"
    slow = backend("a", state="half_open", why=why)
    ((_, text, remedy),) = states(Scene(status(slow, backend("b")), []))
    assert text.endswith(why)
    assert remedy.startswith("check its clocks, temperature and other users; it comes back")


def test_a_drain_that_was_forgotten() -> None:
    """Half of the fleet was out of use, and nothing was found."""
    drained = backend("a", up=False, draining=True)
    found = list(states(Scene(status(drained, backend("b")), [])))
    text = "a is draining: it gets no new work"
    assert found == [("info", text, "`forebay drain a --undo` takes it back")]


def test_the_cause_of_rejections_is_not_the_load_while_a_server_is_missing() -> None:
    """The remedy was a GPU more, or more processor time for a loop that was late by 20 ms."""
    down = backend("a", up=False, state="down", why="no connection", reason="probes_failed")
    late = [
        sample("event_loop_lag_seconds_count", 100.0),
        sample("event_loop_lag_seconds_bucket", 95.0, le="0.02"),
        sample("rejects_total", 30.0, bucket="chat", reason="deadline_unattainable"),
        sample("responses_total", 100.0),
    ]
    scene = Scene(status(down, backend("b")), [], late)
    (remedy,) = [one.remedy for one in examine(scene) if one.check == "rejections"]
    assert remedy == "a: start it, and check that the proxy reaches its URL"


def test_a_late_start_is_no_fault() -> None:
    """The first doctor of a new user found one late measurement of 85."""
    late = [
        sample("event_loop_lag_seconds_count", 85.0),
        sample("event_loop_lag_seconds_bucket", 84.0, le="0.02"),
    ]
    assert examine(Scene(status(), [fact("a"), fact("b")], late)) == []


def test_a_flood_for_which_the_proxy_sheds_others_stands_first() -> None:
    """The first line was the proxy's lack of processor time."""
    flood = [
        sample("tenant_requests_total", 900.0, tenant="acme", status="429"),
        sample("tenant_requests_total", 100.0, tenant="good", status="200"),
    ]
    found = examine(Scene(status(shedding_classes=1, short_of=["event_loop"]), [], flood))
    assert [one.check for one in found[:2]] == ["tenants", "event loop and memory"]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Scene(status(backend("a", up=False, state="down", why="no connection")), [])
    monkeypatch.setattr(doctor_cli, "ask_all", lambda admin, since: told)
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("ERROR    no backend takes work, so every request gets 503 (a has ")
    assert lines[0].endswith("9 s: no connection). Remedy: start it, and check that the proxy "
                             "reaches its URL.")  # fmt: skip
    assert "Checked 1 backend with" in said.err
    paths = "exact for /v1/chat/completions; corrected for /v1/responses."
    assert f"Prefix index of a: {paths}" in " ".join(said.err.split())
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["prefix_index"]["a"]["/v1/responses"] == "corrected"
    assert data["checked"] == list(CHECKS)
    assert data["findings"][0]["severity"] == "error"
    told = Scene(status(), [fact("a"), fact("b")])
    monkeypatch.setattr(doctor_cli, "ask_all", lambda admin, since: told)
    assert main(["doctor", "--quiet"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    observing = Scene(status(mode="observe"), [fact("a"), fact("b")])
    monkeypatch.setattr(doctor_cli, "ask_all", lambda admin, since: observing)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("INFO     the proxy only observes: it queues and rejects nothing.")
    assert said.err.startswith("Checked 2 backends with ")
    assert "Nothing found." in said.err.splitlines()[0]
    (tmp_path / "wrong.yaml").write_text("listn: 1\n")
    assert main(["doctor", "--config", str(tmp_path / "wrong.yaml")]) == 1
    assert "wrong.yaml: listn: unknown key" in capsys.readouterr().out


GAIN = "the present set-up with flag 2048 would have been better", "start vLLM with the flag"


@pytest.mark.parametrize(
    ("capture", "threshold", "gain", "said"),
    [
        ({"stopped": None, "dropped": 0}, None, GAIN, True),
        ({"stopped": None, "dropped": 0}, None, None, False),  # the twin has no advice
        (None, None, GAIN, False),
        ({"stopped": None, "dropped": 0}, 2048, GAIN, False),
    ],
)
def test_what_a_flag_would_have_brought(
    capture: dict[str, Any] | None,
    threshold: int | None,
    gain: tuple[str, str] | None,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Doctor named the flag that was missing, and not what it costs these users."""
    asked: list[tuple[Any, ...]] = []

    def largest_gain(*arguments: Any) -> tuple[str, str] | None:
        asked.append(arguments)
        return gain

    monkeypatch.setattr(doctor_cli, "from_lab", {"largest_gain": largest_gain}.__getitem__)
    ends = [backend(name, long_prefill_token_threshold=threshold) for name in "ab"]
    told = Scene(status(*ends, capture=capture), [fact("a"), fact("b")])
    monkeypatch.setattr(doctor_cli, "ask_all", lambda admin, since: told)
    assert main(["doctor", "--since", "10m"]) == 0  # no fault
    out = capsys.readouterr().out
    assert (f"INFO     {GAIN[0]}. Remedy: {GAIN[1]}." in out) is said
    possible = capture is not None and threshold is None
    assert asked == [("http://127.0.0.1:9090", 600.0, None)] * possible


class Counted(dict[str, str]):
    looks = 0

    def items(self) -> Any:
        Counted.looks += 1
        return super().items()


def test_a_question_about_one_backend_looks_at_its_samples_only() -> None:
    names = [f"b{number}" for number in range(100)]
    kinds = ("forebay_backend_requests_total", "forebay_upstream_errors_total")
    samples = [
        MetricSample(kind, Counted(backend=name, kind="timeout"), 2.0)
        for name in names
        for kind in kinds
    ]
    scene = Scene(
        {"backends": [{"name": name, "prefill_cost": {"observations": 1}} for name in names]},
        [],
        samples,
    )
    assert all(scene.requests(name) == 2.0 for name in names)
    assert all(scene.by(kinds[1], "kind", backend=name) == {"timeout": 2.0} for name in names)
    assert Counted.looks <= 2 * len(samples)
