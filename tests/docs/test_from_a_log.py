"""The commands of `From a log to a verdict` run: on an export of LiteLLM, and on a log of nginx."""

import csv
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import orjson
import pytest
from paths import ROOT

from forebay.proxy.cli import main

PAGE = (ROOT / "docs" / "how-to" / "bring-your-traffic.md").read_text(encoding="utf-8")
BLOCK = re.search(r"```\n(forebay traces import auto spend\.csv.*?)```", PAGE, re.DOTALL)
STARTED = datetime(2026, 11, 24, 10, tzinfo=UTC)


def spend_logs(path: Path) -> None:
    """Write 300 rows as PostgreSQL exports them: ordered by start, a twentieth of them failed."""
    dice = Random(5)
    start = STARTED
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["request_id", "call_type", "prompt_tokens", "completion_tokens", "startTime",
             "endTime", "model_group", "team_id", "session_id", "status", "messages", "metadata"]
        )  # fmt: skip
        for number in range(300):
            start += timedelta(seconds=dice.expovariate(2))
            failed = number % 20 == 7
            tokens = [0, 0] if failed else [dice.randint(200, 2000), dice.randint(20, 200)]
            end = start + timedelta(seconds=dice.uniform(0.5, 4))
            table.writerow(
                [f"chatcmpl-{number}", "acompletion", *tokens, start.replace(tzinfo=None),
                 end.replace(tzinfo=None), "llama-8b", f"team-{number % 3}", f"s{number // 2}",
                 "failure" if failed else "success", "{}", "{}"]
            )  # fmt: skip


def access_log(path: Path) -> None:
    """Write 300 lines of the `log_format` that the page asks for."""
    dice = Random(5)
    end = STARTED
    lines = []
    for _ in range(300):
        end += timedelta(seconds=dice.expovariate(2))
        sent = dice.randint(20, 200) * 230
        lines.append(
            f"10.0.0.9 - - [{end:%d/%b/%Y:%H:%M:%S} +0000] "
            f'"POST /v1/chat/completions HTTP/1.1" 200 {sent} "-" "OpenAI/Python" '
            f"request_length={dice.randint(800, 8000)} request_time={dice.uniform(0.5, 4):.3f} "
            "content_type=text/event-stream; charset=utf-8\n"
        )
    path.write_text("".join(lines))


@pytest.mark.parametrize("make", [spend_logs, access_log])
def test_the_commands_give_a_verdict(
    make: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert BLOCK is not None
    monkeypatch.chdir(tmp_path)
    (spend_logs if make is spend_logs else access_log)(tmp_path / "spend.csv")
    for line in BLOCK[1].splitlines():
        words = shlex.split(line)[1:]
        if words[0] == "search":  # a coarser answer, in a few seconds
            words += ["--resolution", "0.5", "--parts", "2", "--start", "30"]
        assert main(words) == 0, line
    assert "of requests meet ttft=2s with 95 % confidence" in capsys.readouterr().out.replace(
        "\n", " "
    )
    found = orjson.loads((tmp_path / "runs" / "simulated" / "result.json").read_bytes())
    assert found["highest_rate_per_s"] < found["fails_at_per_s"]
    assert found["warnings"] == [] or "too few" in found["warnings"][0]
