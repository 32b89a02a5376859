"""Check that every file with a version has the one that is released: release_version.py 0.1.0"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    ("pyproject.toml", r'^version = "(.+)"$'),
    ("CITATION.cff", r"^version: (.+)$"),
    ("deploy/helm/forebay/Chart.yaml", r"^version: (.+)$"),
    ("deploy/helm/forebay/Chart.yaml", r"^appVersion: (.+)$"),
)


def versions() -> list[tuple[str, str]]:
    """The files with a version, and what each says."""
    texts = ((name, (ROOT / name).read_text(encoding="utf-8"), line) for name, line in PLACES)
    return [(name, "".join(re.findall(line, text, re.MULTILINE))) for name, text, line in texts]


if __name__ == "__main__":
    wrong = [f"{name} says {found}" for name, found in versions() if found != sys.argv[1]]
    sys.exit(f"not {sys.argv[1]}: {', '.join(wrong)}" if wrong else 0)
