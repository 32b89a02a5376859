"""The files of a plot: an SVG document, and a PNG where the extra `png` is installed."""

from importlib.util import find_spec

from forebay.traces.ground.command_line.messages import talk

SCALE = 2  # pixels of a PNG for a unit of the drawing


def plot_files(stem: str, document: str) -> dict[str, bytes]:
    """Return the content of `stem`.svg, and of `stem`.png where CairoSVG is installed, by name."""
    drawn = document.encode()
    files = {f"{stem}.svg": drawn}
    if find_spec("cairosvg"):
        try:
            from cairosvg import svg2png

            files[f"{stem}.png"] = svg2png(bytestring=drawn, scale=SCALE)
        except OSError as error:  # the system lacks the library Cairo
            talk(f"no {stem}.png: {str(error).splitlines()[0]}")
    return files
