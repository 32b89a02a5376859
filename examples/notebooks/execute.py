"""Make two runs in virtual time and execute the notebooks on them, in place or in another folder.

    python execute.py [FOLDER]

Needs nbclient, ipykernel, duckdb and hdrhistogram, and `forebay` on the PATH.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ROUTERS = {"round-robin": "direct", "forebay": "warm_or_least_work"}


def make_runs(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    rates = ["--chat-rate", "6", "--document-rate", "0.22", "--duration", "200"]
    forebay("traces", "synth", "chat-beside-documents", *rates, "-o", str(trace))
    for name, policy in ROUTERS.items():
        forebay("simulate", str(trace), "--policy", policy, "--out", str(folder / "runs" / name))


def forebay(*words: str) -> None:
    subprocess.run(["forebay", *words], check=True, stdout=subprocess.DEVNULL)


def execute(notebook: Path, folder: Path, out: Path) -> None:
    """Run every cell in `folder`; raises CellExecutionError."""
    content = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(content, timeout=60, resources=resources, record_timing=False)
    client.execute()
    content.metadata.language_info = {"name": "python"}  # the version differs from run to run
    nbformat.write(content, out / notebook.name)


if __name__ == "__main__":
    written = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as made:
        make_runs(Path(made))
        for notebook in sorted(HERE.glob("*.ipynb")):
            execute(notebook, Path(made), written)
