"""README.md: short, and its figures come from the results. No text of a picture is cut."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages.doc_pages import BLOCK
from paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 165  # lines
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|s\b|ms\b|times\b|x\b|GPUs\b|requests\b)")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= LONGEST


def test_every_figure_is_generated() -> None:
    """A measured figure outside a generated block could differ from the results."""
    assert FIGURE.findall(CODE.sub("", BLOCK.sub("", TEXT))) == []


NARROW, WIDE = set("ijlItf.,:;'|!()[]/- \u00a0"), set("mwMW%@")
SVG = "{http://www.w3.org/2000/svg}"
MOVE = re.compile(r"translate\(([-\d.]+)[ ,]+([-\d.]+)\)")


def width(text: str, size: float) -> float:
    """An upper bound of the width in pixels: DejaVu Sans is the widest of the usual fonts."""
    return size * sum(
        0.4 if c in NARROW else 1.0 if c in WIDE else 0.72 if c.isupper() else 0.64 for c in text
    )


def texts_of(path: Path) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield each text of an SVG with its left, right, top and bottom end in its view."""
    root = ElementTree.parse(path).getroot()
    rules = " ".join(style.text or "" for style in root.iter(f"{SVG}style"))
    size = re.search(r"font(?:-size)?: ?(\d+)px", rules)
    yield from _texts(root, 0.0, 0.0, float(size[1]) if size else 16.0, "start")


def _texts(
    node: ElementTree.Element, x: float, y: float, size: float, anchor: str
) -> Iterator[tuple[str, float, float, float, float]]:
    transform = node.get("transform", "")
    if moved := MOVE.match(transform):
        x, y = x + float(moved[1]), y + float(moved[2])
    size = float(node.get("font-size", size))
    anchor = node.get("text-anchor", anchor)
    text = "".join(node.itertext()) if node.tag == f"{SVG}text" else ""
    if text.strip():
        x, y = x + float(node.get("x", "0")), y + float(node.get("y", "0"))
        long = float(node.get("textLength") or width(text, size))
        before = long * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        if "rotate(-90" in transform:
            yield text, x - size, x, y - long + before, y + before
        else:
            yield text, x - before, x - before + long, y - size, y
    for child in node:
        yield from _texts(child, x, y, size, anchor)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "assets").rglob("*.svg")), ids=lambda path: path.stem
)
def test_no_text_of_a_picture_is_cut(path: Path) -> None:
    view = ElementTree.parse(path).getroot().get("viewBox") or ""
    left, top, wide, high = map(float, view.split())
    found = list(texts_of(path))
    assert found
    cut = [
        text for text, begin, end, above, below in found
        if not (left <= begin <= end <= left + wide and top <= above <= below <= top + high)
    ]  # fmt: skip
    assert cut == []


def test_it_links_every_table_of_faults_at_least_through_one_page() -> None:
    assert "(docs/reference/faults.md)" in TEXT
    http = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for page in Path(ROOT / "docs" / "reference").glob("faults*.md"):
        assert f"({page.name})" in http
