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
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.image_base import write_base
from locks import LOCKS, pinned
from paths import ROOT
from ports import free_ports
from stages.started import PATIENCE_S, started

CONTAINERFILE = ROOT / "deploy" / "Containerfile"
BASE = "docker.io/library/python:3.12-slim"
needs_builder = pytest.mark.skipif(
    not os.environ.get("TEST_IMAGE") or not shutil.which("buildah") or os.geteuid() != 0,
    reason="takes three minutes: set TEST_IMAGE=1; needs buildah, and to be root",
)


def test_the_image_has_each_extra_that_a_configuration_can_ask_for() -> None:
    """Its root is read-only: nothing can be installed later. The larger lock has all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: set(needs) for name, needs in project["optional-dependencies"].items()}
    (every,) = extras.pop("all")
    assert set(every[len("forebay[") : -1].split(",")) | {"load", "vllm"} == extras.keys()
    in_image, in_larger = ({name for name, _ in pinned(lock)} for lock in LOCKS[:2])
    needed = {
        extra: {re.split(r"[\[>]", need)[0] for need in needs} - {"forebay"}
        for extra, needs in extras.items()
    }
    outside = [extra for extra, needs in needed.items() if not needs <= in_image]
    assert outside == ["png", "ray", "tokenizers", "vllm"]
    assert [extra for extra, needs in needed.items() if not needs <= in_larger] == ["vllm"]
    sources = [path.read_text("utf-8") for path in (ROOT / "proxy").rglob("*.py")]
    asked = {name for text in sources for name in re.findall(r"forebay\[([a-z-]+)\]", text)}
    assert asked <= extras.keys() - set(outside)


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self._words = ("buildah", *store)

    def __call__(self, *words: str) -> str:
        done = subprocess.run([*self._words, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """With a base image, and the packages of the larger lock in /wheels."""
    folder = tmp_path_factory.mktemp("image")
    builder, base = Builder(folder), folder / "base"
    write_base(base)
    container = builder("from", "scratch")
    builder("add", "-q", container, str(base), "/")
    builder("config", "--env", "PATH=/usr/local/bin:/bin", container)
    builder("commit", "-q", "--rm", container, BASE)
    # Wheels only: slim images have no compiler.
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:")
    lock = str(ROOT / "requirements-all.lock")
    subprocess.run([*pip, "-d", str(folder / "wheels"), "-r", lock], check=True)
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    yield builder
    builder("umount", "--all")
    builder("rm", "--all")


def build(builder: Builder, name: str, **arguments: str) -> str:
    """Build the image with build arguments, and return the name of a container of it."""
    folder = builder.folder
    builder(
        *("build", "-q", "--format", "docker", "--pull-never", "--isolation", "chroot"),
        *("--volume", f"{folder}/wheels:/wheels:ro"),
        *("--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"),
        *(f"--build-arg={key}={value}" for key, value in arguments.items()),
        *("-f", str(CONTAINERFILE), "-t", name, "."),
    )
    return builder("from", "--pull-never", name)


@needs_builder
@pytest.mark.timeout(400)
def test_the_image_runs_without_root_and_without_writing(builder: Builder, tmp_path: Path) -> None:
    container = build(builder, "forebay")
    image = json.loads(builder("inspect", "--type", "image", "forebay"))["Docker"]["config"]
    assert image["User"] == "65532:65532"
    port, admin_port = free_ports(2)
    config = tmp_path / "forebay.yaml"
    config.write_text("backends: [{url: 'http://127.0.0.1:9'}]\n")
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
def test_an_image_with_every_extra_is_built_on_the_base_of_this_digest(builder: Builder) -> None:
    inspected = json.loads(builder("inspect", "--type", "image", BASE))
    digest = inspected["FromImageDigest"]
    with pytest.raises(AssertionError, match="0" * 64):
        build(builder, "other", BASE=f"{BASE}@sha256:{'0' * 64}")
    build_arguments = {"BASE": f"{BASE}@{digest}", "LOCK": "requirements-all.lock"}
    container = build(builder, "every", **build_arguments)
    imports = "import brotli, jwt, msgspec, opentelemetry.sdk, pyarrow, ray, redis, scipy, zmq"
    run = ("run", "--isolation", "chroot", container, "--")
    builder(*run, "python", "-c", imports)
    assert "forebay" in builder(*run, "forebay", "--version")


@needs_builder
@pytest.mark.timeout(400)
def test_a_package_that_differs_from_the_lock_ends_the_build(builder: Builder) -> None:
    (wheel,) = (builder.folder / "wheels").glob("rich-*.whl")
    kept = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("rich/other.py", "")
    with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
        build(builder, "changed")
    wheel.write_bytes(kept)
