"""Print tables of behaviour in virtual time: hot documents, fifty users, wrong rejections.

    python tests/bench/behaviour.py                            (about a minute)
    python tests/bench/behaviour.py --traces ../shared/data/traces --sample 50   (ten minutes)

Two simulated engines (Llama-3-8B, H200). Equal input gives equal figures. Exit status 1 where one
is not what it must be.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from behaviour_decisions import LOADS, judged, names, rows
from behaviour_scenes import HOT, fifty, hot_alone, hot_beside_cold, spread, uniform


def affinity(seeds: int) -> int:
    print("| documents | cold: on majority backend | hot: on each | hot prefills | extra |")
    print("| --- | --- | --- | --- | --- |")
    bad = 0
    scenes = [(f"16 uniform, seed {s}", uniform(s)) for s in range(seeds)]
    scenes += [("one hot, 32 at once", hot_alone())]
    scenes += [(f"hot beside 16 cold, seed {s}", hot_beside_cold(s)) for s in range(seeds)]
    for name, trace in scenes:
        found = spread(trace)
        cold = "-" if name.startswith("one hot") else f"{found.cold:.3f}"
        hot = f"{found.hot:.3f} / {1 - found.hot:.3f}" if HOT in found.whole else "-"
        print(f"| {name} | {cold} | {hot} | {found.whole[HOT] or '-'} | {found.extra} |")
        bad += cold != "-" and found.cold < 0.95
        bad += HOT in found.whole and not (0.45 <= found.hot <= 0.55 and found.whole[HOT] <= 2)
    return bad


def users() -> int:
    print("\n| fifty users of 60,000 tokens | whole prefills | computed after, s | others, s after "
          "it was there: p50 / last | a hit: p50 / last |")  # fmt: skip
    print("| --- | --- | --- | --- | --- |")
    bad = 0
    for system in (0, 4_096):
        hit = fifty(0.0, system, cached=True).others_s
        for over_s in (0.0, 5.0):
            found = fifty(over_s, system)
            name = ("at once" if not over_s else f"over {over_s:.0f} s") + (
                f", behind {system} tokens that all share" if system else ""
            )
            others = found.others_s
            print(f"| {name} | {found.whole} | {found.first_s:.2f} | "
                  f"{others[len(others) // 2]:.2f} / {others[-1]:.2f} | "
                  f"{hit[len(hit) // 2]:.2f} / {hit[-1]:.2f} |")  # fmt: skip
            bad += found.whole > 2 or found.refused > 0 or others[-1] > 3 * hit[-1]
    return bad


def decisions(folder: Path | None, sample: int) -> int:
    print("\n| trace | load | requests | in time | refused | missed, of those admitted | "
          "false alone, of refusals | false together, of requests |")  # fmt: skip
    print("| --- " * 8 + "|")
    bad = 0
    for name in names(folder):
        trace = rows(name, folder)
        for load in LOADS:
            found = judged(trace, load, sample)
            alone = f"{found.false_alone:.1%} of {len(found.tried)}" if found.tried else "-"
            print(f"| {name} | {load:g} | {found.requests} | {found.met / found.requests:.1%} | "
                  f"{len(found.rejected) / found.requests:.1%} | {found.missed_share:.2%} | "
                  f"{alone} | {found.false_together:.2%} |", flush=True)  # fmt: skip
            bad += found.missed_share >= 0.05 or found.false_together >= 0.02
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of the published traces")
    parser.add_argument("--sample", type=int, default=10, help="refusals tried alone, a trace")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    if options.traces is not None and not options.traces.is_dir():
        print(f"--traces {options.traces}: no such folder", file=sys.stderr)
        return 2
    bad = affinity(options.seeds) + users() + decisions(options.traces, options.sample)
    print(f"\n{bad} rows are not what they must be" if bad else "\nall as they must be")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
