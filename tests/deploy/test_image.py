"""The image is built from deploy/Containerfile and run: not as root, on a read-only file system.

buildah builds it (Debian package `buildah`, as root). No registry of images can be reached where CI
runs, so the base image is made of this machine's Python, and pip finds its packages in a folder.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.image_base import write_base
from paths import ROOT
from ports import free_ports
from stages.started import PATIENCE_S, started

CONTAINERFILE = ROOT / "deploy" / "Containerfile"
BASE = "docker.io/library/python:3.12-slim"
NOT_OF_THE_PROXY = {"lab", "load", "ray", "vllm"}
IN_IMAGE = re.findall(r"'\.\[(.*)\]'", CONTAINERFILE.read_text("utf-8"))[0].split(",")
needs_builder = pytest.mark.skipif(
    not os.environ.get("TEST_IMAGE") or not shutil.which("buildah") or os.geteuid() != 0,
    reason="takes two minutes: set TEST_IMAGE=1; needs buildah, and to be root",
)


def test_the_image_has_each_extra_that_a_configuration_can_ask_for() -> None:
    """Its root is read-only: nothing can be installed later. A new extra belongs to one side."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(IN_IMAGE) == project["optional-dependencies"].keys() - NOT_OF_THE_PROXY
    sources = [path.read_text("utf-8") for path in (ROOT / "proxy").rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r"forebay\[([a-z-]+)\]", text)}
    assert asked <= set(IN_IMAGE)


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self._words = ("buildah", *store)

    def __call__(self, *words: str) -> str:
        done = subprocess.run([*self._words, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()


def fetch_wheels(folder: Path) -> None:
    """Download what the image installs, as wheels only: slim images have no compiler."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock, pins = str(ROOT / "requirements.lock"), str(ROOT / "requirements-dev.lock")
    wanted = [need for name in IN_IMAGE for need in extras[name]]
    pip = (sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:")
    subprocess.run([*pip, "-d", str(folder), "-r", lock, "-c", pins, *wanted], check=True)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("image")
    builder, base, wheels = Builder(folder), folder / "base", folder / "wheels"
    write_base(base)
    container = builder("from", "scratch")
    builder("add", "-q", container, str(base), "/")
    builder("config", "--env", "PATH=/usr/local/bin:/bin", container)
    builder("commit", "-q", "--rm", container, BASE)
    fetch_wheels(wheels)
    settings = folder / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    builder(
        *("build", "-q", "--format", "docker", "--pull-never", "--isolation", "chroot"),
        *("--volume", f"{wheels}:/wheels:ro", "--volume", f"{settings}:/etc/pip.conf:ro"),
        *("-f", str(CONTAINERFILE), "-t", "forebay", "."),
    )
    yield builder
    builder("umount", "--all")
    builder("rm", "--all")


@needs_builder
@pytest.mark.timeout(400)
def test_the_image_runs_without_root_and_without_writing(builder: Builder, tmp_path: Path) -> None:
    image = json.loads(builder("inspect", "--type", "image", "forebay"))["Docker"]["config"]
    assert image["User"] == "65532:65532"
    port, admin_port = free_ports(2)
    config = tmp_path / "forebay.yaml"
    config.write_text("backends: [{url: 'http://127.0.0.1:9'}]\n")
    container = builder("from", "--pull-never", "forebay")
    root = Path(builder("mount", container))
    (root / "etc/forebay").mkdir()
    (root / "etc/forebay/forebay.yaml").write_text(config.read_text())
    settings = [
        *image["Env"],
        f"FOREBAY_LISTEN__PORT={port}",
        f"FOREBAY_LISTEN__ADMIN_PORT={admin_port}",
    ]

    def inside(*words: str) -> list[str]:
        """The command line that runs `words` on a read-only `root` as the image's user."""
        script = 'mount --rbind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        user = f"--userspec={image['User']}"
        run = ["chroot", user, str(root), "/bin/env", "-i", *settings, *words]
        return ["unshare", "--mount", "sh", "-c", script, str(root), *run]

    refused = subprocess.run(
        inside("/bin/sh", "-c", "echo > /tmp/file"), capture_output=True, text=True
    )
    assert "Read-only file system" in refused.stderr
    alive = f"http://127.0.0.1:{admin_port}/healthz"
    with started(inside(*image["Entrypoint"], *image["Cmd"]), tmp_path / "log", alive) as proxy:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics") as answer:
            text = answer.read().decode()
        assert 'forebay_backend_up{backend="gpu0"} 0.0' in text
        owner = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{proxy.pid}/status").read_text(), re.M)
        assert owner is not None
        assert owner[1] == "65532"
        check = [word.replace("9090", str(admin_port)) for word in image["Healthcheck"]["Test"][1:]]
        assert subprocess.run(inside(*check)).returncode == 0
        proxy.send_signal(signal.SIGTERM)
        assert proxy.wait(PATIENCE_S) == 0
        assert subprocess.run(inside(*check), stderr=subprocess.DEVNULL).returncode == 1


@needs_builder
@pytest.mark.timeout(400)
def test_the_extras_are_in_the_image(builder: Builder) -> None:
    container = builder("from", "--pull-never", "forebay")
    imports = "import msgspec, redis, zmq, opentelemetry.sdk, forebay.replay.engine"
    builder("run", "--isolation", "chroot", container, "--", "python", "-c", imports)
