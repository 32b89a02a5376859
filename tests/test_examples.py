"""Every example runs: against a simulated engine, or in virtual time."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import yaml
from fakes.made_runs import write_pair
from paths import ROOT
from stages.proxy_stage import stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

EXAMPLES = ROOT / "examples"
CLIENTS = ROOT / ".clients" / "bin" / "python"
FOREBAY = Path(sys.executable).parent
needs_clients = pytest.mark.skipif(not CLIENTS.exists(), reason="needs `make clients`")
needs_notebooks = pytest.mark.skipif(
    not list(CLIENTS.parent.parent.glob("lib/*/site-packages/duckdb")),
    reason="needs `make clients`, as it is since it has DuckDB",
)


def against_an_engine(*words: str) -> str:
    """What the command prints that has the proxy as its server."""

    async def play() -> tuple[int | None, str]:
        async with start_engine(EngineConfig(time_scale=20)) as engine, stage([engine.url]) as on:
            process = await asyncio.create_subprocess_exec(
                *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "OPENAI_BASE_URL": f"{on.url}/v1", "OPENAI_API_KEY": "none"},
            )  # fmt: skip
            said, _ = await asyncio.wait_for(process.communicate(), 100)
            return process.returncode, said.decode()

    code, said = asyncio.run(play())
    assert code == 0, said
    return said


def test_every_example_is_listed_and_tested() -> None:
    folders = {one.name for one in EXAMPLES.iterdir() if one.is_dir()}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert folders == {line.split("]")[0][3:] for line in readme.splitlines() if line[:3] == "| ["}
    tests = Path(__file__).read_text() + (ROOT / "tests/proxy/test_routing_plugins.py").read_text()
    assert [name for name in folders if f'"{name}"' not in tests] == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl() -> None:
    said = against_an_engine("bash", str(EXAMPLES / "curl" / "requests.sh"))
    assert '"object":"chat.completion"' in said
    assert "data: [DONE]" in said
    assert "x-request-id: my-request" in said
    assert '"param":"input_tokens"' in said
    assert said.endswith("\n400\n")


def test_openai() -> None:
    said = against_an_engine(sys.executable, str(EXAMPLES / "openai" / "chat.py"))
    streamed, batch = said.splitlines()
    assert len(streamed.split()) == 16
    assert batch.startswith("batch: 2")


def test_an_exporter_sends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    @contextmanager
    def start_run(run_name: str) -> Iterator[Any]:
        sent["name"] = run_name
        yield SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    library = SimpleNamespace(
        start_run=start_run,
        log_params=lambda values: sent.update(params=values),
        log_metrics=lambda values: sent.update(metrics=values),
        log_artifacts=lambda folder: sent.update(folder=folder),
        get_tracking_uri=lambda: "http://mlflow",
        exceptions=SimpleNamespace(MlflowException=ValueError),
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.syspath_prepend(str(EXAMPLES / "plugin-exporter"))
    run, out = write_pair(tmp_path)[0], BytesIO()
    import_module("forebay_mlflow").export(run, out, "")
    assert out.getvalue() == b"http://mlflow run r1\n"
    assert (sent["name"], sent["folder"]) == ("round-robin", str(run))
    assert sent["params"]["model"] == "llama-3-8b"
    assert sent["metrics"]["itl_ms.chat.p99"] == 31.0


@needs_clients
@pytest.mark.parametrize("name", ["langchain", "llamaindex"])
def test_rag(name: str) -> None:
    said = against_an_engine(str(CLIENTS), str(EXAMPLES / name / "rag.py"))
    assert [line.split(":")[0] for line in said.splitlines()] == ["cache", "cache"]


FLAGGED = 'backends: [{url: "http://h:1", long_prefill_token_threshold: 2048}]\n'
IMPATIENT = "buckets: [{name: chat, up_to: 5000, max_wait: 50ms}, {name: document, up_to: 131072}]"


@pytest.mark.parametrize(("after", "status"), [("", 0), (IMPATIENT, 1)])
def test_the_gate(after: str, status: int, tmp_path: Path) -> None:
    """A configuration that rejects more is worse; the same one is not."""
    (tmp_path / "before.yaml").write_text(FLAGGED)
    (tmp_path / "after.yaml").write_text(FLAGGED + after)
    words = ["bash", str(EXAMPLES / "ci-gate" / "gate.sh"), "before.yaml", "after.yaml", "out"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PATH": f"{FOREBAY}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "out" / "report.html").exists()


def test_kubernetes() -> None:
    """What the application calls is the Service of the chart, at its port."""
    app = yaml.safe_load((EXAMPLES / "kubernetes" / "rag-app.yaml").read_text())
    (container,) = app["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    chart = yaml.safe_load((ROOT / "deploy/helm/forebay/values.yaml").read_text())
    assert (env["OPENAI_BASE_URL"], chart["service"]["port"]) == ("http://forebay/v1", 80)


@needs_notebooks
def test_the_notebooks_run(tmp_path: Path) -> None:
    """In a copy; the committed ones hold outputs, so each has been executed."""
    folder = EXAMPLES / "notebooks"
    done = subprocess.run(
        [str(CLIENTS), str(folder / "execute.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=110,
        env={**os.environ, "PATH": f"{FOREBAY}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    committed = sorted(folder.glob("*.ipynb"))
    assert len(committed) == 2
    for notebook in committed:
        for file in (notebook, tmp_path / notebook.name):
            cells = [
                c for c in orjson.loads(file.read_bytes())["cells"] if c["cell_type"] == "code"
            ]
            assert all(cell["outputs"] for cell in cells), file
        assert notebook.stat().st_size < 20_000
