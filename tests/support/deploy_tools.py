"""Programs that check the files in deploy/ and .github/: `make deploy-tools` installs them."""

import pytest
from paths import ROOT

FOLDER = ROOT / ".deploy-tools" / "bin"


def tool(name: str) -> str:
    return str(FOLDER / name)


def needs_tool(name: str) -> pytest.MarkDecorator:
    missing = not (FOLDER / name).exists()
    return pytest.mark.skipif(missing, reason=f"needs {name}: make deploy-tools")
