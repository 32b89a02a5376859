"""Every generated block and file is what the code and the results say now.

After a change write them anew: `make docs-figures`.
"""

from pathlib import Path

import pytest
from pages.doc_pages import FILES, pages, renewed
from pages.doc_reference import WHAT_TO_DO, error_codes
from paths import ROOT

from forebay.proxy.telemetry.metrics.backend_metrics import WAIT_REASONS

AGAIN = "write it anew: make docs-figures"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_it_is_made_from(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == FILES[name](), AGAIN


@pytest.mark.timeout(300)  # the README shows the output of four commands
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_blocks_of_a_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text, AGAIN


@pytest.mark.parametrize(
    "page", ["reference/metrics.md", "explanation/predictions-and-rejections.md"]
)
def test_every_reason_to_wait_is_explained(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [reason for reason in WAIT_REASONS.values() if f"`{reason}`" not in text] == []


def test_every_error_code_says_what_to_do() -> None:
    assert set(error_codes()) == set(WHAT_TO_DO)
