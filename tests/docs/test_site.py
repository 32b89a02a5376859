"""The site builds without a warning, and codespell finds nothing. Skipped without .docs-tools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

TOOLS = ROOT / ".docs-tools" / "bin"
needs_tools = pytest.mark.skipif(
    not (TOOLS / "mkdocs").exists(), reason="no .docs-tools: run `make docs-tools`"
)


@needs_tools
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """MkDocs warns about broken links, missing anchors and pages that are not in the menu."""
    done = subprocess.run(
        [TOOLS / "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    outside = [path for path in (tmp_path / "site").rglob("*.html")
               if 'src="http' in path.read_text(encoding="utf-8")]  # fmt: skip
    assert outside == []  # the site loads nothing from other servers


@needs_tools
def test_spelling() -> None:
    pages = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs"]
    skipped = "--skip=*.jsonl,*.svg,*.json"
    done = subprocess.run(
        [TOOLS / "codespell", "--ignore-words-list=te,rouge", skipped, *pages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_the_hook_rewrites_links_that_leave_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from types import SimpleNamespace

    from pages.site_links import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/deploy.md"))

    def shown(text: str) -> str:
        return on_page_markdown(text, page=page, config=None, files=None)

    monkeypatch.delenv("FOREBAY_REPOSITORY", raising=False)
    assert (
        shown("[a](../../deploy/x.yaml) [b](../reference/cli.md)") == "a [b](../reference/cli.md)"
    )
    monkeypatch.setenv("FOREBAY_REPOSITORY", "https://example.org/blob/main")
    assert shown("[a](../../x.yaml#k)") == "[a](https://example.org/blob/main/x.yaml#k)"
