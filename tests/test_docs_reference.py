"""The reference tables of the manual are those of the code.

After a change write them anew: `FOREBAY_WRITE_DOCS=1 pytest tests/test_docs_reference.py`.
"""

import os
import re

import pytest
from paths import ROOT

from forebay.proxy.telemetry import events

TABLES = {"log events": events.reference}
MANUAL = ROOT / "docs" / "how-to" / "operations.md"


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_that_of_the_code(table: str) -> None:
    mark = re.escape(f"<!-- generated: {table} -->")
    text = MANUAL.read_text(encoding="utf-8")
    found = re.search(f"{mark}\n\n(.*?)\n\n", text, re.DOTALL)
    assert found is not None
    made = TABLES[table]()
    if os.environ.get("FOREBAY_WRITE_DOCS"):
        MANUAL.write_text(text[: found.start(1)] + made + text[found.end(1) :], encoding="utf-8")
        return
    assert found.group(1) == made
