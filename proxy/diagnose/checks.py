"""Check a running proxy and its backends: one function for each check.

Each yields findings: the fault with its figures, and a remedy. `CHECKS` lists all functions, causes
before effects. Counters cover the window of the scene.
"""

from collections.abc import Callable, Mapping
from itertools import product

from forebay.proxy.config.advice import COMPUTED_WHOLE, THRESHOLD_REMEDY
from forebay.proxy.diagnose.doctor import around, caches, causes, servers
from forebay.proxy.diagnose.doctor.finding import FEW, ORDER, SOME, Finding, Found, Severity
from forebay.proxy.diagnose.scene import Scene

OLDEST_VLLM = (0, 11)


def long_prompts(scene: Scene) -> Found:
    """Long prompts keep no short ones waiting, and wait for no reserved backend."""
    names = [name for name, b in scene.backends().items() if b.get("long_prompts_block")]
    if not names:
        return
    text = f"{', '.join(names)}: {COMPUTED_WHOLE}"
    waits = scene.by("forebay_wait_seconds_total", "reason")
    kept_s, all_s = waits.get("reserved_for_chats", 0.0), sum(waits.values())
    now = scene.total("forebay_waiting_requests", reason="reserved_for_chats")
    severity: Severity = "info"
    if now or kept_s >= max(1.0, causes.MANY * all_s):
        severity = "warning"
        text += (
            f"; documents waited {kept_s:.1f} s for the backend that is reserved for chats, "
            f"{kept_s / max(all_s, 1e-9):.0%} of all time in the queue; {now:.0f} wait for it now"
        )
    yield severity, text, f"{THRESHOLD_REMEDY} at every backend (`forebay fleet up` does both)"


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
    down = {name for name, b in scene.backends().items() if b.get("state") == "down"}
    for fact in scene.facts:
        if not fact["answers"] and fact["name"] in down:
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


def late(scene: Scene) -> Found:
    """Admitted requests meet their target."""
    for bucket in scene.by("forebay_admitted_total", "bucket"):
        outcomes = scene.by("forebay_admitted_total", "outcome", bucket=bucket)
        missed = outcomes.get("missed", 0.0)
        seen = missed + outcomes.get("met", 0.0)
        if seen >= FEW and missed > causes.MANY * seen:
            yield (
                "warning",
                f"{missed:.0f} of {seen:.0f} first tokens of bucket {bucket} came after its target",
                "read `forebay explain --slowest 10`: it says what took the time",
            )


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
            "info",
            "the proxy only observes: it queues and rejects nothing",
            "set `mode: shape` when you have seen enough; the running proxy follows",
        )


CHECKS: Mapping[str, Callable[[Scene], Found]] = {
    "idle time-outs": servers.idle_timeouts,
    "flags of backends": servers.flags,
    "speed of backends": servers.speeds,
    "backends take work": servers.states,
    "lost models": servers.lost_models,
    "backends answer": unanswered,
    "restarts": around.restarts,
    "heartbeats": around.heartbeats_only,
    "tenants": causes.floods,
    "event loop and memory": around.event_loop,
    "network of clients": around.client_network,
    "requests of clients": around.unserved_questions,
    "avoided backends": servers.avoided,
    "prefix caching": caches.prefix_caching,
    "tokenizers": around.tokenizers,
    "room for KV cache": causes.kv_full,
    "long documents": causes.document_stream,
    "predictions": servers.predictions,
    "length of prompts": caches.short_prompts,
    "chunks of hybrid models": caches.chunks,
    "cache isolation": caches.isolation,
    "cached tokens in answers": caches.token_details,
    "long prompts": long_prompts,
    "models": models,
    "vLLM versions": versions,
    "other clients": other_clients,
    "KV cache": preemptions,
    "errors of backends": servers.backend_errors,
    "rejections": causes.rejections,
    "late first tokens": late,
    "clients that left": around.clients_left,
    "workers and other proxies": processes,
    "capture and usage ledger": recordings,
    "reloads": reloads,
    "mode": mode,
}
"""The checks by the name under which they are reported."""
EFFECTS = frozenset(
    {"predictions", "late first tokens", "errors of backends", "rejections", "clients that left"}
)
"""Checks whose findings stand below all others, which may be the cause."""


def examine(scene: Scene) -> list[Finding]:
    """Return the findings of all checks in order, and each of them once for all workers."""
    findings = [Finding(name, *fields) for name, check in CHECKS.items() for fields in check(scene)]
    return sorted(
        dict.fromkeys(findings), key=lambda finding: place_of(finding.check, finding.severity)
    )


def place_of(check: str, severity: Severity) -> tuple[int, bool, int]:
    """Return the place of a finding in the order: errors first, then causes before effects."""
    return ORDER.index(severity), check in EFFECTS, list(CHECKS).index(check)
