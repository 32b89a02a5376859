"""NVIDIA's op tables, if the package is installed that has them."""

import importlib.util
from pathlib import Path

import pytest

TABLES = "aiconfigurator_core"
needs_tables = pytest.mark.skipif(
    importlib.util.find_spec(TABLES) is None,
    reason="needs NVIDIA's op tables: pip install aiconfigurator-core==0.12.0 (82 MB)",
)


def tables_folder() -> Path:
    """Return the folder of the tables. Skips without them."""
    pytest.importorskip("pyarrow.parquet")
    spec = importlib.util.find_spec(TABLES)
    assert spec is not None
    return Path((spec.submodule_search_locations or [""])[0])
