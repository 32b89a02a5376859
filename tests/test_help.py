"""The help of every command can be read at 80 columns: no option is cut off, no example broken."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer

from forebay.proxy.cli import COMMANDS, main
from forebay.proxy.completion import candidates
from forebay.traces.ground.command_line.messages import talk

WIDTH = 80


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and sub-command by its words."""
    for word, (place, _) in COMMANDS.items():
        module, attribute = place.split(":")
        yield from below(word, typer.main.get_command(getattr(import_module(module), attribute)))


def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from below(f"{words} {name}", one)


ALL = dict(commands())


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("FORCE_COLOR", "1")


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", ALL)
def test_help_fits_and_cuts_nothing_off(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(words, capsys)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert "\x1b" not in text
    assert "\\[" not in text
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith(f"Usage: forebay {words}")
    for param in ALL[words].params:
        if param.hidden or param.param_type_name == "argument":
            continue
        for name in param.opts:
            assert name.removeprefix("--") in rest, name
        if type(param.default) in (int, float, str) and param.show_default:
            assert re.search(rf"\[(.*; )?default:\s+{re.escape(str(param.default))}", rest), param
    assert "--quiet" in rest
    assert "--help" in rest


@pytest.mark.parametrize("words", ALL)
def test_an_example_can_be_pasted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(words, capsys)
    examples = re.findall(r"^    (forebay (?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert example.startswith(f"forebay {words}"), example
        assert len(re.findall(r"(?<![\w/])forebay ", example)) == 1, "two need a line each"
        for line in example.splitlines()[1:]:
            assert line.startswith("        -")
    for example in (re.sub(r"\\\n *", "", one) for one in examples):
        name = max((one for one in ALL if example.startswith(f"forebay {one}")), key=len)
        known = {opt for param in ALL[name].params for opt in (*param.opts, *param.secondary_opts)}
        options = re.findall(r" (--?[a-z][a-z-]*)", example.partition(" -- ")[0])
        assert set(options) <= known, example


def test_every_command_of_the_first_page_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("", capsys)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(re.search(rf"^  {word} ", text, re.MULTILINE) for word in COMMANDS)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_leaves_out_all_but_results_warnings_and_errors(
    quiet: bool, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["traces", "synth", "documents", "--users", "5", "--duration", "5"]
    out = str(tmp_path / "t.jsonl")
    assert main([*words, "-o", out, *(["--quiet"] if quiet else [])]) == 0
    assert (capsys.readouterr().err == "") is quiet
    assert main(["traces", "describe", out, "--quiet", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    assert main(["traces", "describe", "nowhere.jsonl", "--quiet"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    talk("a message")
    assert capsys.readouterr().err == "a message\n"  # --quiet ends with its command


WRITE_FILES = {"completion", "runs export"}
"""Commands whose result is a script, or a file of another tool."""


def test_every_command_with_a_result_prints_json_on_demand() -> None:
    groups = {words for words, command in ALL.items() if getattr(command, "commands", {})}
    without = {
        words for words, one in ALL.items() if not any("--json" in p.opts for p in one.params)
    }
    assert without - groups <= WRITE_FILES


def test_the_configuration_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_UPSTREAM_API_KEY", "hush")
    words = ["proxy", "--json", "--backend", "http://127.0.0.1:9", "--quiet"]
    assert main([*words, "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["logs"]["format"] == "json"
    assert printed["backends"][0]["name"] == "gpu0"
    assert "hush" not in str(printed)
    assert main([*words, "--check-config"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out), said.err) == ({"valid": True}, "")


def test_tables_obey_no_color(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    words = ["kv", "--model", "llama-3-8b", "--gpu", "h200"]
    assert main(words) == 0
    assert not re.search("\x1b\\[[0-9;]*3[0-9]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), {"proxy", "replay"}),
        (("re",), {"replay", "report"}),
        (("replay", "--stall"), {"--stall-timeout"}),
        (("traces", "synth", "sh"), {"shared-document"}),
        (("engine", "--no-async"), {"--no-async-scheduling"}),
        (("replay", "trace"), set()),  # a file
        (("nonsense", "-"), set()),
    ],
)
def test_what_completes_a_word(words: tuple[str, ...], found: set[str]) -> None:
    made = set(candidates(words, COMMANDS))
    assert made == found if words else made >= found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([found, "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shell == "bash":
        ask = f'{script}\nforebay() {{ {sys.executable} -m forebay.proxy "$@"; }}\n'
        ask += 'COMP_WORDS=(forebay rep); COMP_CWORD=1; _forebay; echo "${COMPREPLY[@]}"'
        done = subprocess.run([found, "-c", ask], text=True, capture_output=True, check=False)
        assert done.stdout == "replay report\n"


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "dos"]) == 2
    assert "one of: bash, zsh, fish" in capsys.readouterr().err
