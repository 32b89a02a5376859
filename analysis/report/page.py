"""The frame of a report: one HTML file with its style and a small script.

The content security policy forbids every outside resource and any other script, so that a name in
a trace can never run as code. Without the script, only the values under the percentile plots are
missing.
"""

import base64
import hashlib
from html import escape

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --rule: #dfe3e8; --panel: #f6f7f9;
  --good: #11693a; --bad: #b3261e; --care: #8a5300;
  --run0: #b85c00; --run1: #0a63b8; --run2: #0b7a5b; --run3: #8b3f8f; --run4: #5c6670;
  --run5: #a8203e; --run6: #00788a; --run7: #6b6a00; --run8: #4b3fb5; --run9: #7a4a2b; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e6e9ec; --soft: #9fa9b4; --rule: #30363d; --panel: #1d2126;
  --good: #6ccf97; --bad: #ff9a90; --care: #f0b45a;
  --run0: #f2a04e; --run1: #68b0f5; --run2: #4cc7a1; --run3: #d694d8; --run4: #a9b3bd;
  --run5: #f48a9e; --run6: #52c7d9; --run7: #c9c44a; --run8: #a79cf5; --run9: #cf9f7c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; font-weight: 650;
  letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.8rem 0 .3rem; font-weight: 650; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; font-weight: 600; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 70ch; }
.soft { color: var(--soft); }
.small { font-size: .875rem; }
.summary { font-size: 1.2rem; line-height: 1.4; margin: 1.4rem 0 .6rem; font-weight: 550;
  padding-left: 14px; border-left: 4px solid var(--soft); overflow-wrap: anywhere; }
.summary.better { border-color: var(--good); } .summary.worse { border-color: var(--bad); }
.summary.mixed, .summary.doubtful { border-color: var(--care); }
details.summary { margin: .7rem 0 0; } .summary summary { color: inherit; font-size: 1rem; }
.summary .points { font-size: 1rem; font-weight: 400; }
.points { margin: .4rem 0; padding-left: 1.2rem; max-width: 84ch; }
.points li { margin: .2rem 0; overflow-wrap: anywhere; }
.warnings { border: 1px solid var(--care); border-radius: 6px; padding: 10px 16px;
  margin: 1.2rem 0; }
.warnings strong { color: var(--care); }
.warnings ul { margin: .3rem 0 0; padding-left: 1.1rem; } .warnings li { overflow-wrap: anywhere; }
.cards { display: grid; gap: 12px; margin: 1.2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); }
.card { background: var(--panel); border-radius: 8px; padding: 12px 14px; min-width: 0; }
.card h3 { margin: 0 0 .35rem; font-size: .875rem; font-weight: 500; color: var(--soft); }
.card div { display: flex; gap: 8px; align-items: baseline; }
.card .name { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; font-size: .875rem; }
.card .value { font-size: 1.15rem; font-weight: 600; white-space: nowrap; }
.card .change { margin: .35rem 0 0; font-size: .875rem; }
.better-text { color: var(--good); } .worse-text { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: .6rem 0 .2rem; padding: 0;
  list-style: none; font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: 7px; min-width: 0; overflow-wrap: anywhere; }
.key { width: 14px; height: 14px; flex: none; }
.plots { display: grid; gap: 12px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.plots.one { max-width: 640px; }
figure { margin: .6rem 0 0; min-width: 0; }
figure h3 { margin: 0 0 .2rem; }
.plot { display: block; width: 100%; height: auto; overflow: visible; }
.plot text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; } .base { stroke: var(--soft); stroke-width: 1; }
.curve { fill: none; stroke: var(--c); stroke-width: 2.4; stroke-linejoin: round; }
.curve.thin { stroke-width: 1; opacity: .75; }
.curve.lost { stroke-width: 1.4; stroke-dasharray: 1.5 3.5; stroke-linecap: round; }
.mark { fill: var(--c); stroke: var(--paper); stroke-width: 1.2; }
.dots { fill: none; stroke: var(--c); stroke-width: 3; stroke-linecap: round; opacity: .6; }
.ticks { fill: none; stroke: var(--c); stroke-width: 1.4; }
.cursor { stroke: var(--soft); stroke-width: 1; }
.run0 { --c: var(--run0); } .run1 { --c: var(--run1); } .run2 { --c: var(--run2); }
.run3 { --c: var(--run3); } .run4 { --c: var(--run4); } .run5 { --c: var(--run5); }
.run6 { --c: var(--run6); } .run7 { --c: var(--run7); } .run8 { --c: var(--run8); }
.run9 { --c: var(--run9); }
.readout { min-height: 1.5em; font-size: .82rem; color: var(--soft); }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; min-width: 100%; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: baseline; }
td.n, th.n { text-align: right; white-space: nowrap; } thead th { font-weight: 600;
  vertical-align: bottom; }
th.n.name { white-space: normal; overflow-wrap: anywhere; min-width: 6.5em; }
tbody th { font-weight: 400; white-space: nowrap; }
tbody th.section { font-weight: 600; padding-top: 18px; }
.why { padding-left: 16px; }
td.run { white-space: nowrap; } td.run .key { width: 11px; height: 11px; margin-right: 3px; }
td:last-child, th:last-child { padding-right: 4px; }
.bars { white-space: nowrap; line-height: 0; }
.part { display: inline-block; height: 14px; min-width: 0; vertical-align: middle; }
.legend .part { width: 14px; flex: none; }
.part.late { background: var(--run4); } .part.queue { background: var(--run1); }
.part.first { background: var(--run0); } .part.rest { background: var(--run2); }
.bar { display: inline-block; height: .7em; min-width: 1px; background: var(--c);
  border-radius: 1px; }
.settings th { width: 9em; vertical-align: top; } .settings td { overflow-wrap: anywhere; }
.settings td code, pre { font: .85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
details { margin: .4rem 0 0; } summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
pre { background: var(--panel); border-radius: 6px; padding: 12px; overflow-x: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: .9rem;
  margin: .6rem 0; } dt { font-weight: 600; } dd { margin: 0; max-width: 75ch; }
footer { margin-top: 3rem; border-top: 1px solid var(--rule); padding-top: 10px; }
@media (max-width: 620px) {
  main { padding: 24px 16px 40px; } h1 { font-size: 1.45rem; } .summary { font-size: 1.08rem; }
  .plot text { font-size: 15.5px; } .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
  .card { padding: 10px 11px; } .card div { flex-wrap: wrap; gap: 0 8px; }
  .card .name { flex: 1 0 100%; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; }
  .settings th { width: auto; } }
@media print { main { max-width: none; padding: 0; } .readout { display: none; }
  figure, .card, tr { break-inside: avoid; } h2, h3, thead { break-after: avoid; }
  section > p { break-after: avoid; } }
"""

# Shows the value of every run at the pointer, by the last step at or before it.
SCRIPT = """
"use strict";
for (const plot of document.querySelectorAll("svg.percentile")) {
  const data = plot.dataset, curves = JSON.parse(data.curves), out = plot.nextElementSibling;
  const left = Number(data.left), right = Number(data.right), most = Math.log(Number(data.most));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("visibility", "hidden");
  plot.append(cursor);
  const idle = out.textContent = "Hover over the plot for values.";
  const duration = s => s >= 1 ? s.toFixed(s < 10 ? 2 : 1) + " s"
    : (s * 1e3).toFixed(s < 0.01 ? 2 : s < 0.1 ? 1 : 0) + " ms";
  const show = event => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    const x = Math.min(right, Math.max(left, at));
    const percent = 100 * (1 - Math.exp(-(x - left) / (right - left) * most));
    const values = curves.map(curve => {
      let value = null;
      for (const [place, v] of curve.steps) { if (place > x) break; value = v; }
      return curve.name + " " + (value === null ? "–" : duration(value));
    });
    const digits = percent < 99 ? 1 : percent < 99.9 ? 2 : 3;
    out.textContent = percent.toFixed(digits) + " %:  " + values.join("  ·  ");
    for (const [key, value] of [["x1", x], ["x2", x], ["y1", 12], ["y2", 254]])
      cursor.setAttribute(key, value);
    cursor.setAttribute("visibility", "visible");
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); out.textContent = idle; });
}
"""


def html_page(title: str, body: str) -> str:
    """A complete document around the HTML in `body`. `title` is escaped here."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
