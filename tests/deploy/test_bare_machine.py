"""README.md on a bare Debian: the packages that it names, a clone, each block as it stands.

debootstrap (Debian package `debootstrap`) makes the machine in a folder, from Debian's packages.
As in a container, the user has a file system and a network apart: the ports are README.md's own.
`make install` takes pip's settings from variables PIP_*, and the certificates of this machine.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages.shown import SHOWN_PORTS, Ports
from paths import ROOT
from stages.own_network import own_network
from stages.stranger import README, Stranger, every_block_gives_what_stands_there

SUITE = "bookworm"
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
pytestmark = pytest.mark.skipif(
    not os.environ.get("TEST_BARE") or not shutil.which("debootstrap") or os.geteuid() != 0,
    reason="takes five minutes: set TEST_BARE=1; needs debootstrap, and to be root",
)


class Bare(Stranger):
    """A user of the Debian in `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__(Path("/home/user"), root / "home" / "user")
        self.logs, self._root = root.parent, root
        kept = {name: value for name, value in self.environ.items() if name.startswith("PIP_")}
        self.environ = {**os.environ, "HOME": str(self.home)}
        self._settings = [f"{name}={value}" for name, value in kept.items()]

    def words(self, line: str) -> list[str]:
        return self.as_user("user", line)

    def as_user(self, user: str, line: str) -> list[str]:
        """The command that runs `line` in a login shell of `user`."""
        home = self.home if user == "user" else Path("/root")
        mounted = 'mount -t proc proc $0/proc && mount -t tmpfs tmpfs $0/dev/shm && exec "$@"'
        path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        return [
            "unshare", "--mount", "sh", "-c", mounted, str(self._root),
            "chroot", f"--userspec={user}:{user}", str(self._root),
            "/usr/bin/env", "-i", f"HOME={home}", path, "NO_COLOR=1", *self._settings,
            "/bin/bash", "-lc", f"cd && {line}",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """One who has installed what README.md names, and cloned this repository's last commit."""
    folder = tmp_path_factory.mktemp("bare")
    root = folder / "root"
    run("debootstrap", "--variant=minbase", SUITE, str(root), timeout=600)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    one = Bare(root)
    run("git", "clone", "-q", str(ROOT), str(one.files / "clone"))
    named = re.search(r"`(apt install [\w -]+)`", README)
    assert named is not None
    install = f"apt-get -qq update && {named[1]} -y -qq --no-install-recommends"
    run(*one.as_user("root", f"{install} && useradd --shell /bin/bash user"), timeout=600)
    run(*one.as_user("root", "cp -rT /etc/skel /home/user && chown -R user: /home/user"))
    shutil.copy(Path("/", CERTIFICATES), root / CERTIFICATES)
    yield one
    shutil.rmtree(root)


def run(*words: str, timeout: float = 60) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.timeout(1200)
def test_every_block_gives_what_stands_there(bare: Bare) -> None:
    done = bare.runs("make install", "clone")
    assert done.returncode == 0, done.stdout + done.stderr
    with own_network():
        every_block_gives_what_stands_there(bare, Ports(SHOWN_PORTS))
