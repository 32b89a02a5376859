"""analysis/compare/headline.py, limits.py: what cannot be compared is said first, and all of it."""

from pathlib import Path

from commands import forebay, printed
from fakes.made_runs import answered, write_run


def test_runs_of_two_traces_cannot_be_compared(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / name,
            [answered(at, "chat", at / 10, ttft) for at in range(2_000)],
            info={"model": name},
        )
        for name, ttft in (("a", 1.0), ("b", 0.1))
    ]
    first = " ".join(printed("compare", *runs).split())
    assert first.startswith("The runs cannot be compared: the runs differ in model.")
    judged = forebay("compare", *runs, "--fail-if-worse")
    assert judged.returncode == 1
    assert "--fail-if-worse: The runs cannot be compared" in judged.stderr
