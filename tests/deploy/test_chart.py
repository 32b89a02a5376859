"""The Helm chart renders to valid Kubernetes objects, and what it runs is what the proxy reads.

`make deploy-tools` brings Helm's own library (helm-python-sdk) and the schemas of Kubernetes
(kubernetes-validate). Objects of operators (ServiceMonitor, PrometheusRule, ScaledObject) have no
schema there; their parts are checked here.
"""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import check, needs_tool, tool
from paths import ROOT, TESTS

from forebay.proxy.config.sources import load_config

CHART = ROOT / "deploy" / "helm" / "forebay"
BACKENDS = [{"name": "gpu0", "url": "http://vllm-0.vllm:8000"}]
MINIMAL: dict[str, Any] = {"config": {"backends": BACKENDS}}
EVERYTHING: dict[str, Any] = {
    **MINIMAL,
    "secret": "forebay-keys",
    "share": {"url": "redis://redis:6379/0"},
    "workers": 2,
    "autoscaling": {"enabled": True},
    "imagePullSecrets": [{"name": "registry"}],
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "service": {"annotations": {"example.com/internal": "true"}},
    "podAnnotations": {"example.com/team": "serving"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
KEDA = {**MINIMAL, "share": {"url": "redis://redis:6379/0"}, "keda": {"enabled": True}}
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
pytestmark = needs_tool("kubernetes-validate")


def helm(values: dict[str, Any]) -> dict[str, Any]:
    """What Helm makes of `values`: {"manifests", "messages"}, or {"error"}."""
    return ask_helm(json.dumps({"chart": str(CHART), "values": values}))


@cache  # starting it takes a second
def ask_helm(asked: str) -> dict[str, Any]:
    script = str(TESTS / "support" / "helm_render.py")
    done = subprocess.run(
        [tool("python"), script], input=asked, capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def objects(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rendered objects by kind and name."""
    answer = helm(values)
    assert "error" not in answer, answer["error"]
    texts = [text for name, text in answer["manifests"].items() if name.endswith(".yaml")]
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def test_lint_finds_nothing() -> None:
    messages = helm(EVERYTHING)["messages"]
    assert [message["error"] for message in messages] == ["icon is recommended"]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_the_objects_match_the_schemas(version: str, tmp_path: Path) -> None:
    file = tmp_path / "objects.yaml"
    rendered = [one for values in (MINIMAL, EVERYTHING, KEDA) for one in objects(values).values()]
    file.write_text(yaml.safe_dump_all(o for o in rendered if o["kind"] not in OF_OPERATORS))
    check("kubernetes-validate", "--strict", "-k", version, str(file))


def test_every_switch_adds_its_object() -> None:
    assert set(objects(MINIMAL)) == {
        *("Deployment/forebay", "ConfigMap/forebay", "Service/forebay", "Service/forebay-admin"),
    }
    added = set(objects(EVERYTHING)) - set(objects(MINIMAL))
    assert added == {
        *("HorizontalPodAutoscaler/forebay", "PodDisruptionBudget/forebay"),
        *("NetworkPolicy/forebay", "ServiceMonitor/forebay", "PrometheusRule/forebay"),
        "ConfigMap/forebay-dashboard",
    }
    assert set(objects(KEDA)) - set(objects(MINIMAL)) == {"ScaledObject/forebay"}


def test_the_proxy_reads_what_the_chart_writes(tmp_path: Path) -> None:
    rendered = objects(EVERYTHING)
    pod = rendered["Deployment/forebay"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    file = tmp_path / "forebay.yaml"
    file.write_text(rendered["ConfigMap/forebay"]["data"]["forebay.yaml"])
    config = load_config(file, {}, {one["name"]: one["value"] for one in container["env"]})
    assert [backend.url for backend in config.backends] == ["http://vllm-0.vllm:8000"]
    assert config.share is not None
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.listen.port, "admin": config.listen.admin_port}
    assert config.listen.host == config.listen.effective_admin_host == "0.0.0.0"
    timeouts = config.timeouts
    assert pod["terminationGracePeriodSeconds"] > timeouts.lame_duck + timeouts.drain + 1
    probe = container["readinessProbe"]
    assert timeouts.lame_duck > probe["periodSeconds"] * probe["failureThreshold"]


def test_the_pod_is_restricted() -> None:
    """As Kubernetes' Pod Security Standard "restricted" wants it, and with a read-only root."""
    pod = objects(MINIMAL)["Deployment/forebay"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert pod["enableServiceLinks"] is False  # FOREBAY_PORT=tcp://... would be an unknown key
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_prometheus_finds_the_admin_port() -> None:
    rendered = objects(EVERYTHING)
    monitor = rendered["ServiceMonitor/forebay"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    admin = rendered["Service/forebay-admin"]
    assert wanted <= admin["metadata"]["labels"].items()
    assert not wanted <= rendered["Service/forebay"]["metadata"]["labels"].items()
    endpoint = monitor["spec"]["endpoints"][0]
    assert endpoint["port"] in {port["name"] for port in admin["spec"]["ports"]}
    assert {"targetLabel": "job", "replacement": "forebay"} in endpoint["relabelings"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
def test_the_rules_are_those_of_the_rule_file(tmp_path: Path) -> None:
    spec = objects(EVERYTHING)["PrometheusRule/forebay"]["spec"]
    assert spec == yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    (tmp_path / "rules.yml").write_text(json.dumps(spec))
    subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yml")], check=True)


def test_the_dashboard_is_the_one_of_grafana() -> None:
    text = objects(EVERYTHING)["ConfigMap/forebay-dashboard"]["data"]["forebay.json"]
    assert json.loads(text) == json.loads((ROOT / "deploy/grafana/forebay.json").read_text())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "/config/backends"),
        ({**MINIMAL, "replica": 2}, "additional properties 'replica'"),
        (
            {"config": {"backends": [{"name": "gpu0", "url": "vllm:8000"}]}},
            "/config/backends/0/url",
        ),
        ({"config": {"backends": BACKENDS, "listen": {"port": 1}}}, "/config"),
        ({**MINIMAL, "replicas": 2}, "several proxies must share: set share.url"),
        ({**MINIMAL, "autoscaling": {"enabled": True}}, "several proxies must share"),
        ({**KEDA, "autoscaling": {"enabled": True}}, "choose one"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], says: str) -> None:
    assert says in helm(values)["error"]


def test_the_example_for_kubernetes(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "kubernetes"
    rendered = objects(yaml.safe_load((folder / "values.yaml").read_text()))
    assert rendered["Deployment/forebay"]["spec"]["replicas"] == 2
    file = tmp_path / "objects.yaml"
    native = [one for one in rendered.values() if one["kind"] not in OF_OPERATORS]
    file.write_text(
        yaml.safe_dump_all([*native, yaml.safe_load((folder / "rag-app.yaml").read_text())])
    )
    check("kubernetes-validate", "--strict", "-k", "1.37", str(file))
