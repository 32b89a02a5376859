"""README.md as a stranger runs it: a clone, an empty HOME, each block as it stands, in order.

`make install` fetches the packages for a minute, so CI does this and `make test` leaves it out.
Two simulated servers stand for `vllm serve`. The load test is played for its first seconds only.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkout import copy_of_tracked
from pages.shown import Ports, blocks, masked
from paths import ROOT
from stages.started import started

README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = "forebay engine --model llama-3-8b --long-prefill-token-threshold 2048"
NO_INDEX = ("No matching distribution found", "Could not fetch URL", "Network is unreachable")


class Stranger:
    """A user with a clone and an empty folder, who has nothing but a shell and Python."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name in ("clone", "work"):
            (home / name).mkdir(parents=True)
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        path = f"{home}/.local/bin:{os.environ['PATH']}"
        self.environ = {**pip, "HOME": str(home), "PATH": path, "NO_COLOR": "1"}

    def words(self, line: str, where: str = "work") -> list[str]:
        """The command that runs `line` in a folder of the user's home."""
        return ["/bin/bash", "-c", f"cd {self.home / where} && {line}"]

    def runs(self, line: str, where: str = "work") -> "subprocess.CompletedProcess[str]":
        words = self.words(line, where)
        return subprocess.run(words, capture_output=True, text=True, timeout=280, env=self.environ)

    def prints(self, line: str) -> list[str]:
        done = self.runs(line)
        assert done.returncode == 0, done.stderr
        return [printed.rstrip() for printed in done.stdout.strip("\n").splitlines()]

    def begins(self, running: ExitStack, line: str, ready: str) -> None:
        """Start a server with the installed command."""
        log = self.home.parent / f"log-{ready.split(':')[2].split('/')[0]}"
        running.enter_context(started(self.words(f"exec {line}"), log, ready, **self.environ))

    def installs(self) -> "subprocess.CompletedProcess[str]":
        """Follow `Install`, by the two lines where pipx is not installed."""
        done = self.runs("make install", "clone")
        if done.returncode:
            done = self.runs("\n".join(["set -e", *done.stdout.splitlines()]), "clone")
        return done


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """One who has done what `Install` says."""
    home = tmp_path_factory.mktemp("stranger") / "home"
    stranger = Stranger(home)
    copy_of_tracked(home / "clone")
    done = stranger.installs()
    if any(words in done.stderr for words in NO_INDEX):
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr
    yield stranger
    shutil.rmtree(home)


def test_the_blocks_are_those_that_are_run_here() -> None:
    said = [content.split()[1:3] for _, content in blocks(README)]
    assert said == [
        ["install"], ["forebay", "demo"], ["-", "{name:"], ["proxy", "--config"],
        ["forebay", "traces"], ["forebay", "simulate"],
    ]  # fmt: skip


@pytest.mark.skipif(
    not os.environ.get("TEST_INSTALL"),
    reason="takes a minute: set TEST_INSTALL=1; fetches packages",
)
@pytest.mark.timeout(600)
def test_every_block_gives_what_stands_there(stranger: Stranger) -> None:
    ports = Ports()
    _, preview, config, serve, load_test, simulate = (text for _, text in blocks(README))
    assert stranger.prints("which forebay") == [f"{stranger.home}/.local/bin/forebay"]
    prints_what_stands_there(stranger, preview)
    with ExitStack() as running:
        for port in ports.free[:2]:
            health = f"http://127.0.0.1:{port}/health"
            stranger.begins(running, f"{ENGINE} --port {port}", health)
        (stranger.home / "work" / "forebay.yaml").write_text(ports(config), encoding="utf-8")
        proxy, _, curl = ports(serve).partition("\n")
        proxy += f" --port {ports.free[2]} --admin-port {ports.free[3]}"
        stranger.begins(running, proxy, f"http://127.0.0.1:{ports.free[3]}/readyz")
        (answer,) = stranger.prints(curl.replace("MODEL", "llama-3-8b"))
        assert '"object":"chat.completion"' in answer
        synth, replay = re.split(r"^(?=\$ )", load_test, flags=re.MULTILINE)[1:]
        stranger.prints(synth.removeprefix("$ "))
        command, *shown = ports(replay).splitlines()
        printed = stranger.prints(f"{command.removeprefix('$ ')} --duration 10s")
        assert masked(shown[0]) == masked(printed[0])
        assert masked(shown[-1]) == masked(printed[-1])
    prints_what_stands_there(stranger, simulate)


def prints_what_stands_there(stranger: Stranger, console: str) -> None:
    command, *shown = console.rstrip().splitlines()
    printed = stranger.prints(f"COLUMNS=80 {command.removeprefix('$ ')}")
    if shown[-1] == "...":
        shown.pop()
        assert len(printed) > len(shown)
        printed = printed[: len(shown)]
    assert printed == shown
