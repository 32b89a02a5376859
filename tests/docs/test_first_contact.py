"""README.md as a stranger runs it: a clone, an empty HOME, each block as it stands, in order.

`make install` fetches the packages, so this is skipped without a package index. Two simulated
servers stand for `vllm serve`, and of the load test only the first seconds are played.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkout import copy_of_tracked
from paths import ROOT
from shown import Ports, blocks, masked
from started import started

README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = "forebay engine --model llama-3-8b --long-prefill-token-threshold 2048"
NO_INDEX = ("No matching distribution found", "Could not fetch URL", "Network is unreachable")


class Stranger:
    """A user with a clone and an empty folder, who has nothing but a shell and Python."""

    def __init__(self, folder: Path) -> None:
        self.home, self.here = folder / "home", folder / "work"
        self.home.mkdir()
        self.here.mkdir()
        self.clone = copy_of_tracked(folder / "clone")
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        path = f"{self.home}/.local/bin:{os.environ['PATH']}"
        self.environ = {**kept, "HOME": str(self.home), "PATH": path, "NO_COLOR": "1"}

    def runs(self, line: str, where: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            line, shell=True, executable="/bin/bash", cwd=where or self.here, timeout=280,
            capture_output=True, text=True, env=self.environ,
        )  # fmt: skip

    def prints(self, line: str) -> list[str]:
        done = self.runs(line)
        assert done.returncode == 0, done.stderr
        return [printed.rstrip() for printed in done.stdout.strip("\n").splitlines()]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """One who has done what `Install` says; the two lines where pipx is not installed."""
    one = Stranger(tmp_path_factory.mktemp("stranger"))
    done = one.runs("make install", one.clone)
    if done.returncode:
        done = one.runs("\n".join(["set -e", *done.stdout.splitlines()]), one.clone)
    if any(words in done.stderr for words in NO_INDEX):
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr
    yield one
    shutil.rmtree(one.home)


def test_the_blocks_are_those_that_are_run_here() -> None:
    said = [content.split()[1:3] for _, content in blocks(README)]
    assert said == [
        ["install"], ["forebay", "demo"], ["-", "{name:"], ["proxy", "--config"],
        ["forebay", "traces"], ["forebay", "simulate"], ["forebay", "size"],
    ]  # fmt: skip


@pytest.mark.timeout(600)
def test_every_block_gives_what_stands_there(stranger: Stranger) -> None:
    _, preview, config, serve, load_test, simulate, size = (text for _, text in blocks(README))
    assert stranger.prints("which forebay") == [f"{stranger.home}/.local/bin/forebay"]
    prints_what_stands_there(stranger, preview)
    ports = Ports()
    with ExitStack() as running:
        for port in ports.free[:2]:
            begin(stranger, running, f"{ENGINE} --port {port}", f"http://127.0.0.1:{port}/health")
        (stranger.here / "forebay.yaml").write_text(ports(config), encoding="utf-8")
        proxy, _, curl = ports(serve).partition("\n")
        proxy += f" --port {ports.free[2]} --admin-port {ports.free[3]}"
        begin(stranger, running, proxy, f"http://127.0.0.1:{ports.free[3]}/readyz")
        (answer,) = stranger.prints(curl.replace("MODEL", "llama-3-8b"))
        assert '"object":"chat.completion"' in answer
        synth, replay = re.split(r"^(?=\$ )", load_test, flags=re.MULTILINE)[1:]
        stranger.prints(synth.removeprefix("$ "))
        command, *shown = ports(replay).splitlines()
        printed = stranger.prints(f"{command.removeprefix('$ ')} --duration 10s")
        assert masked(shown[0]) == masked(printed[0])
        assert masked(shown[-1]) == masked(printed[-1])
    prints_what_stands_there(stranger, simulate)
    prints_what_stands_there(stranger, size)


def begin(stranger: Stranger, running: ExitStack, words: str, ready: str) -> None:
    """Start a server with the installed command."""
    log = stranger.home / f"log-{ready.split(':')[2].split('/')[0]}"
    command = ["bash", "-c", f"cd {shlex.quote(str(stranger.here))} && exec {words}"]
    running.enter_context(started(command, log, ready, **stranger.environ))


def prints_what_stands_there(stranger: Stranger, console: str) -> None:
    command, *shown = console.rstrip().splitlines()
    printed = stranger.prints(f"COLUMNS=80 {command.removeprefix('$ ')}")
    if shown[-1] == "...":
        shown.pop()
        assert len(printed) > len(shown)
        printed = printed[: len(shown)]
    assert printed == shown
