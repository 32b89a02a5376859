"""Check the servers: state, models, speed, errors and flags, and the network before them.

A server is blamed only for measurements: no speed is compared by prompts whose cache hit
was only believed, and no answer that the client caused counts as a fault of the server.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from forebay.proxy.core.learn.cost import features
from forebay.proxy.core.model import INSTANT_S
from forebay.proxy.diagnose.doctor.finding import FEW, SOME, Found
from forebay.proxy.diagnose.scene import Scene
from forebay.traces.ground.command_line.messages import SHOWN

SLOWER = 1.5
"""Factor above the prefill of the fastest backend, on top of the learned error of both, which is a
fifth after two prompts. Equal GPUs differ by less than a tenth."""
LEARNED = 2  # prefills from which the learned speed of a backend is compared
TOKENS = 10_000  # the prompt for which speeds are compared, or the longest that both have computed
LEAST_TOKENS = 1_000  # below that the time of a prefill says little about a GPU
AVOIDED = 0.02  # share of the requests of the fastest backend
OFF = 1.5  # factor above the predicted time to first token
NOT_OFF = 1.1  # the same of a bucket that is as fast as predicted
ALIKE = 0.1  # share by which the silences of a time-out differ at most
SILENCES = 3  # connections that ended after the same silence, from which a time-out is named
LEAST_SILENCE_S = 0.5
FIRST_TOKEN = "forebay_backend_time_to_first_token_seconds"
PREDICTED = "forebay_backend_predicted_time_to_first_token_seconds_total"
OTHERS_FAULTS = ("no_model", "4xx_event", "too_large", "shortage", "draining", "only_heartbeats")
"""Kinds of failures that are no fault of the server, or have a finding of their own."""


def states(scene: Scene) -> Found:
    """Every backend takes work."""
    out = list(_out_of_rotation(scene))
    backends = scene.backends()
    draining = [name for name, backend in backends.items() if backend["draining"]]
    if any(backend["up"] for backend in backends.values()):
        yield from out
        for name in draining:
            text = f"{name} is draining: it gets no new work"
            yield "info", text, f"`forebay drain {name} --undo` takes it back"
        return
    # One finding for one cause.
    whys = [text for _, text, _ in out] + [f"{name} is draining" for name in draining]
    remedies = [remedy for _, _, remedy in out] + ["take a drained backend back"] * bool(draining)
    yield (
        "error",
        f"no backend takes work, so every request gets 503 ({'; '.join(whys[:SHOWN])})",
        "; ".join(dict.fromkeys(remedies)) or "start a backend",
    )


def _out_of_rotation(scene: Scene) -> Found:
    """Yield each backend that takes no work, unless an operator drains it."""
    worst: dict[str, dict[str, Any]] = {}
    for backend in (b for status in scene.statuses() for b in status["backends"]):
        if backend.get("state", "up") != "up" and not backend["draining"]:
            worst[backend["name"]] = backend
    for name, backend in worst.items():
        state = backend["state"]
        text = f"{name} has been {state.replace('_', '-')} for {backend['state_s']:.0f} s: "
        look = "check its clocks, temperature and other users"
        remedy = look if " times as late" in str(backend["why"]) else "read its log"
        remedy += "; it comes back after a trial"
        if state == "down":
            remedy = "start it, and check that the proxy reaches its URL"
            if backend.get("reason") == "probes_failed" and backend["why"] != "no connection":
                remedy = "restart it if it hangs; else check that the proxy reaches its URL"
        if state == "asleep":
            remedy = "wake it by POST /wake_up when it is needed"
        yield "error" if state == "down" else "warning", f"{text}{backend['why']}", remedy


def lost_models(scene: Scene) -> Found:
    """Backends serve the models that they served before."""
    for name, backend in scene.backends().items():
        if lost := backend.get("lost_model"):
            now = ", ".join(backend["models"] or ["no model"])
            yield (
                "error",
                f"{name} serves {now} and no longer {lost}, and has had no request since",
                f"start it with {lost} again; if the change is meant, ask it for its new model",
            )


def idle_timeouts(scene: Scene) -> Found:
    """Nothing between the proxy and the backends closes connections on which nothing is sent."""
    for name, silence_s, count in _same_silences(scene):
        yield (
            "error",
            f"{count} connections to {name} ended after {silence_s:.1f} s of silence: something "
            "between the proxy and the server closes idle connections",
            "raise the idle time-out of the load balancer or firewall there above the longest "
            "prefill, or let the proxy connect to the server itself",
        )


def _same_silences(scene: Scene) -> Iterator[tuple[str, float, int]]:
    """Yield each backend with connections that ended after the same silence, and how many."""
    for name, backend in scene.outcomes.get("backends", {}).items():
        lost = scene.total("forebay_upstream_errors_total", backend=name, kind="before_first_byte")
        silences = sorted(s for s in backend["ended_after_s"] if s >= LEAST_SILENCE_S)
        middle_s = silences[len(silences) // 2] if silences else 0.0
        same = [s for s in silences if abs(s - middle_s) <= ALIKE * middle_s]
        if len(same) >= SILENCES and len(same) > len(silences) / 2 and lost >= SILENCES:
            yield name, middle_s, len(same)


def speeds(scene: Scene) -> Found:
    """No backend is much slower than another backend of the same models."""
    for name, fastest, tokens, times in _slower_ones(scene):
        slow, fast = _slowness(scene, name), _slowness(scene, fastest)
        if len(slow) < LEARNED or len(fast) < LEARNED or _low(slow) <= SLOWER * _low(fast):
            continue  # the belief is not confirmed by prompts whose cache hits are known
        costs = [scene.backends()[backend]["prefill_cost"] for backend in (name, fastest)]
        error = sum(cost["relative_error"] for cost in costs)
        if times > SLOWER * (1.0 + error):
            mine_s, least_s = (_prefill_s(cost, tokens) for cost in costs)
            yield (
                "warning",
                f"{name} needs {times:.1f} times as long as {fastest} for the same work "
                f"({tokens:,.0f} prompt tokens: {mine_s:.2f} and {least_s:.2f} s, learned from "
                f"{costs[0]['observations']} and {costs[1]['observations']} prefills)",
                "check its clocks, temperature and other users; a slower kind of GPU is no fault",
            )


def avoided(scene: Scene) -> Found:
    """No backend gets nothing because it is thought to be slow."""
    measured = {text.partition(" ")[0] for _, text, _ in speeds(scene)}
    for name, fastest, _, times in _slower_ones(scene):
        if name in measured:
            continue
        backend, sent = scene.backends()[name], scene.requests(fastest)
        takes_work, got = backend["up"] and not backend["draining"], scene.requests(name)
        if takes_work and times > SLOWER and sent >= FEW and got <= AVOIDED * sent:
            yield (
                "warning",
                f"{name} got {got:.0f} requests, {fastest} {sent:.0f}: it is thought to be "
                f"{times:.1f} times as slow ({backend['prefill_cost']['observations']} prefills)",
                "check its clocks, temperature and other users; a hundredth of the short prompts "
                "tries it",
            )


def _slower_ones(scene: Scene) -> Iterator[tuple[str, str, float, float]]:
    """Yield each backend, the fastest of its models, tokens, and how many times as slow it is."""
    by_models: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, backend in scene.backends().items():
        cost = backend["prefill_cost"]
        if cost["observations"] >= LEARNED and cost["proven_tokens"] >= LEAST_TOKENS:
            by_models.setdefault(tuple(backend.get("models") or ()), {})[name] = cost
    for costs in by_models.values():
        tokens = min(TOKENS, *(cost["proven_tokens"] for cost in costs.values()))
        takes_s = {name: _prefill_s(cost, tokens) for name, cost in costs.items()}
        fastest = min(takes_s, key=lambda name: takes_s[name])
        for name, mine_s in takes_s.items():
            if name != fastest:
                yield name, fastest, tokens, mine_s / takes_s[fastest]


def _prefill_s(cost: dict[str, Any], tokens: float) -> float:
    """Return the learned seconds of a prompt of which nothing is cached."""
    terms = zip(cost["scale"], features(tokens, tokens), strict=True)
    return float(sum(scale * seconds for scale, seconds in terms))


def _slowness(scene: Scene, name: str) -> Sequence[float]:
    backends = scene.outcomes.get("backends", {})
    return backends[name]["slowness"] if name in backends else ()


def _low(values: Sequence[float]) -> float:
    """Return the lower quartile: of requests that mostly met an idle engine."""
    return sorted(values)[len(values) // 4]


def flags(scene: Scene) -> Found:
    """Backends run with the flags that the configuration states."""
    for name, backend in scene.backends().items():
        if _lacks_threshold(scene, name):
            count, times = _latest_bucket(scene, name)
            yield (
                "warning",
                f"{name} seems to run without --long-prefill-token-threshold, which the "
                f"configuration states: first tokens took {times:.1f} times as long as predicted "
                f"({count:.0f} requests), those of the longest prompts did not",
                "start it with --long-prefill-token-threshold "
                f"{backend['long_prefill_token_threshold']}, or take the key out of the "
                "configuration",
            )


def _lacks_threshold(scene: Scene, name: str) -> bool:
    """True if first tokens are late, except for long prompts, which let no others pass.

    They are later than at the other backends, where long prompts delay them a little, too.
    """
    buckets = list(scene.statuses()[0].get("queued", ()))
    if not scene.backends()[name]["long_prefill_token_threshold"] or len(buckets) < 2:
        return False
    long_ones, long_times = _times_predicted(scene, name, buckets[-1])
    others = [_latest_bucket(scene, other)[1] or OFF for other in scene.backends() if other != name]
    usual = max(1.0, min(others, default=OFF))
    late = _latest_bucket(scene, name)[1] > OFF * usual
    return late and long_ones > 0.0 and long_times <= NOT_OFF


def predictions(scene: Scene) -> Found:
    """First tokens come when they were predicted."""
    for name in scene.backends():
        count, times = _latest_bucket(scene, name)
        if times > OFF and not _lacks_threshold(scene, name):
            yield (
                "warning",
                f"first tokens of {name} took {times:.1f} times as long as predicted "
                f"({count:.0f} requests)",
                "look for other clients of this server, and for flags that differ from the "
                "configuration (long_prefill_token_threshold, max_concurrency)",
            )


def _latest_bucket(scene: Scene, name: str) -> tuple[float, float]:
    """Return the first tokens of the latest bucket, and their observed over predicted seconds.

    Few of them say nothing: the first prompts of a bucket have a length that was not known. Nor
    does a delay of an instant, which the step of another prefill takes.
    """
    counts = scene.by(f"{FIRST_TOKEN}_count", "bucket", backend=name)
    latest = 0.0, 0.0
    for bucket in (bucket for bucket, count in counts.items() if count >= FEW):
        count, times = _times_predicted(scene, name, bucket)
        real_s = scene.total(f"{FIRST_TOKEN}_sum", backend=name, bucket=bucket)
        if times > latest[1] and real_s * (1.0 - 1.0 / times) >= INSTANT_S * count:
            latest = count, times
    return latest


def _times_predicted(scene: Scene, name: str, bucket: str) -> tuple[float, float]:
    """Return the number of first tokens, and their observed over predicted seconds."""
    count, real_s = (
        scene.total(f"{FIRST_TOKEN}_{part}", backend=name, bucket=bucket)
        for part in ("count", "sum")
    )
    predicted_s = scene.total(PREDICTED, backend=name, bucket=bucket)
    return count, real_s / max(predicted_s, 1e-9)


def backend_errors(scene: Scene) -> Found:
    """Requests to backends succeed."""
    named = {name for name, _, _ in _same_silences(scene)}
    for name, backend in scene.backends().items():
        kinds = scene.by("forebay_upstream_errors_total", "kind", backend=name)
        for kind in OTHERS_FAULTS:
            kinds.pop(kind, None)
        if name in named:
            kinds.pop("before_first_byte", None)
        if backend.get("state") == "down":
            kinds.pop("connect", None)  # `states` has reported it
        total, served = sum(kinds.values()), scene.requests(name)
        if total > max(1.0, SOME * served):
            counts = ", ".join(f"{count:.0f} {kind}" for kind, count in kinds.items())
            text = f"{total:.0f} of {served + total:.0f} requests to {name} failed: {counts}"
            yield "error", text, "read its log around the time of the errors"
