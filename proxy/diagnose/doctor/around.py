"""Check the surroundings of the engines: restarts, stalls, API servers, the proxy, the clients.

Each of them makes first tokens late or requests fail, while the queue and the GPUs are innocent.
"""

from forebay.proxy.core.learn.api_server import PRIOR_SERVER_S_PER_TOKEN
from forebay.proxy.diagnose.doctor.finding import FEW, GONE, SOME, Found
from forebay.proxy.diagnose.scene import Scene
from forebay.traces.ground.command_line.quantities import short_time

LARGE = 0.3  # share of the time to first tokens, or of the streams
HALF = 0.5  # share of the time to first tokens
MANY_TIMES = 3.0
"""Factor above the time that vLLM's API server needs next to an H200."""
SAME = 0.2  # an engine whose count differs by this share has other clients, or has restarted
LEAST_S = 0.1  # mean for a request
LAG_S = "0.02"  # bound of the histogram above which the event loop is late
FULL = 0.8  # share of the file descriptors
MANY_ERRORS, LARGE_SHARE = 5, 0.1
"""Requests of a tenant, and their share, that clients left or asked wrongly, for a finding."""
NOT_FOUND = 404
NOT_THEIRS = (401, 403, 407)  # answers to the key of the proxy


def restarts(scene: Scene) -> Found:
    """No engine has restarted, and lost its prefix cache."""
    for fact in scene.facts:
        name, prompts = fact["name"], (fact["engine"] or {}).get("prompts")
        served = scene.total("forebay_backend_requests_total", backend=name, outcome="ok")
        if prompts is None or served < FEW or served - prompts < max(2.0, GONE * served):
            continue
        failed = scene.total("forebay_upstream_errors_total", backend=name)
        lost = f", and {failed:.0f} requests failed with it" if failed else ""
        yield (
            "error" if failed else "warning",
            f"{name} has restarted: it counts {prompts:.0f} prompts, and answered {served:.0f} in "
            f"this time{lost}; its prefix cache is cold{_hits(scene, name)}",
            "read its log for the reason; the cache fills again with new traffic",
        )


def _hits(scene: Scene, name: str) -> str:
    prompt = scene.total("forebay_prompt_tokens_total", backend=name)
    cached = scene.total("forebay_cached_tokens_total", backend=name)
    return f" ({cached / prompt:.0%} of its prompt tokens were cached)" if prompt else ""


def heartbeats_only(scene: Scene) -> Found:
    """No engine has stalled behind the heartbeats of its API server."""
    for name in scene.backends():
        count = scene.total("forebay_upstream_errors_total", backend=name, kind="only_heartbeats")
        if count:
            yield (
                "error",
                f"{count:.0f} streams of {name} had nothing but heartbeats until "
                "timeouts.first_token: its API server lives, its engine may not",
                "restart it if its log shows no progress: /health does not tell; else raise "
                "timeouts.first_token",
            )


def tokenizers(scene: Scene) -> Found:
    """First tokens take their time in the engines, not in the API servers."""
    first = "forebay_backend_time_to_first_token_seconds"
    for fact in scene.facts:
        engine, name = fact["engine"] or {}, fact["name"]
        begun = scene.lifetime(f"{first}_count", backend=name)
        sent = scene.lifetime("forebay_backend_requests_total", backend=name)
        prefills, prompts = engine.get("prefills", 0.0), engine.get("prompts", 0.0)
        if begun < FEW or not prompts or not 1.0 - SAME < prefills / max(sent, 1.0) < 1.0 + SAME:
            continue  # the engine counts other requests than this proxy
        mean_s = scene.lifetime(f"{first}_sum", backend=name) / begun
        engine_s = (engine.get("queue_s", 0.0) + engine.get("prefill_s", 0.0)) / prefills
        usual_s = PRIOR_SERVER_S_PER_TOKEN * engine["prompt_tokens"] / prompts
        rest_s = mean_s - engine_s
        # Time outside of the engine is a finding only if it is long by all three measures.
        if rest_s >= max(LEAST_S, HALF * mean_s, MANY_TIMES * usual_s):
            yield (
                "warning",
                f"first tokens of {name} took {mean_s:.2f} s, {engine_s:.2f} s of it in its engine "
                f"(mean of {begun:.0f}): the rest is its API server, which tokenizes one text "
                f"after another and should need {usual_s * 1e3:.0f} ms, or the network to it",
                "give it processors of its own, start vLLM with --renderer-num-workers or "
                "--api-server-count, or send token ids",
            )


def event_loop(scene: Scene) -> Found:
    """The proxy itself has enough processor time, memory and descriptors."""
    # Processor time: the event loop runs late.
    name = "forebay_event_loop_lag_seconds"
    count = scene.total(f"{name}_count")
    over = count - scene.total(f"{name}_bucket", le=LAG_S)
    if over > max(2.0, SOME * count):  # a start takes a few of them
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


def unserved_questions(scene: Scene) -> Found:
    """Clients ask for models that are served, and in the right form."""
    served = {
        model for backend in scene.backends().values() for model in backend.get("models") or ()
    }
    for tenant, model, status, count in scene.outcomes.get("errors", ()):
        requests = scene.outcomes["tenants"][tenant]["requests"]
        if count < MANY_ERRORS or count <= LARGE_SHARE * requests or status in NOT_THEIRS:
            continue
        who = f"tenant {tenant}" if tenant else "clients"
        if status == NOT_FOUND and model not in served:
            yield (
                "warning",
                f"{who} asked {count} times for a model that nobody serves: {model or 'no name'}",
                f"tell {who} the name, or give it an alias (`models: {{NAME: SERVED}}`)",
            )
        else:
            yield (
                "warning",
                f"{count} of {requests} requests of {who} were wrong: the servers answered "
                f"{status} for model {model}",
                "read such an answer at the client: it names the mistake; the servers are well",
            )


def clients_left(scene: Scene) -> Found:
    """Clients wait for their first token."""
    for tenant, ended in scene.outcomes.get("tenants", {}).items():
        left = sorted(ended["left_after_s"])
        if len(left) >= MANY_ERRORS and len(left) > LARGE_SHARE * ended["requests"]:
            yield (
                "warning",
                f"{f'tenant {tenant}' if tenant else 'clients'} left {len(left)} of "
                f"{ended['requests']} requests before the first token, after "
                f"{short_time(left[len(left) // 2])} in the median",
                "compare the time-out of these clients with `forebay explain --slowest 10`: raise "
                "it, or send it as x-request-timeout, so that the proxy decides by it",
            )


def client_network(scene: Scene) -> Found:
    """Clients send their prompts and take their answers without delay."""
    waits = scene.by("forebay_client_wait_seconds_total", "direction")
    first = "forebay_time_to_first_token_seconds"
    begun, to_first_s = scene.total(f"{first}_count"), scene.total(f"{first}_sum")
    upload_s, download_s = waits.get("upload", 0.0), waits.get("download", 0.0)
    remedy = (
        "look at the network between the clients and the proxy, and at what stands in between; "
        "the servers are not the reason"
    )
    if begun and upload_s >= max(LEAST_S * begun, LARGE * to_first_s):
        as_long = upload_s / max(to_first_s, 1e-3)
        share = f"{as_long:.0%} of" if as_long <= 1.0 else f"{as_long:,.1f} times"
        yield (
            "warning",
            f"clients took {upload_s:.1f} s to send their prompts, {share} the time to first "
            f"tokens ({upload_s / begun:.2f} s each)",
            remedy,
        )
    lasted_s = scene.total("forebay_backend_request_duration_seconds_sum")
    if begun and download_s >= max(LEAST_S * begun, LARGE * lasted_s):
        yield (
            "warning",
            f"clients were slow to take their answers for {download_s:.0f} s, "
            f"{download_s / max(lasted_s, download_s):.0%} of the time of all answers",
            remedy,
        )
