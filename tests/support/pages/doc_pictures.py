"""Draw docs/assets/report-*.png anew: the report of `forebay demo --preview`. It needs chromium.

PYTHONPATH=.typing:tests/support python tests/support/pages/doc_pictures.py
"""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from paths import ROOT
from PIL import Image

from forebay.proxy.cli import main

BROWSER = "chromium --headless --no-sandbox --disable-gpu --hide-scrollbars"
WINDOW = "1000,1466"  # as far as the first two plots
COLOURS = 128  # the files are a third as large with them

if __name__ == "__main__":
    with TemporaryDirectory() as made:
        assert main(["demo", "--preview", "--out", made, "--force"]) == 0
        for number, theme in enumerate(("dark", "light")):
            picture = ROOT / f"docs/assets/report-{theme}.png"
            options = [f"--user-data-dir={made}/{theme}", f"--window-size={WINDOW}",
                       f"--screenshot={picture}",
                       f"--blink-settings=preferredColorScheme={number}"]  # fmt: skip
            page = Path(made, "report.html").as_uri()
            subprocess.run([*BROWSER.split(), *options, page], check=True, timeout=120.0)
            with Image.open(picture) as drawn:
                drawn.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture)
