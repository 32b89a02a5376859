"""Find the capacity of each case: the highest rate with 90 % in time, of the best of some policies.

    python tests/bench/cases/capacity.py [CASE ...]

The first seed, over as many seconds as the case's cells; Forebay with 15 s as the documents'
longest wait. The figures stand in case_list.py: a change there makes all results old.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from case_list import CASES, Case
from play import FOREBAY, figures, play

JUDGED = (FOREBAY, "smg_cache_aware", "llm_d", "least_connections")
WANTED = 90.0  # % in time
EXACT = 1.03  # the highest rate that is met and the lowest that is not differ by this factor


def met(case: Case, rate: float, first: str) -> str | None:
    """Return a policy that has enough in time at this rate, trying `first` first."""
    for policy in sorted(JUDGED, key=lambda policy: policy != first):
        outcomes = play(case, policy, [(case.seconds, rate)], 0, max_wait_s=15.0)
        if figures(case, outcomes).in_time >= WANTED:
            return policy
    return None


def capacity(case: Case) -> tuple[float, str]:
    """Return requests a second, and the policy that takes them."""
    low, high, best = 0.0, 0.0, FOREBAY
    rate = case.capacity
    while not low or not high or high / low > EXACT:
        policy = met(case, rate, best)
        if policy is None:
            high, rate = rate, (low * rate) ** 0.5 if low else rate * 0.8
        else:
            best, low, rate = policy, rate, (rate * high) ** 0.5 if high else rate * 1.1
    return low, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    options = parser.parse_args()
    for name in options.cases or CASES:
        if not CASES[name].waits and not CASES[name].missing:
            rate, policy = capacity(CASES[name])
            print(f"{name}: {rate:.3g} ({policy})", flush=True)


if __name__ == "__main__":
    main()
