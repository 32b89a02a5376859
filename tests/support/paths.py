"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
BENCHMARKS = ROOT / "docs" / "benchmarks"
RESULTS = TESTS / "bench" / "results"  # what pages are computed from
GOLDEN = TESTS / "golden"
SHARED = ROOT.parent / "shared"  # large public data beside the checkout; absent on most machines
