"""The files of a plot, and what another renderer than a browser makes of them."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.analysis.charts.files import SCALE, plot_files
from forebay.analysis.charts.heat_map import heat_map
from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.charts.svg import HEIGHT, WIDTH
from forebay.proxy.cli import main

LETTERS = (0x1B, 0x1F, 0x24)  # the colour of the key, of notes and of titles
RISE = [(1.0, 1.0), (100.0, 100.0)]


def rendered(drawn: str) -> bytes:
    """Return the drawing as PNG, or skip the test where nothing renders it."""
    files = plot_files("plot", drawn)
    if "plot.png" not in files:
        pytest.skip("pip install 'forebay[png]', and the library Cairo of the system")
    return files["plot.png"]


def dark(drawn: str, left: float, top: float, right: float, bottom: float) -> int:
    """Count the pixels of letters in a part of a drawing, in its units."""
    png = rendered(drawn)
    from PIL import Image  # CairoSVG needs it

    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert pixels.shape == (HEIGHT * SCALE, WIDTH * SCALE, 3)
    rows = slice(round(top * SCALE), round(bottom * SCALE))
    part = pixels[rows, round(left * SCALE) : round(right * SCALE)]
    return int((part == LETTERS).all(axis=2).sum())


def plot(name: str, note: str = "ridge") -> str:
    axis = Axis("tokens", count_label)
    return document(Panel([Series(name, RISE, RISE)], axis, axis, (10.0, note)))


def test_keys_and_notes_are_drawn_by_every_renderer() -> None:
    key = (300, 220, 464, 250)
    assert dark(plot("a long name of a series"), *key) > 2 * dark(plot("a name"), *key) > 100
    note = (250, 26, 464, 60)
    assert dark(plot("a"), *note) > dark(plot("a", ""), *note) == 0


def test_titles_are_drawn_by_every_renderer() -> None:
    drawn = heat_map({(1, 0.0): 1.0}, [1], [0.0], "length", "depth", "a title")
    assert dark(drawn, 0, 0, WIDTH, 20) > 100


def test_a_study_writes_a_picture_of_its_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendered(plot("a"))
    words = ["experiment", "memory", "--target", "sim:llama-3-8b@h200", "--out", str(tmp_path)]
    assert main(words) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "plot.svg, plot.png" in capsys.readouterr().err
    (tmp_path / "plot.svg").unlink()
    assert main(words) == 2


def test_without_the_library_of_the_system_the_plot_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lacking:
        def __getattr__(self, name: str) -> object:
            raise OSError('no library called "cairo-2" was found\nnor another')

    monkeypatch.setattr("forebay.analysis.charts.files.find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "cairosvg", Lacking())
    assert list(plot_files("plot", "<svg/>")) == ["plot.svg"]
    assert capsys.readouterr().err == 'no plot.png: no library called "cairo-2" was found\n'


def test_without_the_extra_there_is_the_drawing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.analysis.charts.files.find_spec", lambda _: None)
    assert plot_files("plot", "<svg/>") == {"plot.svg": b"<svg/>"}
