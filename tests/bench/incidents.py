"""Time until each place names the cause of an incident (tests/bench/incidents.py --write).

Stages the incidents of `tests/support/incident_scenes.py`. The minutes are from the beginning of
the incident to the first line of the log that names its cause. The live page and `forebay explain`
show it from then on. The second column has the places that named it at that commit, by its code.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import incident_scenes as scenes
from incident_scenes import Told
from paths import ROOT

PAGE = ROOT / "docs/how-to/troubleshooting.md"
BEGIN, END = "<!-- generated: tests/bench/incidents.py --write -->", "<!-- end -->"
PLACES = ("`doctor --since 1m`", "`explain --slowest`", "live page", "log")

SCENES: tuple[tuple[str, str, str, str], ...] = (
    # name of the scene, check, words of the log, what named it at a435a73
    ("died", "backends take work", "b1 is down", "log, doctor, page"),
    ("hangs", "backends take work", "b1 is down", "log, doctor, page"),
    ("is_slow", "speed of backends", "b1 needs", "doctor"),
    ("restarted_cold", "restarts", "b0 has restarted", "not named"),
    ("flood", "tenants", "tenant acme", "not named"),
    ("documents", "long documents", "bucket document", "not named"),
    ("small_kv_pool", "room for KV cache", "room in the KV cache", "not named"),
    ("prefix_caching_off", "prefix caching", "prefix caching is off", "doctor"),
    ("slow_tokenizer", "tokenizers", "the rest is its API server", "not named"),
    ("slow_clients", "network of clients", "s to send their prompts", "not named"),
    ("short_of_cpu", "event loop and memory", "event loop was late", "doctor"),
)


def played(name: str) -> Told:
    scene: Callable[..., Told] = getattr(scenes, name)
    if name != "flood":
        return scene()
    with TemporaryDirectory() as folder:
        return scene(Path(folder))


def table() -> Iterator[str]:
    yield f"| incident | a435a73 | {' | '.join(PLACES)} | minutes |"
    yield "| --- " * (len(PLACES) + 3) + "|"
    for name, check, words, before in SCENES:
        told = played(name)
        named = [(at, event) for at, event, line in told.events if words in line]
        at_s = max(0.0, named[0][0]) if named else float("inf")
        earlier = [at for at, event, _ in told.events if event == "finding" and 0 <= at < at_s]
        firsts = (
            told.findings[0].check == check,
            told.explained[:1] == [check],
            told.page[:1] == [check],
            bool(named) and not earlier,
        )
        what = (getattr(scenes, name).__doc__ or "").rstrip(".")
        cells = " | ".join("first" if first else "not first" for first in firsts)
        minutes = "0.5 at most" if name == "short_of_cpu" else f"{at_s / 60:.1f}"
        yield f"| {what} | {before} | {cells} | {minutes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into the guide")
    lines = []
    write = parser.parse_args().write
    for line in table():
        print(line, flush=True)
        lines.append(line)
    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        text = "\n".join(lines)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
