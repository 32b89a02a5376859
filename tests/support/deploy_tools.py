"""Programs that check the files in deploy/ and .github/: `make deploy-tools` installs them."""

import subprocess

import pytest
from paths import ROOT

FOLDER = ROOT / ".deploy-tools" / "bin"


def tool(name: str) -> str:
    return str(FOLDER / name)


def needs_tool(name: str) -> pytest.MarkDecorator:
    missing = not (FOLDER / name).exists()
    return pytest.mark.skipif(missing, reason=f"needs {name}: make deploy-tools")


def check(name: str, *words: str) -> None:
    """Assert that a tool finds nothing wrong."""
    done = subprocess.run([tool(name), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
