"""Check that every file with a version has the released version: release_version.py 0.1.0"""

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
    """The files with a version, and the version in each."""
    texts = ((name, (ROOT / name).read_text(encoding="utf-8"), line) for name, line in PLACES)
    return [(name, "".join(re.findall(line, text, re.MULTILINE))) for name, text, line in texts]


if __name__ == "__main__":
    wrong = [f"{name} says {version}" for name, version in versions() if version != sys.argv[1]]
    sys.exit(f"not {sys.argv[1]}: {', '.join(wrong)}" if wrong else 0)
