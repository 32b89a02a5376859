"""The measurements against round-robin: bad words, a server that does not start, thin figures."""

from pathlib import Path

import pytest
from made_runs import answered, write_run
from round_robin import cases, main

from forebay.analysis.demo.processes import ServerFailed
from forebay.analysis.runs.load import load_run


def test_a_line_says_why_a_server_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise ServerFailed("no URL within 60 s")

    monkeypatch.setattr("forebay.analysis.demo.side_by_side.side_by_side", fails)
    assert main(["documents", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "round_robin: no URL within 60 s\n"


@pytest.mark.parametrize(
    ("words", "said"), [([], "arguments are required: name"), (["nothing"], "choose from mooncake")]
)
def test_bad_words_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.replace("'", "")


@pytest.mark.parametrize("pace", ["0", "-1", "inf", "nan"])
def test_a_pace_that_no_engine_has_is_named(
    pace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    assert main(["documents", "--out", str(out), f"--time-scale={pace}"]) == 2
    assert "--time-scale" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["documents", "--out", str(file / "x")]) == 2
    said = capsys.readouterr().err
    assert "cannot be made (Not a directory)" in said
    assert len(said.splitlines()) == 1


def test_a_percentile_with_few_samples_is_not_shown(tmp_path: Path) -> None:
    rows = [answered(i, "chat", float(i), 1.0 + i) for i in range(50)]
    told = {"ttft_ms": {"chat": {"count": 50, "p50": 0.1, "p99": 0.6, "max": 2.0}}}
    run = load_run(write_run(tmp_path / "r", rows, told))
    assert run.shown("ttft_ms", "chat", "p50") == 0.1
    assert cases(tmp_path)["documents"].show(run)["chat TTFT p99 s"] is None
