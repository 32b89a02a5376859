"""Check a running proxy and its backends: one function for each check.

Each yields findings: the fault with its figures, and a remedy. `CHECKS` lists all functions, causes
before effects. Counters cover the window of the scene.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from forebay.proxy.config.advice import COMPUTED_WHOLE, THRESHOLD_REMEDY
from forebay.proxy.diagnose.doctor.around import (
    client_network,
    heartbeats_only,
    restarts,
    tokenizers,
)
from forebay.proxy.diagnose.doctor.caches import (
    chunks,
    isolation,
    prefix_caching,
    short_prompts,
    token_details,
)
from forebay.proxy.diagnose.doctor.causes import (
    MANY,
    SOME,
    document_stream,
    floods,
    kv_full,
    rejections,
)
from forebay.proxy.diagnose.doctor.finding import FEW, Finding, Found
from forebay.proxy.diagnose.scene import Scene

SLOWER = 1.5
"""Factor above the prefill of the fastest backend, on top of the learned error of both, which is a
fifth after two prompts. Equal GPUs differ by less than a tenth."""
LEARNED = 2  # prefills from which the learned speed of a backend is compared
OFF = 1.5  # factor above the predicted time to first token
LAG_S = "0.02"  # bound of the histogram above which the event loop is late
FULL = 0.8  # share of the file descriptors
OLDEST_VLLM = (0, 11)


def states(scene: Scene) -> Found:
    """Every backend takes work."""
    worst: dict[str, dict[str, object]] = {}
    for backend in (b for status in scene.statuses() for b in status["backends"]):
        if backend.get("state", "up") != "up" and not backend["draining"]:
            worst[backend["name"]] = backend
    none_up = not any(b["up"] for b in scene.backends().values())
    for name, backend in worst.items():
        state = str(backend["state"])
        text = f"{name} has been {state.replace('_', '-')} for {backend['state_s']:.0f} s: "
        remedy = "read its log; it comes back after a trial"
        if state == "down":
            remedy = "start it, and check that the proxy reaches its URL"
            if backend.get("reason") == "probes_failed":
                remedy = "restart it if it hangs; else check that the proxy reaches its URL"
        yield "error" if state == "down" else "warning", f"{text}{backend['why']}", remedy
    if none_up:
        yield "error", "no backend takes work: every request gets 503", "start a backend"


def speeds(scene: Scene) -> Found:
    """No backend is much slower than another backend of the same models."""
    by_models: dict[tuple[str, ...], dict[str, tuple[float, dict[str, Any]]]] = {}
    for name, b in scene.backends().items():
        cost = b["prefill_cost"]
        if cost["observations"] >= LEARNED:
            costs = by_models.setdefault(tuple(b.get("models") or ()), {})
            costs[name] = cost["seconds_10k_tokens"], cost
    for costs in by_models.values():
        yield from _slow_ones(costs)


def _slow_ones(costs: dict[str, tuple[float, dict[str, Any]]]) -> Found:
    """Compare the seconds for 10,000 tokens of backends that should be equal."""
    fastest = min(costs, key=lambda name: costs[name][0])
    least_s, of_fastest = costs[fastest]
    for name, (takes_s, cost) in costs.items():
        error = cost["relative_error"] + of_fastest["relative_error"]
        if takes_s > SLOWER * (1.0 + error) * least_s:
            yield (
                "warning",
                f"{name} needs {takes_s / least_s:.1f} times as long as {fastest} for the same "
                f"work (10,000 prompt tokens: {takes_s:.2f} and {least_s:.2f} s, learned "
                f"from {cost['observations']} and {of_fastest['observations']} prefills)",
                "check its clocks, temperature and other users; a slower kind of GPU is no fault",
            )


def predictions(scene: Scene) -> Found:
    """First tokens come when they were predicted."""
    name = "forebay_backend_time_to_first_token_seconds"
    for backend in scene.backends():
        count = scene.total(f"{name}_count", backend=backend)
        real_s = scene.total(f"{name}_sum", backend=backend)
        predicted_s = scene.total(
            "forebay_backend_predicted_time_to_first_token_seconds_total", backend=backend
        )
        if count >= FEW and real_s > OFF * predicted_s:
            yield (
                "warning",
                f"first tokens of {backend} took {real_s / max(predicted_s, 1e-9):.1f} times as "
                f"long as predicted ({count:.0f} requests)",
                "look for other clients of this server, and for flags that the configuration "
                "does not state (long_prefill_token_threshold, max_concurrency)",
            )


def long_prompts(scene: Scene) -> Found:
    """Long prompts keep no short ones waiting, and wait for no reserved backend."""
    names = [name for name, b in scene.backends().items() if b.get("long_prompts_block")]
    if not names:
        return
    text = f"{', '.join(names)}: {COMPUTED_WHOLE}"
    waits = scene.by("forebay_wait_seconds_total", "reason")
    kept_s, all_s = waits.get("reserved_for_chats", 0.0), sum(waits.values())
    now = scene.total("forebay_waiting_requests", reason="reserved_for_chats")
    if now or kept_s >= max(1.0, MANY * all_s):
        text += (
            f"; documents waited {kept_s:.1f} s for the backend that is reserved for chats, "
            f"{kept_s / max(all_s, 1e-9):.0%} of all time in the queue; {now:.0f} wait for it now"
        )
    yield "warning", text, f"{THRESHOLD_REMEDY} at every backend (`forebay fleet up` does both)"


def models(scene: Scene) -> Found:
    """Every alias stands for a model that is served."""
    unserved = {
        a: name for status in scene.statuses() for a, name in status["unserved_names"].items()
    }
    for alias, name in unserved.items():
        yield (
            "error",
            f"models: {alias} stands for {name}, which no backend serves",
            "correct the name, or start a backend that serves it",
        )


def versions(scene: Scene) -> Found:
    """All backends run the same version of vLLM, and not an old version."""
    by_backend = {fact["name"]: fact["version"] for fact in scene.facts if fact["version"]}
    for name, text in by_backend.items():
        parts = text.split(".")[:2]
        if all(part.isdigit() for part in parts) and tuple(map(int, parts)) < OLDEST_VLLM:
            yield (
                "warning",
                f"{name} runs vLLM {text}; {'.'.join(map(str, OLDEST_VLLM))} is the oldest that "
                "was tried",
                "upgrade vLLM",
            )
    if len(set(by_backend.values())) > 1:
        pairs = ", ".join(f"{name} {text}" for name, text in by_backend.items())
        yield "warning", f"the backends run different versions ({pairs})", "run one version"


def unanswered(scene: Scene) -> Found:
    """Every backend answers /version, /v1/models and /metrics."""
    hung = {name for name, b in scene.backends().items() if b.get("reason") == "probes_failed"}
    for fact in scene.facts:
        if not fact["answers"] and fact["name"] in hung:
            continue  # `states` has reported it with its remedy
        if not fact["answers"]:
            text = f"{fact['name']} answers none of /version, /v1/models and /metrics"
            yield "error", text, "start it, and check that the proxy reaches its URL"
        elif fact["models"] is None:
            text = f"{fact['name']} does not list its models"
            yield "warning", text, "give its API key in FOREBAY_UPSTREAM_API_KEY, if it has one"


def other_clients(scene: Scene) -> Found:
    """Backends work for this proxy only."""
    for fact in scene.facts:
        if not (engine := fact["engine"]) or "running" not in engine:
            continue
        there = engine["running"] + engine.get("waiting", 0.0)
        ours = scene.sent_now(fact["name"])
        if there > 2 * ours + FEW / 4:
            yield (
                "warning",
                f"{fact['name']} has {there:.0f} requests, and the proxy sent it {ours}",
                "send all requests through the proxy; several proxies need `share`",
            )


def preemptions(scene: Scene) -> Found:
    """The KV caches have room for the requests of the proxy."""
    for fact in scene.facts:
        count = (fact["engine"] or {}).get("preemptions", 0.0)
        served = scene.requests(fact["name"])
        if count > max(1.0, SOME * served):
            yield (
                "warning",
                f"{fact['name']} preempted requests {count:.0f} times since its start; the proxy "
                f"sent it {served:.0f}: its KV cache is too small for them",
                "lower max_concurrency, or give vLLM more memory (--gpu-memory-utilization)",
            )


def backend_errors(scene: Scene) -> Found:
    """Requests to backends succeed."""
    for name in scene.backends():
        kinds = scene.by("forebay_upstream_errors_total", "kind", backend=name)
        kinds.pop("only_heartbeats", None)  # a finding of its own
        total, served = sum(kinds.values()), scene.requests(name)
        if total > max(1.0, SOME * served):
            counts = ", ".join(f"{count:.0f} {kind}" for kind, count in kinds.items())
            text = f"{total:.0f} of {served + total:.0f} requests to {name} failed: {counts}"
            yield "error", text, "read its log around the time of the errors"


def late(scene: Scene) -> Found:
    """Admitted requests meet their target."""
    for bucket in scene.by("forebay_admitted_total", "bucket"):
        outcomes = scene.by("forebay_admitted_total", "outcome", bucket=bucket)
        missed = outcomes.get("missed", 0.0)
        seen = missed + outcomes.get("met", 0.0)
        if seen >= FEW and missed > MANY * seen:
            yield (
                "warning",
                f"{missed:.0f} of {seen:.0f} first tokens of bucket {bucket} came after its target",
                "read `forebay explain --slowest 10`: it says what took the time",
            )


def event_loop(scene: Scene) -> Found:
    """The proxy itself has enough processor time, memory and descriptors."""
    # Processor time: the event loop runs late.
    name = "forebay_event_loop_lag_seconds"
    count = scene.total(f"{name}_count")
    over = count - scene.total(f"{name}_bucket", le=LAG_S)
    if over > SOME * count:
        yield (
            "warning",
            f"the proxy's event loop was late by more than {float(LAG_S) * 1e3:.0f} ms in "
            f"{over / count:.0%} of {count:.0f} measurements",
            "give the proxy more processor time, or start it with --workers",
        )
    # Memory, and other resources that make the proxy shed load.
    for status in scene.statuses():
        if shed := status["shedding_classes"]:
            short = ", ".join(status["short_of"]).replace("_", " ") or "something"
            text = f"the proxy sheds {shed} of 3 service classes: it is short of {short}"
            yield "error", text, "start it with --workers, or on a larger machine"
    # File descriptors.
    used, most = scene.total("process_open_fds"), scene.total("process_max_fds")
    if most and used > FULL * most:
        text = f"{used:.0f} of {most:.0f} file descriptors are in use"
        yield "warning", text, "raise LimitNOFILE in the unit, or `ulimit -n`"


def processes(scene: Scene) -> Found:
    """Every worker and every other proxy answers."""
    for worker in scene.status.get("workers", ()):
        if worker["status"] is None:
            text = f"worker {worker['worker']} (pid {worker['pid']}) does not answer"
            yield "error", text, "read the log; it is restarted when it has died"
        if worker["restarts"]:
            text = f"worker {worker['worker']} has died {worker['restarts']} times"
            yield "warning", text, "read the log before each restart"
    for status in scene.statuses():
        for link in status["share"]["links"]:
            if not link["connected"]:
                trouble = f": {link['trouble']}" if link["trouble"] else ""
                text = f"no connection to other proxies through {link['name']}{trouble}"
                yield "warning", text, "check `share`; meanwhile each proxy decides alone"


def recordings(scene: Scene) -> Found:
    """The capture and the usage ledger are written."""
    for what, status in product(("capture", "usage"), scene.statuses()):
        file = status[what]
        if file and file["stopped"]:
            yield "error", f"{what} to {file['path']} stopped: {file['stopped']}", "make room"
        elif file and file["dropped"]:
            rows = file["written"] + file["dropped"]
            text = f"{what} dropped {file['dropped']} of {rows} rows: {file['path']} is too slow"
            yield "warning", text, "write to a faster disk"


def reloads(scene: Scene) -> Found:
    """The configuration file is in force."""
    last = scene.statuses()[0]["config"] if scene.statuses() else None
    if last and last["needs_restart"]:
        keys = ", ".join(last["needs_restart"])
        yield "warning", f"changes of {keys} are not in force", "restart the proxy"
    if last and last["last_reload"].startswith("reload failed"):
        remedy = "correct the file; `forebay proxy --config FILE --check-config` finds mistakes"
        yield "error", last["last_reload"], remedy


def mode(scene: Scene) -> Found:
    """The proxy shapes traffic."""
    if any(status.get("mode") == "observe" for status in scene.statuses()):
        yield (
            "warning",
            "the proxy only observes: it queues and rejects nothing",
            "set `mode: shape` when you have seen enough; the running proxy follows",
        )


CHECKS: Mapping[str, Callable[[Scene], Found]] = {
    "backends take work": states,
    "backends answer": unanswered,
    "restarts": restarts,
    "heartbeats": heartbeats_only,
    "event loop and memory": event_loop,
    "network of clients": client_network,
    "speed of backends": speeds,
    "prefix caching": prefix_caching,
    "tokenizers": tokenizers,
    "tenants": floods,
    "room for KV cache": kv_full,
    "long documents": document_stream,
    "predictions": predictions,
    "length of prompts": short_prompts,
    "chunks of hybrid models": chunks,
    "cache isolation": isolation,
    "cached tokens in answers": token_details,
    "long prompts": long_prompts,
    "models": models,
    "vLLM versions": versions,
    "other clients": other_clients,
    "KV cache": preemptions,
    "errors of backends": backend_errors,
    "rejections": rejections,
    "late first tokens": late,
    "workers and other proxies": processes,
    "capture and usage ledger": recordings,
    "reloads": reloads,
    "mode": mode,
}
"""The checks by the name under which they are reported."""


def examine(scene: Scene) -> list[Finding]:
    """Return the findings of all checks, errors first, and each of them once for all workers."""
    findings = [Finding(name, *fields) for name, check in CHECKS.items() for fields in check(scene)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.severity != "error")
