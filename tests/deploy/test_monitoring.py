"""Rules and dashboard name metrics that exist, and a real Prometheus raises the alerts.

Prometheus and promtool are Debian's package `prometheus`; .ci/run installs it.
"""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import needs_tool, tool
from pages.exported_metrics import exported_metrics
from paths import ROOT, TESTS
from ports import free_ports
from stages.started import FOREBAY, eventually, started

FOLDER = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text(encoding="utf-8"))
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in ALL_RULES if "alert" in rule]
GRAFANA = ROOT / "deploy" / "grafana" / "forebay.json"
DASHBOARD = json.loads(GRAFANA.read_text(encoding="utf-8"))
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="needs prometheus and promtool (Debian package prometheus)",
)
WORDS = {"by", "without", "on", "and", "or", "unless", "bool"}


def panel_queries() -> list[tuple[str, str]]:
    """Title and query of everything that the dashboard draws."""
    drawn = [(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p.get("targets", ())]
    return drawn + [(a["name"], a["expr"]) for a in DASHBOARD["annotations"]["list"]]


def metrics_in(query: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"offset \w+|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"\b(?<![\d.])[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - WORDS


def exported() -> set[str]:
    """Names of all samples that a proxy can export, and of what the rules record."""
    names = {rule["record"] for rule in ALL_RULES if "record" in rule} | {"up", "ALERTS"}
    for family in exported_metrics():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, [""])}
    return names


def test_the_rules_name_metrics_that_exist() -> None:
    known = exported()
    for rule in ALL_RULES:
        assert metrics_in(rule["expr"]) <= known, rule


def test_the_autoscaler_reads_a_metric_that_exists_and_rounds_it_up() -> None:
    text = (ROOT / "deploy" / "keda-vllm.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]
    assert spec["minReplicaCount"] >= 1
    (trigger,) = spec["triggers"]
    keys = trigger["metadata"]
    assert metrics_in(keys["query"]) == {"forebay_backends_wanted"} <= exported()
    assert "sum(" in keys["query"]  # of several proxies and workers
    assert (trigger["metricType"], keys["threshold"]) == ("AverageValue", "1")
    assert keys["ignoreNullValues"] == "false"


def test_the_dashboard_names_metrics_that_exist() -> None:
    known = exported()
    for title, query in panel_queries():
        assert metrics_in(query), title
        assert metrics_in(query) <= known, title


def test_an_unknown_metric_is_noticed() -> None:
    assert metrics_in('sum by (bucket) (rate(forebay_gone_total{bucket!="a"}[5m])) > 0.5') == {
        "forebay_gone_total"
    }


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for _, query in panel_queries():
        assert set(re.findall(r"\$(\w+)", query)) <= variables | {"__rate_interval"}


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of what stands in `written` and not in `read`."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from lost(value, read[key], f"{path}/{key}") if key in read else [f"{path}/{key}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for at, pair in enumerate(zip(written, read, strict=True)):
            yield from lost(*pair, f"{path}/{at}")
    elif written != read:
        yield path


@needs_tool("python")
def test_grafana_knows_every_key_of_the_dashboard() -> None:
    words = [tool("python"), str(TESTS / "support/grafana_reads.py"), str(GRAFANA)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    unknown = set(lost(DASHBOARD, json.loads(done.stdout)))
    # The Prometheus data source reads this one; the types know the keys of all data sources only.
    assert {path for path in unknown if not path.endswith("/titleFormat")} == set()


def test_every_alert_is_tested_and_explained() -> None:
    """Each has a staged fault, is silent on a healthy proxy, and has its part of the manual."""
    tests = yaml.safe_load((FOLDER / "rules.test.yml").read_text(encoding="utf-8"))["tests"]
    healthy, *faults = tests
    assert [test["alertname"] for test in healthy["alert_rule_test"]] == ALERTS
    assert not any(test.get("exp_alerts") for test in healthy["alert_rule_test"])
    assert [fault["name"] for fault in faults] == ALERTS
    for fault in faults:
        assert fault["alert_rule_test"][-1]["alertname"] == fault["name"]
        assert fault["alert_rule_test"][-1]["exp_alerts"]
    manual = (ROOT / "docs" / "how-to" / "monitor.md").read_text(encoding="utf-8")
    headings = {line.lstrip("# ").lower() for line in manual.splitlines() if line.startswith("#")}
    for rule in ALL_RULES:
        if "alert" in rule:
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert page == "docs/how-to/monitor.md"
            assert anchor == rule["alert"].lower()
            assert anchor in headings


@needs_prometheus
def test_the_rules_pass_their_unit_tests() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "rules.test.yml"], cwd=FOLDER, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_the_scrape_configuration_is_valid() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(FOLDER / "prometheus.yml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def __call__(self, query: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(self._url + words, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def firing(self) -> set[str]:
        return {found["metric"]["alertname"] for found in self('ALERTS{alertstate="firing"}')}


@contextmanager
def repeated(*calls: Callable[[], None]) -> Iterator[None]:
    """Make each call again and again, in a thread of its own, until the block ends."""
    ended = threading.Event()

    def repeat(call: Callable[[], None]) -> None:
        while not ended.wait(0.1):
            call()

    threads = [threading.Thread(target=repeat, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


class Stage(ExitStack):
    """Two engines or the servers at `urls`, a proxy and a Prometheus; minutes are seconds."""

    def __init__(self, folder: Path, urls: Sequence[str] = (), **settings: Any) -> None:
        super().__init__()
        self._ports = free_ports(5)
        self._fired: set[str] = set()
        *engines, self.port, admin, prometheus = self._ports
        self.config = folder / "forebay.yaml"
        self.query = Prometheus(prometheus)
        self.engines = [
            self._start(
                folder / f"engine{port}.log", f"http://127.0.0.1:{port}/health",
                *FOREBAY, "engine", "--model", "llama-3-8b", "--port", str(port),
                "--enable-prompt-tokens-details",
            )
            for port in ([] if urls else engines)
        ]  # fmt: skip
        urls = urls or [f"http://127.0.0.1:{port}" for port in engines]
        backends = [{"name": f"gpu{number}", "url": url} for number, url in enumerate(urls)]
        settings = {"backends": backends, "health": {"timeout": "30s"}, **settings}
        self.config.write_text(json.dumps(settings))
        self.proxy = self._start(
            folder / "proxy.log", f"http://127.0.0.1:{admin}/readyz",
            *FOREBAY, "proxy", "--config", str(self.config), "--port", str(self.port),
            "--admin-port", str(admin),
        )  # fmt: skip
        rules = (FOLDER / "rules.yml").read_text(encoding="utf-8")
        rules = re.sub(r"\[\d+[mh]\]", "[10s]", rules).replace("offset 5m", "offset 10s")
        (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", rules))
        scrapes = (FOLDER / "prometheus.yml").read_text().replace("15s", "1s")
        (folder / "prometheus.yml").write_text(scrapes.replace("proxy:9090", f"127.0.0.1:{admin}"))
        self._start(
            folder / "prometheus.log", f"http://127.0.0.1:{prometheus}/-/ready",
            "prometheus", f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/db", f"--web.listen-address=127.0.0.1:{prometheus}",
        )  # fmt: skip

    def _start(self, log: Path, ready: str, *words: str) -> subprocess.Popen[bytes]:
        return self.enter_context(started(words, log, ready))

    def ask(self, tokens: int, **fields: Any) -> None:
        """Send one streaming chat; refusals and failures are part of the stage."""
        body = {
            "messages": [{"role": "user", "content": "hello " * 400}], "max_tokens": tokens,
            "stream": True, "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with (
            suppress(OSError, HTTPException),
            urllib.request.urlopen(request, timeout=30) as answer,
        ):
            answer.read()

    def load(self) -> AbstractContextManager[None]:
        """Short chats and, beside them, answers of some seconds."""
        return repeated(*(partial(self.ask, tokens) for tokens in (3, 500, 500, 500, 500)))

    def streaming(self) -> subprocess.Popen[bytes] | None:
        """An engine that computes an answer now; chats with one beginning may all go to one."""
        for engine, port in zip(self.engines, self._ports, strict=False):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                running = re.search(rb"^vllm:num_requests_running.* (\S+)$", answer.read(), re.M)
            if running and float(running[1]) > 1:
                return engine
        return None

    def fired(self) -> set[str]:
        """Return the alerts that fire now or fired at an earlier call."""
        self._fired |= self.query.firing()
        return self._fired

    def blank(self) -> set[str]:
        """Titles of what the dashboard draws that has no data now."""
        return {
            title
            for title, query in panel_queries()
            if not self.query(query.replace("$instance", ".*").replace("$__rate_interval", "10s"))
        }


FAULTS_ONLY = {
    *("Rejected, by reason", "Failures and retries", "Alerts", "Configuration changes"),
    "Answers without success, by tenant",
}


@needs_prometheus
@pytest.mark.timeout(240)
def test_alerts_follow_staged_faults(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, stage.load():
        eventually(lambda: stage.blank() <= FAULTS_ONLY)
        recorded = [rule["record"] for rule in ALL_RULES if "record" in rule]
        no_fault = {"forebay:rejected:ratio_rate5m", "forebay:refused_needlessly:ratio_rate1h"}
        eventually(lambda: {name for name in recorded if not stage.query(name)} <= no_fault)
        # Not asserted here: what a busy machine itself can raise.
        busy = {"ForebayEventLoopLag", "ForebaySlowFirstToken", "ForebayPredictionsOff"}
        busy |= {"ForebayAdmittedLate", "ForebayShedding", "ForebayRefusesNeedlessly"}
        assert stage.query.firing() <= busy

        stage.config.write_text(stage.config.read_text() + "{")
        eventually(lambda: "ForebayBadConfiguration" in stage.query.firing())
        first = eventually(stage.streaming)
        first.kill()
        eventually(lambda: "ForebayCutStreams" in stage.query.firing())
        eventually(lambda: "ForebayBackendDown" in stage.query.firing())
        assert "ForebayNoBackend" not in stage.query.firing()
        next(engine for engine in stage.engines if engine is not first).kill()
        eventually(lambda: {"ForebayNoBackend", "ForebayRefusing"} <= stage.query.firing())
        assert "ForebayDown" not in stage.query.firing()
        assert stage.blank() <= {"Configuration changes"}
        stage.proxy.kill()
        eventually(lambda: "ForebayDown" in stage.query.firing())
        assert "ForebayNoBackend" not in stage.query.firing()


@contextmanager
def pausing(processes: Sequence[subprocess.Popen[bytes]], paused_s: float) -> Iterator[None]:
    """Stop the processes for `paused_s` in every `paused_s` + 0.4 s, until the block ends."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.is_set():
            for name, s in ((signal.SIGSTOP, paused_s), (signal.SIGCONT, 0.4)):
                for process in processes:
                    process.send_signal(name)
                ended.wait(s)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@needs_prometheus
@pytest.mark.timeout(240)
def test_alerts_follow_slow_engines_and_a_proxy_without_resources(tmp_path: Path) -> None:
    """Engines that stand still; then a proxy short of resources."""
    late = {"ForebaySlowFirstToken", "ForebayAdmittedLate"}
    short = {"ForebayFileDescriptors", "ForebayShedding"}
    with Stage(tmp_path) as stage, stage.load():
        eventually(lambda: stage.query("forebay:time_to_first_token_seconds:p95_5m"))
        with pausing(stage.engines, 4.0):
            eventually(lambda: late <= stage.fired())
        with pausing([stage.proxy], 0.4):
            eventually(lambda: "ForebayEventLoopLag" in stage.query.firing())
        assert not short & stage.query.firing()  # a machine that stood still is no overload
        open_fds = len(list(Path(f"/proc/{stage.proxy.pid}/fd").iterdir()))
        limit = round(open_fds / 0.85)
        resource.prlimit(stage.proxy.pid, resource.RLIMIT_NOFILE, (limit, limit))
        eventually(lambda: short <= stage.query.firing())
        assert not {"ForebayDown", "ForebayNoBackend"} & stage.query.firing()


@contextmanager
def moody_server() -> Iterator[str]:
    """Start a server that answers a request for model `slow:4` after 4 s; returns its URL."""
    program = TESTS / "support" / "fakes" / "late_backend.py"
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


@needs_prometheus
@pytest.mark.timeout(240)
def test_an_alert_follows_wrong_predictions(tmp_path: Path) -> None:
    """Some first tokens are late for a reason that no prediction can know."""
    with moody_server() as url, Stage(tmp_path, [url]) as stage:
        chats = [partial(stage.ask, 3, model="good")] + 4 * [partial(stage.ask, 3, model="slow:4")]
        with repeated(*chats):
            eventually(lambda: "ForebayPredictionsOff" in stage.query.firing())


@needs_prometheus
@pytest.mark.timeout(240)
def test_an_alert_follows_a_queue_that_is_too_short(tmp_path: Path) -> None:
    """Chats come together, and then none for a while: a longer queue would have served them."""
    chat = {"name": "chat", "up_to": 5000, "max_wait": "2s", "max_queue": 1}
    document = {"name": "document", "up_to": 100_000, "max_wait": "30s"}
    with Stage(tmp_path, buckets=[chat, document]) as stage:

        def together() -> None:
            time.sleep(-time.time() % 2.0)
            text = f"{time.monotonic_ns()} " + "hello " * 3_000  # which no cache holds
            stage.ask(3, messages=[{"role": "user", "content": text}])

        with repeated(*32 * [together]):
            eventually(lambda: "ForebayRefusesNeedlessly" in stage.query.firing())
