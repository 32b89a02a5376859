"""The bar charts of README.md and docs/benchmarks/results.md. All show the same traffic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from guard import FOREBAY
from headline import SEEDS, SUSTAINED
from pages.doc_results import CHARTED, FLAG, LABELS, TRAFFIC, percent, routers_of, spread

THEMES = {
    "light": {"text": "#1f2328", "soft": "#59636e", "ours": "#0969da", "other": "#b6bfc9"},
    "dark": {"text": "#e6edf3", "soft": "#9198a1", "ours": "#4493f8", "other": "#4b5561"},
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar chart of a figure of every router. `least` is True if less is better."""

    title: str
    value: Callable[[Mapping[str, Any]], float]
    shown: Callable[[Mapping[str, Any]], str]
    least: bool

    def bars(self) -> list[tuple[str, float, str]]:
        """Router, value and words, the best router first."""
        of = routers_of(CHARTED)
        bars = [(name, self.value(of[name]), self.shown(of[name])) for name in LABELS]
        return sorted(bars, key=lambda bar: bar[1] if self.least else -bar[1])

    def about(self) -> str:
        counts = routers_of(CHARTED)[FOREBAY]["80%"]
        return (
            f"Virtual time: two simulated H200 GPUs with Llama-3-8B, vLLM's flag {FLAG[1:-1]}, and "
            f"models of routers. {TRAFFIC[CHARTED.traffic]}. {SEEDS} seeds of an hour each, ranges "
            f"over seeds in brackets; at 80 % {counts['chats']['requests']:,} chats and "
            f"{counts['documents']['requests']:,} documents. Every router that was played is here."
        )

    def text(self) -> str:
        """The chart in words, for readers who cannot see it."""
        phrases = (f"{LABELS[name]} {words}" for name, _, words in self.bars())
        return f"{self.title}. {'; '.join(phrases)}. {self.about()}"


def _tail(bucket: str) -> Chart:
    def shown(router: Mapping[str, Any]) -> str:
        at = router["80%"]
        share = percent(at[bucket]["in_time"][0])
        return f"{spread(at[bucket]['p99'])} s, {share} % in time"

    return Chart(
        f"{bucket.capitalize()}: first token, 99th percentile, at 80 % of what the best other "
        "router sustains",
        lambda router: float(router["80%"][bucket]["p99"][0]), shown, True,
    )  # fmt: skip


CHARTS = {
    "highest-load": Chart(
        f"Highest load, requests a second: {100 * SUSTAINED:.0f} % of chats in 2 s, of documents "
        "in 15 s",
        lambda router: float(router["highest_per_s"][0]),
        lambda router: spread(router["highest_per_s"]), False,
    ),
    "chat-p99": _tail("chats"),
    "document-p99": _tail("documents"),
}  # fmt: skip
"""The charts, by the beginning of their files' names. All show the same traffic."""
LEFT, WIDTH, ROW = 150, 560, 24  # of a chart, in pixels; a phone shows two thirds of them
RIGHT = 235  # room for the words beside the longest bar
LINE, LINE_CHARS, TITLE_CHARS = 16, 76, 64  # of the caption and the title


def chart(name: str, theme: str) -> str:
    """One chart as a stand-alone SVG."""
    drawn, colours = CHARTS[name], THEMES[theme]
    bars = drawn.bars()
    most = max(value for _, value, _ in bars)
    lines, title = wrap(drawn.about(), LINE_CHARS), wrap(drawn.title, TITLE_CHARS)
    top = LINE * len(title) + 20
    foot = top + ROW * len(bars) + 20
    height = foot + LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'width="{WIDTH}" height="{height}" '
        'font-family="-apple-system,\'Segoe UI\',Helvetica,Arial,sans-serif" font-size="13">',
        f"<title>{escape(drawn.text())}</title>",
        *(
            f'<text x="0" y="{18 + LINE * number}" font-weight="600" fill="{colours["text"]}">'
            f"{escape(line)}</text>"
            for number, line in enumerate(title)
        ),
    ]
    for number, (router, value, words) in enumerate(bars):
        y = top + ROW * number
        length = max((WIDTH - LEFT - RIGHT) * value / most, 2.0)
        ours = router == FOREBAY
        weight = ' font-weight="600"' if ours else ""
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end"{weight} '
            f'fill="{colours["text"]}">{escape(LABELS[router])}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="18" rx="2" '
            f'fill="{colours["ours" if ours else "other"]}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 14}"{weight} '
            f'fill="{colours["text"]}">{words}</text>',
        ]
    parts += [
        f'<text x="0" y="{foot + LINE * number}" font-size="12" fill="{colours["soft"]}">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    ]
    return "\n".join([*parts, "</svg>\n"])


def picture() -> str:
    """The chart in README.md, in the reader's colours."""
    dark, light = (f"docs/assets/highest-load-{theme}.svg" for theme in ("dark", "light"))
    description = escape(CHARTS["highest-load"].text())
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img src="{light}" alt="{description}"></picture>'
    )
