"""analysis/compare/headline.py, limits.py: what cannot be compared is said first, and all of it."""

from pathlib import Path

import pytest
from fakes.made_runs import answered, write_run

from forebay.proxy.cli import main


def test_runs_of_two_traces_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        str(
            write_run(
                tmp_path / name,
                [answered(at, "chat", at / 10, ttft) for at in range(2_000)],
                info={"model": name},
            )
        )
        for name, ttft in (("a", 1.0), ("b", 0.1))
    ]
    assert main(["compare", *paths]) == 0
    first = " ".join(capsys.readouterr().out.split())
    assert first.startswith("The runs cannot be compared: the runs differ in model.")
    assert main(["compare", *paths, "--fail-if-worse"]) == 1
    assert "--fail-if-worse: The runs cannot be compared" in capsys.readouterr().err
