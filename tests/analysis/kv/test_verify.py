"""`forebay kv verify`: start-up lines of many vLLM versions, and real logs beside the arithmetic.

The logs are public; `LOGS` names where each stands. Where a source states no flag, vLLM's default
of that version for that GPU is assumed (LMCache#1769 and vllm#38479 state the GPU's name only).
Of the V0 engine's logs the memory outside torch is taken from the log: it ranged from 0.1 to 1.8
GiB and nothing in the configuration tells it (with 0.13 the RTX 3090 rows would be 7 and 9 % off).
Left out: a vision model (llm-d-benchmark's Mistral-Small-3.2: its dry run peaks elsewhere, 9 % off)
and a log whose --max-num-seqs is not stated but cannot be the default (vllm#12330).
"""

import json
import statistics
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config

from forebay.analysis.kv.start_log import parse_start_log
from forebay.analysis.kv.verify import CacheCheck, verify_log
from forebay.proxy.cli import main
from forebay.traces.ground.errors import InputError

LLAMA, PLANNER = "meta-llama/Llama-3.1-8B", "llm-d-benchmark, vLLM 0.11, H100"
LLAMA_70B = "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
H100, ON_H100 = "Free memory on device (78.57/79.18 GiB) on startup.", {"gpu": "h100"}
PRO_6000 = """{"vllm_version": "0.28.0", "max_num_seqs": 128, "max_num_batched_tokens": 2048,
  "gpu_memory_utilization": 0.92, "device_total_memory_bytes": 101976440832, """


@dataclass(frozen=True)
class Log:
    """A published log: its lines, the model, and what the reader of the source must add.

    Attributes:
        fitted: one of the logs that the activation of the sampler was read from.
    """

    source: str
    model: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    fitted: bool = False


LOGS = [
    Log(PLANNER, LLAMA, f"{H100}\nAvailable KV cache memory: 51.38 GiB", fitted=True),
    Log(PLANNER, "Qwen/Qwen3-0.6B", f"{H100}\nAvailable KV cache memory: 64.45 GiB", fitted=True),
    Log(PLANNER, "Qwen/Qwen3-32B", f"{H100}\nAvailable KV cache memory: 4.45 GiB", fitted=True),
    Log(PLANNER, "Qwen/Qwen3-32B", f"{H100} --tensor-parallel-size=2\n"
        "Available KV cache memory: 34.49 GiB", fitted=True),
    Log(PLANNER, LLAMA_70B, f"{H100} --tensor-parallel-size=2\n"
        "Available KV cache memory: 32.0 GiB", fitted=True),
    Log(PLANNER, "openai/gpt-oss-20b", f"{H100}\nAvailable KV cache memory: 50.28 GiB",
        fitted=True),
    Log("vllm-project/vllm#10511, V0", LLAMA,
        "total_gpu_memory     79.22GiB\nnon_torch_memory     1.79GiB\n"
        "available_kv_cache_memory    53.29GiB", {"max_model_len": 8192}),
    Log("vllm-project/vllm#10517, 0.6.4, RTX 3090", LLAMA,
        "total_gpu_memory=23.58GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB "
        "gpu_memory_utilization=0.90\n# GPU blocks: 1952, # CPU blocks: 2048\n"
        "Maximum concurrency for 20000 tokens per request: 1.56x"),
    Log("vllm-project/vllm#10517, 0.6.4, RTX 3090", LLAMA,
        "total_gpu_memory=23.58GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB "
        "gpu_memory_utilization=0.90\n# GPU blocks: 1478, # CPU blocks: 2048\n"
        "Maximum concurrency for 29000 tokens per request: 0.82x"),
    Log("LLMServingSim meta.json, 0.19, RTX 4090", LLAMA,
        '{"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 32768,\n'
        '"num_gpu_blocks": 2588, "block_size": 16, "gpu_memory_utilization": 0.9,\n'
        '"device_total_memory_bytes": 25250627584}'),
    Log("LLMServingSim meta.json, 0.28, RTX PRO 6000", LLAMA,
        PRO_6000 + '"num_gpu_blocks": 35913}'),
    Log("LLMServingSim meta.json, 0.28, 2 RTX PRO 6000", "Qwen/Qwen3-32B",
        PRO_6000 + '"tensor_parallel_size": 2, "num_gpu_blocks": 28884}'),
    Log("LMCache/LMCache#1769", "Qwen/Qwen3-8B", "GPU KV cache size: 366,400 tokens", ON_H100),
    Log("LMCache/LMCache#1769", "Qwen/Qwen3-32B",
        "tensor_parallel_size=2 GPU KV cache size: 275,760 tokens", ON_H100),
    Log("vllm-project/vllm#38479", "Qwen/Qwen3-4B",
        "--gpu-memory-utilization 0.85\nGPU KV cache size: 417,440 tokens", ON_H100),
]  # fmt: skip


def judge(log: Log, folder: Path) -> CacheCheck:
    config = write_config(folder, log.model)
    options = dict(log.options)
    gpu = options.pop("gpu", None)
    return verify_log(log.text, log.source, options, model=str(config), gpu=gpu)


def test_pool_from_the_configuration_alone(tmp_path: Path) -> None:
    verdicts = [(log, judge(log, tmp_path)) for log in LOGS]
    every = [abs(verdict.error) for _, verdict in verdicts]
    unseen = [abs(verdict.error) for log, verdict in verdicts if not log.fitted]
    current = [abs(verdict.error) for _, verdict in verdicts if not verdict.log.old_engine]
    assert (len(every), len(unseen), len(current)) == (15, 9, 12)
    for errors in (every, unseen, current):
        assert statistics.median(errors) <= 0.015, errors
        assert max(errors) <= 0.06, errors


EXACT = [
    ("vllm-project/vllm#10517", LLAMA, {}, LOGS[7].text),
    ("vllm-project/vllm#10517", LLAMA, {}, LOGS[8].text),
    ("vllm-project/vllm#12330, A100 40 GB", LLAMA, {},
     "total_gpu_memory (39.50GiB) x gpu_memory_utilization (0.90) = 35.55GiB\n"
     "model weights take 14.96GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak memory "
     "takes 9.37GiB; the rest of the memory reserved for KV Cache is 11.12GiB.\n"
     "# GPU blocks: 5691, # CPU blocks: 2048"),
    ("LMCache/LMCache#1739", "Qwen/Qwen3-14B", {"gpu": "h100"},
     "Available KV cache memory: 6.51 GiB\nGPU KV cache size: 42,656 tokens\n"
     "Maximum concurrency for 32,768 tokens per request: 1.30x"),
    ("llm-d-benchmark", "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
     {"gpu": "h100", "block_size": 128},
     "Available KV cache memory: 28.20 GiB\nGPU KV cache size: 184,832 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "model", "options", "text"), EXACT)
def test_exact_to_the_block_from_the_logged_gib(
    source: str, model: str, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    verdict = judge(Log(source, model, text, options), tmp_path)
    assert verdict.exact
    assert verdict.low_blocks is not None
    assert verdict.high_blocks is not None
    # two decimals of GiB are 10.7 MB: no more blocks than that can differ
    block_bytes = verdict.plan.budget.layout.block_bytes
    assert verdict.high_blocks - verdict.low_blocks <= 0.01 * 2**30 / block_bytes + 1
    assert not verdict.plan.options.draft_layers


def test_a_cache_whose_size_was_set_is_divided_exactly(tmp_path: Path) -> None:
    # /metrics of vLLM 0.32 on a CPU, serving a Llama of 2 layers with one KV head of 32
    text = (
        'vllm:cache_config_info{block_size="128",cache_dtype="auto",gpu_memory_utilization="0.92",'
        'kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="4194304",num_gpu_blocks="32768"}'
    )
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **CONFIGS[LLAMA], "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 105,
                "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
            }
        )
    )  # fmt: skip
    verdict = verify_log(text, "metrics", {}, model=str(tmp_path))
    assert (verdict.low_blocks, verdict.actual_blocks, verdict.exact) == (32_768, 32_768, True)
    assert (verdict.predicted_tokens, verdict.error) == (4_194_304, 0.0)
    assert "kv_cache_memory_bytes" in verdict.notes[0]


@pytest.mark.parametrize(("length", "batched"), [(20_000, 20_000), (35_000, 512)])
def test_the_old_engine_took_prompts_whole_up_to_32k(
    length: int, batched: int, tmp_path: Path
) -> None:
    text = f"# GPU blocks: 1952, # CPU blocks: 2048\nMaximum concurrency for {length} tokens per "
    verdict = judge(Log("", LLAMA, f"{text}request: 1.56x", {"gpu": "rtx-3090"}), tmp_path)
    assert verdict.plan.options.max_num_batched_tokens == batched
    assert verdict.plan.options.max_num_seqs == 256


def test_a_context_stretched_by_its_operator_is_no_error(tmp_path: Path) -> None:
    text = "vllm serve x -tp 2 --max-model-len 131072\n# GPU blocks: 30000"
    verdict = judge(Log("", "Qwen/Qwen3-8B", text, ON_H100), tmp_path)
    assert verdict.plan.max_model_len == 131_072
    assert verdict.plan.options.tensor_parallel == 2


def test_a_wrong_layer_count_is_not_exact(tmp_path: Path) -> None:
    log = Log("LMCache/LMCache#1739", "Qwen/Qwen3-14B", EXACT[3][3], {"gpu": "h100",
              "draft_layers": 1})  # fmt: skip
    verdict = judge(log, tmp_path)
    assert verdict.exact is False
    assert verdict.bytes_error == pytest.approx(-1 / 41, abs=0.002)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (  # 0.6.3
            "Initializing an LLM engine (v0.6.3) with config: model='meta-llama/Llama-3.1-8B', "
            "max_seq_len=8192, tensor_parallel_size=2, kv_cache_dtype=fp8, \n"
            "model_runner.py:1071] Loading model weights took 7.5122 GB\n"
            "distributed_gpu_executor.py:57] # GPU blocks: 27895, # CPU blocks: 4096",
            {"model": "meta-llama/Llama-3.1-8B", "version": "0.6.3", "old_engine": True,
             "max_model_len": 8192, "tensor_parallel_size": 2, "kv_cache_dtype": "fp8",
             "weights_gib": 7.5122, "blocks": 27895},
        ),
        (  # 0.7, V0
            "total_gpu_memory (79.22GiB) x gpu_memory_utilization (0.95) = 75.26GiB\n"
            "non_torch_memory takes 0.16GiB; PyTorch activation peak memory takes 1.26GiB; the "
            "rest of the memory reserved for KV Cache is 14.65GiB.\n# cuda blocks: 6001",
            {"total_gib": 79.22, "gpu_memory_utilization": 0.95, "non_torch_gib": 0.16,
             "activation_gib": 1.26, "available_gib": 14.65, "blocks": 6001},
        ),
        (  # 0.8 to 0.11, two workers
            "INFO non-default args: {'model': 'Qwen/Qwen3-8B', 'max_model_len': 16000, "
            "'max_num_seqs': 64, 'gpu_memory_utilization': 0.85, 'block_size': 128, "
            "'speculative_config': {'method': 'eagle3', 'model': 'x'}}\n"
            "Chunked prefill is enabled with max_num_batched_tokens=8192.\n"
            "Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B'\n"
            "Model loading took 15.2683 GiB and 3.2 seconds\n"
            "(Worker_TP0) Available KV cache memory: 8.11 GiB\n"
            "(Worker_TP1) Available KV cache memory: 8.02 GiB\n"
            "GPU KV cache size: 178,880 tokens\n"
            "Maximum concurrency for 16,000 tokens per request: 11.18x",
            {"model": "Qwen/Qwen3-8B", "version": "0.11.0", "old_engine": False,
             "max_model_len": 16_000, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
             "block_size": 128, "gpu_memory_utilization": 0.85, "weights_gib": 15.2683,
             "available_gib": 8.02, "tokens": 178_880, "concurrency": (11.18, 16_000),
             "draft_layers": 1, "tensor_parallel_size": None},
        ),
        (  # 0.25
            "version 0.25.0\nCUDA graph pool memory: 1.34 GiB (actual), 1.32 GiB (estimated)\n"
            "Free memory on device (77.78/79.33 GiB) on startup. Desired GPU memory utilization is "
            "(0.85, 67.43 GiB). Actual usage is 16.92 GiB for weight, 5.66 GiB for peak "
            "activation, 0.13 GiB for non-torch memory, and 1.34 GiB for CUDAGraph memory.\n"
            "GPU KV cache size: 2,558,976 tokens, Maximum concurrency for 1,048,576 tokens per "
            "request: 2.44x",
            {"version": "0.25.0", "total_gib": 79.33, "weights_gib": 16.92, "activation_gib": 5.66,
             "non_torch_gib": 0.13, "cuda_graph_gib": 1.32, "gpu_memory_utilization": 0.85,
             "tokens": 2_558_976, "concurrency": (2.44, 1_048_576), "old_engine": False},
        ),
        (  # /metrics
            'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",'
            'gpu_memory_utilization="0.92",hash_block_size="None",kv_cache_memory_bytes="None",'
            'num_cpu_blocks="None",num_gpu_blocks="27895",num_gpu_blocks_override="None"} 1.0',
            {"block_size": 32, "kv_cache_dtype": "auto", "gpu_memory_utilization": 0.92,
             "blocks": 27895, "tokens": None, "old_engine": False},
        ),
    ],
)  # fmt: skip
def test_start_up_lines_of_many_versions(text: str, said: dict[str, Any]) -> None:
    found = parse_start_log(text, "log")
    shown = {**found.options, **asdict(found)}
    assert {name: shown.get(name) for name in said} == said


def test_sliding_layers_by_either_meaning_of_the_logged_tokens(tmp_path: Path) -> None:
    config = write_config(tmp_path, "openai/gpt-oss-20b")

    def blocks(tokens: int) -> int:
        text = f"GPU KV cache size: {tokens} tokens\nMaximum concurrency for 131,072 tokens per "
        text += "request: 15.97x"
        return verify_log(text, "log", {}, model=str(config), gpu="h100").actual_blocks

    assert blocks(2_092_714) == 139_113  # concurrency x length
    assert blocks(139_113 // 2 * 16) == pytest.approx(139_113, abs=1)  # blocks / groups x size


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("INFO started", {}, "no line with the size of the KV cache"),
        ("# GPU blocks: 0", {"model": "llama-3-8b", "gpu": "h100"}, "no blocks"),
        ("# GPU blocks: 9\nnum_gpu_blocks_override=9", {}, "num_gpu_blocks_override was set"),
        ("# GPU blocks: 9", {"gpu": "h100"}, "does not name the model; give --model"),
        ("# GPU blocks: 9", {"model": "llama-3-8b"}, "give --gpu"),
    ],
)
def test_a_log_that_does_not_do(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        verify_log(text, "vllm.log", {}, **options)


def test_exit_status_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16000\n"
                   f"{H100}\nModel loading took 14.99 GiB and 31.46 seconds\n"
                   "Available KV cache memory: 51.38 GiB\n"
                   "GPU KV cache size: 420,896 tokens\n")  # fmt: skip
    assert main(["kv", "verify", str(log)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "420,896 +0.2 %" in said
    assert "26,304 to 26,309 26,306 exact" in said
    assert "within 6 %" in said
    assert main(["kv", "verify", str(log), "--tolerance", "0.1"]) == 1
    assert "beyond 0.1 %" in capsys.readouterr().out
    assert main(["kv", "verify", str(log), "--max-num-seqs", "16", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["exact"], data["within"]) == (True, False)
    assert data["error"] == pytest.approx(0.0769, abs=1e-4)
    assert data["gib"]["weights"]["logged"] == 14.99
    for words in ([], [str(log), "--metrics", "http://x"], [str(tmp_path / "none.log")],
                  ["--metrics", "nowhere"]):  # fmt: skip
        assert main(["kv", "verify", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            b'vllm:cache_config_info{block_size="16",cache_dtype="auto",'
            b'gpu_memory_utilization="0.9",num_gpu_blocks="54283"} 1.0\n'
        )

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_metrics_of_a_running_server(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        words = ["--metrics", url, "--model", "llama-3-8b", "--gpu", "h200", "--json"]
        assert main(["kv", "verify", *words]) == 0
        thread.join()
    assert json.loads(capsys.readouterr().out)["error"] == 0.0


@pytest.mark.parametrize("command", ["kv --model llama-3-8b --gpu h200", "kv verify none.log"])
def test_a_block_size_that_vllm_refuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine says the same."""
    assert main([*command.split(), "--block-size", "17"]) == 2
    assert "--block-size 17: give 8, 16, 32, 64, 128 or 256" in capsys.readouterr().err
