"""The proxy starts lean, and `--help` at once: neither loads the analysis stack."""

import subprocess
import sys

import pytest

HEAVY = {"numpy", "pyarrow", "rich", "tiktoken", "matplotlib", "vllm", "ray"}


@pytest.mark.parametrize(
    ("statement", "never"),
    [
        ("import forebay.proxy.serve", HEAVY | {"typer"}),
        ("import forebay.replay.engine.server.server", HEAVY),
        ("import forebay.proxy.cli as c; c.main(['--help'])", HEAVY | {"typer", "aiohttp"}),
    ],
)
def test_modules_loaded(statement: str, never: set[str]) -> None:
    code = f"import sys; {statement}; print('LOADED', *sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.split(".")[0] for name in out.split("LOADED")[1].split()}
    assert not loaded & never
