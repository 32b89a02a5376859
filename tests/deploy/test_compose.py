"""The Compose files are valid, and their command lines start a stack that answers.

No container engine runs where CI does. `make deploy-tools` installs Docker Compose itself, which
reads the files; proxy and simulated engines are then started as processes with the same words.
"""

import json
import os
import re
import subprocess
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import needs_tool, tool
from paths import ROOT
from ports import free_ports
from stages.started import FOREBAY, eventually, started
from vllm_server import needed_vllm_python

DEPLOY = ROOT / "deploy"
FILES = ("-f", str(DEPLOY / "compose.yaml"))


def plain(name: str) -> dict[str, Any]:
    """A file of `deploy` without Compose's own tags."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("!reset null", "{}")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def services(*files: str, **environ: str) -> dict[str, Any]:
    """The services that Docker Compose reads from `files`."""
    done = subprocess.run(
        [tool("docker-compose"), *files, "config", "--format", "json"],
        capture_output=True, text=True, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)["services"]
    return loaded


def mounted(service: dict[str, Any]) -> set[str]:
    return {v["source"] for v in service.get("volumes", ()) if v["type"] == "bind"}


@needs_tool("docker-compose")
def test_the_simulated_stack() -> None:
    found = services(*FILES)
    assert set(found) == {"gpu0", "gpu1", "proxy", "prometheus", "grafana"}
    for name, service in found.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(Path(path).exists() for path in mounted(service)), name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name


@needs_tool("docker-compose")
def test_the_real_stack() -> None:
    found = services(*FILES, "-f", str(DEPLOY / "compose.vllm.yaml"), MODEL="some/model")
    for name in ("gpu0", "gpu1"):
        assert found[name]["image"].startswith("vllm/vllm-openai:")
        assert "build" not in found[name]
        assert found[name]["command"][0] == "some/model"


def test_both_sides_know_the_scheduler() -> None:
    proxy = yaml.safe_load((DEPLOY / "compose-proxy.yaml").read_text())
    assert {backend["scheduler"] for backend in proxy["backends"]} == {"forebay"}
    for name, part in (("compose.yaml", "x-engine"), ("compose.vllm.yaml", "x-vllm")):
        words = plain(name)[part]["command"]
        assert words[words.index("--scheduler-cls") + 1].startswith("forebay"), name


def test_vllm_finds_the_class_in_the_mounted_folder(tmp_path: Path) -> None:
    """The mount of compose.vllm.yaml, tried with an interpreter that has vLLM."""
    service = plain("compose.vllm.yaml")["x-vllm"]
    place, inside, _ = service["volumes"][1].split(":")
    root = dict(each.split("=") for each in service["environment"] if "=" in each)
    link = tmp_path / Path(inside).relative_to(root["PYTHONPATH"])
    link.parent.mkdir()
    link.symlink_to(DEPLOY / place)
    name = next(word for word in service["command"] if word.startswith("forebay."))
    module, _, attribute = name.rpartition(".")
    done = subprocess.run(
        [needed_vllm_python(), "-c", f"from {module} import {attribute}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_grafana_finds_the_data_and_the_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((provisioning / "dashboards/forebay.yaml").read_text())
    folder = boards["providers"][0]["options"]["path"]
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/forebay.json:{folder}/forebay.json:ro" in grafana["volumes"]


@pytest.mark.timeout(200)
def test_the_stack_answers_the_request_of_the_manual(tmp_path: Path) -> None:
    """With the command lines of the Compose file, on ports that are free here."""
    stack = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    engine_ports = dict(zip(("gpu0", "gpu1"), free_ports(2), strict=True))
    port, admin_port = free_ports(2)
    text = (DEPLOY / "compose-proxy.yaml").read_text()
    with ExitStack() as running:
        for name, engine_port in engine_ports.items():
            words = [str(engine_port) if w == "8000" else w for w in stack[name]["command"]]
            words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
            ready = f"http://127.0.0.1:{engine_port}/health"
            running.enter_context(started([*FOREBAY, *words], tmp_path / name, ready))
            text = text.replace(f"http://{name}:8000", f"http://127.0.0.1:{engine_port}")
        config = tmp_path / "forebay.yaml"
        config.write_text(text)
        words = ["proxy", "--config", str(config), "--port", str(port), "--admin-port"]
        admin = f"http://127.0.0.1:{admin_port}"
        command = [*FOREBAY, *words, str(admin_port)]
        running.enter_context(started(command, tmp_path / "proxy", f"{admin}/readyz"))
        eventually(lambda: status_of(admin) == {"gpu0": True, "gpu1": True})
        manual = (ROOT / "docs" / "how-to" / "deploy.md").read_text(encoding="utf-8")
        body = re.search(r"-d '(\{.*\})'", manual)
        assert body is not None
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions", body[1].encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]


def status_of(admin: str) -> dict[str, bool]:
    with urllib.request.urlopen(f"{admin}/status", timeout=10) as answer:
        return {backend["name"]: backend["up"] for backend in json.load(answer)["backends"]}
