"""The tutorial that puts Forebay beside nginx, HAProxy or LiteLLM: its files, as they stand."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from pages.shown import Ports, block
from paths import ROOT
from ports import free_ports
from stages.started import FOREBAY, eventually, started

PAGE = (ROOT / "docs" / "tutorials" / "beside-your-proxy.md").read_text(encoding="utf-8")
CHAT = {"model": "llama-3-8b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
OURS = "x-forebay-bucket"
PATHS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
NGINX, HAPROXY = (shutil.which(name, path=PATHS) for name in ("nginx", "haproxy"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """Yield two simulated servers and free ports."""
    logs, at = tmp_path_factory.mktemp("engines"), Ports()
    with ExitStack() as running:
        for port in at.free[:2]:
            words = ["engine", "--model", "llama-3-8b", "--gpu", "h200", "--time-scale", "100"]
            ready = f"http://127.0.0.1:{port}/health"
            running.enter_context(started([*FOREBAY, *words, "--port", port], logs / port, ready))
        yield at


@contextmanager
def forebay(at: Ports, folder: Path) -> Iterator[Path]:
    """Forebay with the file of the page. Yields its log."""
    config, log = folder / "forebay.yaml", folder / "forebay.log"
    path = str(folder / "traffic.jsonl")
    config.write_text(at(block(PAGE, "mode: observe")).replace("traffic.jsonl", path))
    words = [*FOREBAY, "proxy", "--config", str(config)]
    words += ["--port", at.free[2], "--admin-port", at.free[3]]
    ready = f"http://127.0.0.1:{at.free[3]}/readyz"
    with started(words, log, ready, FOREBAY_CAPTURE_SALT="a secret of the tests"):
        eventually(lambda: "gpu1 is up" in log.read_text(encoding="utf-8"))
        yield log


@contextmanager
def nginx(text: str, folder: Path) -> Iterator[str]:
    """nginx with a part of its file. Yields its URL."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    (port,) = free_ports(1)
    temporary = "".join(
        f"{kind}_temp_path {folder};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
    config.write_text(
        f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {temporary}\n{text}}}"
    )
    words = [NGINX, "-c", str(config), "-e", str(folder / "nginx.err")]
    with started(words, folder / "nginx.log", f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def haproxy(text: str, folder: Path) -> Iterator[str]:
    """HAProxy with a part of its file. Yields its URL."""
    if HAPROXY is None:
        pytest.skip("HAProxy is not installed")
    (port,) = free_ports(1)
    config = folder / "haproxy.cfg"
    times = "".join(f"  timeout {kind} 60s\n" for kind in ("client", "server", "connect"))
    config.write_text(
        f"defaults\n  mode http\n{times}{text.replace('bind :80', f'bind 127.0.0.1:{port}')}"
    )
    with started([HAPROXY, "-db", "-f", str(config)], folder / "haproxy.log",
                 f"http://127.0.0.1:{port}/health"):  # fmt: skip
        yield f"http://127.0.0.1:{port}"


def ask(url: str) -> dict[str, str]:
    """Send a chat, and return the headers of the answer, which is good."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(CHAT).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["choices"]
        return {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize("which", [nginx, haproxy])
def test_forebay_observes_behind_it_and_may_stop(
    which: Callable[[str, Path], AbstractContextManager[str]], servers: Ports, tmp_path: Path
) -> None:
    text = block(PAGE, "backup;" if which is nginx else "allbackups")
    with ExitStack() as behind:
        log = behind.enter_context(forebay(servers, tmp_path))
        with which(servers(text), tmp_path) as url:
            assert OURS in ask(url)
            shown = block(PAGE, "INFO    listening").split("INFO")[1].split(";")[1].strip()
            assert shown in log.read_text(encoding="utf-8")
            doctor = [*FOREBAY, "doctor", "--admin", f"http://127.0.0.1:{servers.free[3]}"]
            said = subprocess.run(doctor, capture_output=True, text=True, timeout=60).stdout
            assert re.search(r"^INFO +the proxy only observes", said, re.MULTILINE), said
        out = text.replace("8080;", "8080 down;").replace("8080 check", "8080 check disabled")
        with which(servers(out), tmp_path) as url:
            assert OURS not in ask(url)
        with which(servers(text), tmp_path) as url:
            behind.close()  # Forebay stops
            assert OURS not in ask(url)
    row = json.loads((tmp_path / "traffic.jsonl").read_text().splitlines()[-1])
    assert row["input_tokens"] > 0


def test_nginx_sends_it_a_copy(servers: Ports, tmp_path: Path) -> None:
    with (
        forebay(servers, tmp_path),
        nginx(servers(block(PAGE, "mirror /forebay;")), tmp_path) as url,
    ):
        began = time.monotonic()
        assert OURS not in ask(url)
        assert time.monotonic() - began < 20
        traffic = tmp_path / "traffic.jsonl"
        eventually(lambda: traffic.exists() and '"input_tokens"' in traffic.read_text())


def test_the_file_for_litellm() -> None:
    config = yaml.safe_load(block(PAGE, "model_list:"))
    through, direct = config["model_list"]
    assert through["litellm_params"]["api_base"] == "http://127.0.0.1:8080/v1"
    fallback = {through["model_name"]: [direct["model_name"]]}
    assert config["router_settings"]["fallbacks"] == [fallback]
