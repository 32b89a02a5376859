"""README.md as a stranger runs it: a clone, an empty HOME, each block as it stands, in order.

`make install` fetches the packages for a minute, so CI does this and `make test` leaves it out.
tests/deploy/test_bare_machine.py does the same on a bare Debian.
"""

import os
import shutil
from collections.abc import Iterator

import pytest
from checkout import copy_of_tracked
from pages.shown import Ports, blocks
from stages.stranger import NO_INDEX, README, Stranger, every_block_gives_what_stands_there


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """One who has done what `Install` says."""
    home = tmp_path_factory.mktemp("stranger") / "home"
    one = Stranger(home, home)
    copy_of_tracked(home / "clone")
    done = one.installs()
    if any(words in done.stderr for words in NO_INDEX):
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr
    yield one
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
    every_block_gives_what_stands_there(stranger, Ports())
