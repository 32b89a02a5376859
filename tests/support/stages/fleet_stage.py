"""A fleet of real vLLM servers on the CPU for tests, started as a user starts it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from stages.started import run_forebay
from vllm_server import BLOCK_SIZE, ModelSize, write_model

CONTEXT = 16_384


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet that is up. `folder` is its --dir, `said` what `fleet up` wrote to stderr."""

    folder: Path
    said: str

    @property
    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return loaded

    @property
    def proxy_keys(self) -> dict[str, Any]:
        """The proxy's configuration, as it was written."""
        loaded: dict[str, Any] = yaml.safe_load((self.folder / "proxy.yaml").read_text())
        return loaded

    def status(self) -> tuple[int, dict[str, Any]]:
        done = run_forebay("fleet", "status", "--dir", str(self.folder), "--json")
        return done.returncode, json.loads(done.stdout)

    def down(self) -> dict[str, str]:
        """Stop the fleet, and return how each server ended."""
        done = run_forebay("fleet", "down", "--dir", str(self.folder), "--json")
        assert done.returncode == 0, done.stderr
        ends: dict[str, str] = json.loads(done.stdout)["servers"]
        return ends


@contextmanager
def fleet_up(words: Sequence[str], folder: Path, **environ: str) -> Iterator[Fleet]:
    """The fleet of `forebay fleet up WORDS`, until the block ends."""
    done = run_forebay("fleet", "up", "--dir", str(folder), "--json", *words, **environ)
    assert done.returncode == 0, done.stderr
    fleet = Fleet(folder, done.stderr)
    try:
        assert json.loads(done.stdout)["servers"] == fleet.state["servers"]
        yield fleet
    finally:
        fleet.down()


@contextmanager
def real_fleet(python: str, folder: Path) -> Iterator[Fleet]:
    """Two servers of a small random model on the CPU, by the vLLM next to `python`."""
    model = folder.parent / "model"
    write_model(model, ModelSize())
    words = (
        "--model", str(model), "--served-model-name", "tiny", "--cpu", "--servers", "2",
        "--port", "0", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "384M",
        "--vllm", str(Path(python).with_name("vllm")),
        "--start-timeout", "350", "--drain", "300", "--",
        "--load-format", "dummy", "--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE),
    )  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with fleet_up(words, folder, VLLM_CACHE_ROOT=str(folder / "cache"), **offline) as fleet:
        yield fleet
