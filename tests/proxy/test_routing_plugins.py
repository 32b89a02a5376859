"""Routing policies of other people: the same function in the simulator and in the live proxy."""

import re
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path

import orjson
import pytest
from paths import ROOT
from said import Said
from stages.proxy_stage import by_request, on_stage

from forebay.proxy.cli import main
from forebay.proxy.config.routes import GROUP, CheckedRoute, find_route, route_names
from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Request
from forebay.proxy.core.policy.routing import Affinity, Option
from forebay.proxy.log_events import SAID_S, LogEvent
from forebay.proxy.routing import GuardedRoute
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.command_line.plugins import load_plugin
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents

EXAMPLE = ROOT / "examples" / "plugin-routing"
PAGE = ROOT / "docs" / "how-to" / "write-a-routing-policy.md"
LEAST_WORK = "def choose(request, engines, now):\n    return min(engines, key=KEY)\n"
KEY = "lambda e: (e.wait_s, e.load)"


@pytest.fixture(scope="module")
def rows() -> list[TraceRequest]:
    return list(chat_beside_documents(ChatBesideDocuments(duration_s=60.0)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example plug-in, as `pip install --target` leaves it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")  # the build writes beside the source
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", target, source],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    return target


def written(folder: Path, text: str) -> str:
    (folder / "policy.py").write_text(text)
    return f"{folder / 'policy.py'}:choose"


def backends(rows: list[TraceRequest], policy: str) -> list[str | None]:
    found = simulate(rows, Scenario(EngineConfig(), 3, policy))
    return [outcome.backend for outcome in found.outcomes]


def option(name: str, wait_s: float = 0.0) -> Option:
    return Option(name, wait_s, 0.0, 1.0, 1.0, 0, 0.0)


def test_a_function_in_a_file_decides_as_the_same_one_inside(
    tmp_path: Path, rows: list[TraceRequest]
) -> None:
    policy = written(tmp_path, LEAST_WORK.replace("KEY", KEY))
    decided = backends(rows, policy)
    assert decided == backends(rows, "least_work")
    assert decided != backends(rows, "warm_or_least_work")


def test_a_policy_sees_how_many_requests_an_engine_has(
    tmp_path: Path, rows: list[TraceRequest]
) -> None:
    text = (
        "def choose(request, engines, now):\n"
        "    if sum(engine.requests for engine in engines) == 3:\n"
        "        raise ValueError('three requests at once')\n"
        "    return engines[0]\n"
    )
    with pytest.raises(InputError, match="three requests at once"):
        backends(rows, written(tmp_path, text))


def test_the_example_is_installed_and_simulated(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], rows: list[TraceRequest],
) -> None:  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    words = ["traces", "synth", "chat-beside-documents", "--duration", "60", "-o", str(trace)]
    assert main(words) == 0
    config = tmp_path / "forebay.yaml"  # without the flag, chats behind documents are rejected
    config.write_text(
        "backends:\n"
        "  - {name: a, url: http://127.0.0.1:8001, long_prefill_token_threshold: 2048}\n"
        "  - {name: b, url: http://127.0.0.1:8002, long_prefill_token_threshold: 2048}\n"
    )
    simulated = ["simulate", str(trace), "--json", "--policy", "sticky", "--config", str(config)]
    assert main(simulated) == 2
    assert "--policy sticky: no such policy; warm_or_least_work" in capsys.readouterr().err
    monkeypatch.syspath_prepend(installed)
    assert route_names()[-1] == "sticky"
    assert main(simulated) == 0
    result = orjson.loads(capsys.readouterr().out)
    assert result["requests"] == len(rows)
    assert result["completed"] > 0.98 * len(rows)
    inside = backends(rows, f"{EXAMPLE / 'forebay_sticky.py'}:choose")
    assert backends(rows, "sticky") == inside
    assert main([*simulated, "--sweep", "policy=direct,sticky", "--jobs", "1"]) == 0


@pytest.mark.real_time
async def test_the_example_routes_in_the_live_proxy(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"one of warm_or_least_work, .*FILE\.py:NAME"):
        Config(routing="sticky")
    monkeypatch.syspath_prepend(installed)

    async with on_stage(by_request, by_request, routing="sticky") as (on, (one, two)):
        for _ in range(4):  # one after the other: both are idle, so the first gets all
            assert await on.status() == 200
        assert (len(one.calls), len(two.calls)) == (4, 0)


@pytest.mark.real_time
async def test_a_failing_policy_costs_no_request_and_is_logged_once(tmp_path: Path) -> None:
    policy = written(tmp_path, "def choose(request, engines, now):\n    return engines[7]\n")

    async with on_stage(by_request, routing=policy) as (on, _):
        for _ in range(3):
            assert await on.status() == 200
        said = on.said
    (line,) = [m for m, e in zip(said, said.events, strict=True) if e[0] is LogEvent.ROUTING_FAILED]
    assert "IndexError: tuple index out of range (policy.py, line 2)" in line
    assert "the default policy decides" in line


def test_failures_are_logged_at_most_once_a_minute() -> None:
    said = Said()

    def nothing(request: Request, engines: object, now: float) -> None:
        return None

    route = GuardedRoute(CheckedRoute("mine", nothing), said)  # type: ignore[arg-type]
    for now in (0.0, 1.0, 2.0, SAID_S):
        assert route(Request("r", 1), [option("a")], Affinity(), now).backend == "a"
    assert len(said) == 2
    assert said[0].startswith("routing mine: returned NoneType, not one of `engines`")
    assert "(2 more since the last such line)" in said[1]


def test_an_engine_that_was_not_offered_is_refused() -> None:
    route = CheckedRoute("mine", lambda request, engines, now: option("a"))
    with pytest.raises(InputError, match="mine: returned Option, not one of `engines`"):
        route(Request("r", 1), [option("a")], Affinity(), 0.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def choose(request, engines, now):\n    return 1 / 0\n",
         r"ZeroDivisionError: division by zero \(policy.py, line 2\), for request "),
        ("def pick(request, engines, now):\n    return engines[0]\n", "it defines no choose"),
        ("choose = 3\n", r"it is no function choose\(request, engines, now\)"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def choose(request\n", "SyntaxError: "),
    ],
)  # fmt: skip
def test_a_broken_policy_ends_a_simulation_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    policy, trace = written(tmp_path, text), tmp_path / "trace.jsonl"
    trace.write_text('{"id":"a","arrival_s":0,"input_tokens":9,"output_tokens":3}\n')
    assert main(["simulate", str(trace), "--policy", policy]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line), line
    assert str(tmp_path / "policy.py") in line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        find_route(f"{tmp_path}/gone.py:choose")


def test_a_plugin_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one", "two"):
        made = tmp_path / f"{package}-1.dist-info"
        made.mkdir()
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (made / "entry_points.txt").write_text(
            f"[{GROUP}]\nshared = {package}_module:choose\n{package} = {package}_module:choose\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="shared: one and two both define it"):
        load_plugin(GROUP, "shared")
    with pytest.raises(InputError, match="two: two cannot be loaded: ModuleNotFoundError"):
        load_plugin(GROUP, "two")
    with pytest.raises(ValueError, match="one cannot be loaded"):
        Config(routing="one")


def test_the_page_shows_a_policy_that_works_and_every_field(
    tmp_path: Path, rows: list[TraceRequest]
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = re.search(r"```python\n(.*?)```", page, re.S)
    assert shown
    inside = f"{EXAMPLE / 'forebay_sticky.py'}:choose"
    assert backends(rows, written(tmp_path, shown[1])) == backends(rows, inside)
    for field in (*signature(Option).parameters, "ttft_s"):
        assert field == "proven" or re.search(rf"^\|.*`{field}`", page, re.M), field
