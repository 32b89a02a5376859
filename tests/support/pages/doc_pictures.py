"""The pictures of the report, for README.md and docs/tutorials/demo.md.

PYTHONPATH=.typing:tests/support python tests/support/pages/doc_pictures.py

draws the report of `forebay demo --preview`, light and dark. It needs chromium on PATH.
"""

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from paths import ROOT
from PIL import Image

from forebay.proxy.cli import main

WINDOW = "1000,1466"  # as far as the first two plots
COLOURS = 128  # the files are a third as large with them


def draw(page: Path, picture: Path, *, dark: bool) -> None:
    """Write the beginning of a page as a PNG."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser, "no chromium on PATH: apt install chromium"
    with TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", f"--window-size={WINDOW}", f"--screenshot={picture}",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}", page.as_uri()],
            check=True, timeout=120.0, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    with Image.open(picture) as drawn:
        drawn.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture)


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        assert main(["demo", "--preview", "--out", made, "--force"]) == 0
        for theme in ("light", "dark"):
            picture = ROOT / f"docs/assets/report-{theme}.png"
            draw(Path(made) / "report.html", picture, dark=theme == "dark")
