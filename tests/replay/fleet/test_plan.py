"""The plan of `forebay fleet up`: flags by model, GPU and vLLM version, and bad input."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_vllm import install
from paths import ROOT
from vllm_server import ModelSize, write_model

from forebay.proxy.cli import main
from forebay.proxy.config.sources import load_config
from forebay.replay.engine.hardware.specs import (
    H200_SXM,
    LLAMA_3_8B,
    PHI_3_MINI,
    QWEN_2_5_14B,
    ModelSpec,
)
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork
from forebay.replay.fleet.commands import make_plan
from forebay.replay.fleet.gpu.gpus import Gpu, choose_gpus, parse_gpus
from forebay.replay.fleet.gpu.profiles import PROFILES, STEP_TARGET_S
from forebay.replay.fleet.gpu.vllm_install import (
    VllmInstall,
    find_vllm,
    listed_flags,
    read_flags,
)
from forebay.replay.fleet.options import FleetOptions
from forebay.replay.fleet.plan import FleetPlan, sequences
from forebay.replay.fleet.proxy_file import proxy_yaml
from forebay.traces.ground.errors import InputError

H200 = (Gpu(0, "NVIDIA H200", 139.8), Gpu(1, "NVIDIA H200", 139.8))


def plan_of(model: str = "llama-3.1-8b", version: str = "0.32.0", **options: Any) -> FleetPlan:
    wanted = FleetOptions(model=model, **options)
    return make_plan(wanted, VllmInstall("/x/vllm", version), H200, (8001, 8002))


def value(plan: FleetPlan, flag: str, server: int = 0) -> str:
    command = plan.servers[server].command
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("model", PROFILES)
def test_the_page_says_what_is_planned(model: str) -> None:
    plan = plan_of(model)
    numbers = (plan.kv_tokens, plan.seqs, plan.chunk)
    page = (ROOT / "docs" / "how-to" / "vllm-servers.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in page if line.startswith(f"| `{model}` |")]
    assert row.split(" | ")[1] == plan.profile.repository
    assert row.split(" | ")[2].split()[0] == f"{plan.context:,}"
    assert row.removesuffix(" |").split(" | ")[3:] == [f"{number:,}" for number in numbers]
    (server, _) = plan.servers
    flags = read_flags(server.command)
    assert server.command[:3] == ("/x/vllm", "serve", plan.profile.repository)
    assert [int(flags[f"--{name}"]) for name in ("max-num-seqs", "max-num-queued-reqs")] == [
        plan.seqs, 2 * plan.seqs,
    ]  # fmt: skip
    obvious = {"--host", "--port", "--served-model-name", "--max-model-len"}
    for flag in (*flags.keys() - obvious, *server.environment):
        assert any(f"`{flag}" in line for line in page), flag


def test_servers_differ_in_gpu_and_port() -> None:
    plan = plan_of()
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in plan.servers] == ["0", "1"]
    assert [value(plan, "--port", n) for n in (0, 1)] == ["8001", "8002"]


@pytest.mark.parametrize(
    ("model", "repository", "name"),
    [
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("me/Meta-Llama-3-8B-Instruct", "me/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("me/Phi-3-mini-128k-instruct", "me/Phi-3-mini-128k-instruct", "phi-3-mini-128k"),
    ],
)
def test_a_model_is_known_by_its_name(model: str, repository: str, name: str) -> None:
    plan = plan_of(model)
    assert plan.profile == replace(PROFILES[name], repository=repository)
    assert value(plan, "--served-model-name") == repository


@pytest.mark.parametrize(
    ("name", "spec"),
    [("llama-3.1-8b", LLAMA_3_8B), ("qwen2.5-14b", QWEN_2_5_14B), ("phi-3-mini-128k", PHI_3_MINI)],
)
def test_the_chunk_is_the_largest_whose_step_is_short(name: str, spec: ModelSpec) -> None:
    """Behind the whole context, beside 32 chats of 4,000 tokens, by the step-time model."""

    def step_s(chunk: int) -> float:
        before = spec.max_model_len - chunk
        return StepTimeModel(spec, H200_SXM).step_s(
            StepWork(
                tokens=chunk + 32, sequences=33, sampled=33, decode_context=32 * 4_000,
                chunks=[(chunk, before)],
            )
        )  # fmt: skip

    chunk = PROFILES[name].chunk
    assert step_s(chunk) <= STEP_TARGET_S < step_s(2 * chunk)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.11.2", {"--max-num-queued-reqs", "--shutdown-timeout"}),
        ("0.26.0", {"--max-num-queued-reqs"}),
        ("0.29.0", set()),
        ("0.33.1rc0", set()),
    ],
)
def test_a_flag_that_this_vllm_has_not_is_left_out_and_said(version: str, lacks: set[str]) -> None:
    plan = plan_of(version=version)
    assert {*plan.left_out} == lacks
    assert not lacks & read_flags(plan.servers[0].command).keys()
    assert all(f"\n  {flag}\n" in plan.text() for flag in lacks)


@pytest.mark.parametrize(
    ("version", "section"), [("0.11.2", "rope_scaling"), ("0.32.0", "rope_parameters")]
)
def test_yarn_only_beyond_what_the_model_holds(version: str, section: str) -> None:
    overrides = json.loads(value(plan_of("qwen2.5-14b", version), "--hf-overrides"))
    assert overrides["max_position_embeddings"] == 131_072
    assert overrides[section]["factor"] == 4.0
    # The section replaces the model's own, which holds rope_theta from transformers 5 on.
    assert ("rope_theta" in overrides[section]) == (section == "rope_parameters")
    short = plan_of("qwen2.5-14b", version, max_model_len=32_768)
    assert "--hf-overrides" not in short.servers[0].command


def test_a_model_that_it_does_not_know_gets_what_is_right_for_any() -> None:
    plan = plan_of("Qwen/Qwen2.5-7B-Instruct")
    assert plan.kv_tokens is None
    assert value(plan, "--max-num-seqs") == "64"
    assert "--max-model-len" not in plan.servers[0].command
    assert "--enable-prefix-caching" in plan.servers[0].command


def test_adapters_take_memory_and_their_flags_are_passed_on() -> None:
    plan = plan_of(enable_lora=True, max_loras=4, max_lora_rank=64)
    assert "--enable-lora" in plan.servers[0].command
    assert (value(plan, "--max-loras"), value(plan, "--max-lora-rank")) == ("4", "64")
    tokens, fewer = plan_of().kv_tokens, plan.kv_tokens
    adapters = 4 * 4 * 92_356_608  # as vLLM allocates them, see test_memory_adapters
    assert tokens is not None
    assert fewer is not None
    assert tokens - fewer == pytest.approx(adapters / LLAMA_3_8B.kv_bytes_per_token, abs=16)


def test_flags_after_the_dashes_win() -> None:
    own = ["--max-num-batched-tokens", "4096", "--no-enable-prefix-caching"]
    plan = plan_of(vllm_args=own)
    assert [*plan.servers[0].command[-3:]] == own
    assert plan.servers[0].command.count("--max-num-batched-tokens") == 1
    assert "--enable-prefix-caching" not in plan.servers[0].command


FOREBAYS = "forebay.proxy.vllm_scheduler.ForebayScheduler"
CHUNK = "--long-prefill-token-threshold"


@pytest.mark.parametrize(
    ("has_class", "own", "named", "chunk", "priority"),
    [
        (False, [], None, 2_048, True),
        (False, [CHUNK, "512"], None, 512, True),
        (False, ["--long_prefill_token_threshold=512", "--enforce-eager"], None, 512, True),
        (False, [f"{CHUNK}=9", CHUNK, "0"], None, None, True),
        (False, [f"{CHUNK}-adaptive"], None, 2_048, True),
        (False, ["--scheduling-policy", "fcfs"], None, 2_048, False),
        (True, [], FOREBAYS, None, True),
        (True, [CHUNK, "512"], FOREBAYS, 512, True),
        (True, ["--scheduler-cls", "a.B"], "a.B", 2_048, True),
    ],
)
def test_the_proxy_knows_how_its_servers_schedule(
    tmp_path: Path, has_class: bool, own: list[str], named: str | None, chunk: int | None,
    priority: bool,
) -> None:  # fmt: skip
    """The user's own flags go first. The scheduler class needs no threshold."""
    installed = VllmInstall("/x/vllm", "0.32.0", has_class=has_class)
    plan = make_plan(
        FleetOptions(model="llama-3.1-8b", vllm_args=own), installed, H200, (8001, 8002)
    )
    flags = read_flags(plan.servers[0].command)
    assert flags.get("--scheduler-cls") == named
    assert int(flags.get(CHUNK) or 0) == (chunk or 0)
    assert (flags["--scheduling-policy"] == "priority") == priority
    for flag in ("--scheduler-cls", "--scheduling-policy", CHUNK):
        assert plan.servers[0].command.count(flag) <= max(1, own.count(flag))
    # The configuration that is written says the same.
    file = tmp_path / "proxy.yaml"
    file.write_text(proxy_yaml(plan, None, kv_events=False))
    config = load_config(file, {}, {})
    assert [b.long_prefill_token_threshold for b in config.backends] == [chunk] * 2
    assert [b.priority for b in config.backends] == [priority] * 2
    assert [spec.priority for spec in config.core_backends()] == [priority] * 2
    assert file.read_text().count("scheduler: forebay\n") == 2 * (named == FOREBAYS)


def test_events_stay_on_this_machine_unless_the_servers_do_not(tmp_path: Path) -> None:
    config = json.loads(value(plan_of(folder=tmp_path), "--kv-events-config", 1))
    assert config["endpoint"] == f"ipc://{tmp_path}/gpu1.events"
    open_plan = plan_of(host="0.0.0.0")
    config = json.loads(value(open_plan, "--kv-events-config", 1))
    assert (config["endpoint"], config["replay_endpoint"]) == ("tcp://*:9002", "tcp://*:10002")
    assert open_plan.servers[1].kv_events == "tcp://127.0.0.1:9002"
    assert "VLLM_HOST_IP" not in open_plan.servers[0].environment
    assert "--kv-events-config" not in plan_of(kv_events=False).servers[0].command


def test_the_proxy_takes_what_is_written(tmp_path: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "proxy.yaml"
    base.write_text("listen: {port: 8181}\naffinity: {min_match: 0.5}\n")
    plan = plan_of("qwen2.5-14b", folder=tmp_path, max_model_len=32_768)
    file.write_text(proxy_yaml(plan, base, kv_events=True))
    config = load_config(file, {}, {})
    assert [(b.name, b.url, b.max_concurrency) for b in config.backends] == [
        ("gpu0", "http://127.0.0.1:8001", 64), ("gpu1", "http://127.0.0.1:8002", 64),
    ]  # fmt: skip
    assert config.backends[0].kv_events == f"ipc://{tmp_path}/gpu0.events"
    assert config.backends[0].kv_replay == f"ipc://{tmp_path}/gpu0.replay"
    assert (config.listen.port, config.affinity.min_match) == (8181, 0.5)
    assert config.affinity.kv_tokens == "auto"
    assert [(b.name, b.up_to) for b in config.buckets] == [("chat", 5_000), ("document", 32_768)]
    assert config.buckets[1].prefills_per_backend == 1
    file.write_text(proxy_yaml(plan_of(max_model_len=4_000), None, kv_events=False))
    config = load_config(file, {}, {})
    assert [(b.name, b.up_to) for b in config.buckets] == [("chat", 4_000)]
    assert config.backends[0].kv_events is None
    base.write_text("backends: [{url: 'http://127.0.0.1:1'}]\n")
    with pytest.raises(InputError, match="leave them out"):
        proxy_yaml(plan, base, kv_events=True)


@pytest.mark.parametrize(
    ("tokens", "seqs"), [(5_000, 16), (80_000, 16), (319_999, 32), (320_000, 64), (10**7, 256)]
)
def test_as_many_sequences_as_chats_fit(tokens: int, seqs: int) -> None:
    assert sequences(tokens) == seqs


def test_a_step_has_a_token_for_each_sequence() -> None:
    plan = plan_of(max_num_seqs=10_000)
    assert value(plan, "--max-num-seqs") == value(plan, "--max-num-batched-tokens") == "10000"


@pytest.mark.parametrize("text", ["256M", "20.5g", "2k", "17"])
def test_bytes_are_passed_on_to_vllm(text: str) -> None:
    plan = plan_of(kv_cache_memory_bytes=text)
    assert value(plan, "--kv-cache-memory-bytes") == text
    assert value(plan, "--max-num-seqs") == "64"
    assert "--gpu-memory-utilization" not in plan.servers[0].command


@pytest.mark.parametrize("text", ["20.5G", "1.5", "", "G", "0", "-1G", "1e9", "4GB", "infg", "٣g"])
def test_bytes_that_vllm_would_refuse(text: str) -> None:
    with pytest.raises(InputError, match="such as 256M"):
        plan_of(kv_cache_memory_bytes=text)


def test_gpus_as_nvidia_smi_lists_them() -> None:
    gpus = parse_gpus("0, NVIDIA H200, 143771\n1, NVIDIA GB10, [N/A]\n2, A, 1024\n")
    assert gpus[1:] == [Gpu(2, "A", 1.0)]
    assert gpus[0].memory.batched_tokens == 8_192
    assert choose_gpus([2], gpus) == gpus[1:]
    with pytest.raises(InputError, match=r"no GPU 1; there are 0 \(NVIDIA H200\), 2 \(A\)"):
        choose_gpus([1], gpus)


def listing(*but: str, **options: Any) -> FleetPlan:
    """The plan for a vLLM whose help lists all flags of the usual plan but those."""
    listed = {*read_flags(plan_of().servers[0].command)} | {"--scheduling-policy"}
    install = VllmInstall("/x/vllm", "0.32.0", frozenset(listed - {*but}))
    wanted = FleetOptions(model="llama-3.1-8b", **options)
    return make_plan(wanted, install, H200, (8001, 8002))


def test_a_flag_that_the_help_does_not_list_is_left_out_and_said() -> None:
    assert not listing().left_out
    plan = listing("--enable-prompt-tokens-details", "--long-prefill-token-threshold")
    assert {*plan.left_out} == {"--enable-prompt-tokens-details", "--long-prefill-token-threshold"}
    assert "--long-prefill-token-threshold" not in plan.servers[0].command
    assert "long_prefill_token_threshold" not in proxy_yaml(plan, None, kv_events=False).replace(
        "# long_prefill_token_threshold", ""
    )


@pytest.mark.parametrize(
    ("version", "installed", "has_class"),
    [("0.32.0+cpu", True, True), ("0.26.0", True, True), ("0.34.0", True, False),
     ("0.32.0", False, False)],
)  # fmt: skip
def test_servers_get_the_scheduler_class_where_it_can_be_imported(
    tmp_path: Path, version: str, installed: bool, has_class: bool
) -> None:
    room = tmp_path / "forebay" / "proxy" / "vllm_scheduler"
    if installed:
        room.mkdir(parents=True)
        (room / "__init__.py").write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    info = tmp_path / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = tmp_path / "vllm"
    command.write_text(f"#!{python}\n")
    command.chmod(0o755)
    found = find_vllm(str(command))
    assert (found.version, found.has_class) == (version, has_class)


@pytest.mark.parametrize("zero", [("0",), ("=0",)])
def test_a_threshold_of_0_needs_no_flag(zero: tuple[str, ...]) -> None:
    flag = "--long-prefill-token-threshold"
    words = (flag + zero[0],) if zero[0].startswith("=") else (flag, *zero)
    plan = listing(flag, vllm_args=(*words, "--scheduling-policy", "fcfs"))
    assert plan.servers[0].command[-2:] == ("--scheduling-policy", "fcfs")
    assert not [word for word in plan.servers[0].command if word.startswith(flag)]
    assert plan.chunk == 0


@pytest.mark.parametrize(
    ("but", "options", "says"),
    [
        ("--max-num-seqs", {}, "--max-num-seqs: this vLLM has no such flag"),
        ("--kv-events-config", {}, "give --no-kv-events"),
        ("", {"vllm_args": ("--new-flag=3",)}, "--new-flag: this vLLM has no such flag"),
        (
            "--long-prefill-token-threshold",
            {"vllm_args": ("--long-prefill-token-threshold", "2048")},
            "--long-prefill-token-threshold: this vLLM has no such flag",
        ),
    ],
)
def test_a_flag_that_is_needed_and_not_listed(but: str, options: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        listing(but, **options)


def test_the_flags_are_asked_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = str(install(tmp_path))
    assert listed_flags(fake) is None
    monkeypatch.setenv("FAKE_HELP", "--port PORT\n  --a_b, --no-a_b\n  -x--y  the-flag --c.")
    assert listed_flags(fake) == frozenset({"--port", "--a-b", "--c"})
    assert listed_flags("/nowhere/vllm") is None


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.11.2"])
def test_the_version_is_asked_of_the_command(tmp_path: Path, version: str) -> None:
    assert find_vllm(str(install(tmp_path, version))).version == version


def test_a_vllm_for_the_cpu_is_not_started_on_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install(tmp_path, "0.32.0+cpu")
    assert main(["fleet", "up", "--model", "llama-3-8b", "--vllm", str(fake)]) == 2
    assert "built for the CPU: give --cpu or --vllm" in capsys.readouterr().err


def test_a_vllm_that_is_too_old_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vLLM 0\.8\.5; 0\.11 or later"):
        find_vllm(str(install(tmp_path, "0.8.5")))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model gpt5 --dry-run", "--model gpt5: give llama-3-8b"),
        ("--model ./nowhere --dry-run", "no config.json"),
        ("--model llama-3-8b --vllm /nowhere/vllm", "no such command; install vLLM"),
        ("--model llama-3-8b --cpu --gpus 0", "give one of them"),
        ("--model llama-3-8b --servers 2", "--servers goes with --cpu"),
        ("--model llama-3-8b --gpus 0,0 --dry-run", "--gpus 0,0: give GPU numbers"),
        ("--model llama-3-8b --max-model-len 9000 --dry-run", "holds 8,192 tokens"),
        ("--model qwen2.5-14b --gpu-memory-utilization 0.3 --dry-run", "KV cache holds"),
        ("--model llama-3-8b --gpu-memory-utilization 2 --dry-run", "a share in (0, 1]"),
        ("--model llama-3-8b --cpu --kv-cache-memory-bytes lots --dry-run", "such as 256M or 4G"),
        ("--model llama-3-8b --max-model-len 0 --dry-run", "a whole number of 1 or more"),
        ("--model llama-3-8b --dry-run -- --port 3", "--port after `--`"),
        ("--model llama-3-8b --dry-run -- -tp 2", "-tp after `--`"),
        ("--model llama-3-8b --dry-run -- -tp=2", "give it before the `--`"),
        ("--model llama-3-8b --dry-run --data-parallel-size 2", "leave it out"),
        ("--model llama-3-8b --dry-run -- --long-prefill-token-threshold", "give tokens"),
        ("--model llama-3-8b --dry-run -- --long-prefill-token-threshold -1", "give tokens"),
        ("--model llama-3-8b --dry-run -- --long-prefill-token-threshold=8193", "8,192 tokens"),
        ("--model llama-3-8b --dry-run -- 3", "only flags of `vllm serve`"),
        ("--model llama-3-8b --dry-run --vllm-version new", "--vllm-version new"),
        ("--model llama-3-8b --vllm-version 0.26", "goes with --dry-run"),
        ("--model llama-3-8b --dry-run --config /nowhere", "--config /nowhere"),
        ("--model llama-3-8b --dry-run --port 65535", "ports beyond 65535"),
        ("--model llama-3-8b --dry-run --port 64000 --host 0.0.0.0", "1000 and 2000 above it"),
        ("--model llama-3-8b --dry-run --dir /" + "d" * 110, "too long a path"),
    ],
)
def test_bad_input_is_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi, whatever this machine has
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = words.split()
    if "--dry-run" in given and "--vllm-version" not in given:
        given[2:2] = ["--vllm-version", "0.32"]
    assert main(["fleet", "up", *given]) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("forebay fleet: ")
    assert says in last
    assert not out


def test_a_dry_run_needs_neither_gpu_nor_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "fleet"
    words = ["fleet", "up", "--model", "phi-3-mini-128k", "--dry-run", "--dir", str(folder)]
    assert main(words) == 0
    text, err = capsys.readouterr()
    assert "vllm is not installed here" in err
    assert "no GPU here" in err
    assert "CUDA_VISIBLE_DEVICES=1 " in text
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [server["gpu"] for server in data["servers"]] == [0, 1]
    assert data["kv_tokens"] == pytest.approx(320_560, rel=0.01)  # the study's table
    assert not folder.exists()


def test_without_the_extra_the_proxy_is_not_told_of_events(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.replay.fleet.cli.find_spec", lambda name: None)
    words = ["--model", "llama-3-8b", "--cpu", "--kv-cache-memory-bytes", "2G", "--dry-run"]
    assert main(["fleet", "up", *words, "--vllm-version", "0.32"]) == 0
    out, err = capsys.readouterr()
    assert "pip install 'forebay[kv-events]'" in err
    assert "--kv-events-config" in out
    assert "kv_events: " not in out


def test_a_model_in_a_folder_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "small", ModelSize())
    words = "--cpu --servers 2 --vllm-version 0.32 --dry-run --json"
    assert main(["fleet", "up", "--model", str(tmp_path / "small"), *words.split()]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["kv_tokens"], data["served_model_name"]) == (None, "small")
    for server in data["servers"]:
        assert "CUDA_VISIBLE_DEVICES" not in server["environment"]
        assert server["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert "uni" in server["command"]
        assert "1G" in server["command"]


def test_a_folder_with_the_name_of_a_known_model_has_its_sizes(tmp_path: Path) -> None:
    write_model(tmp_path / "Qwen2.5-14B-Instruct", ModelSize())
    plan = plan_of(str(tmp_path / "Qwen2.5-14B-Instruct"))
    assert plan.servers[0].command[2] == str(tmp_path / "Qwen2.5-14B-Instruct")
    assert plan.kv_tokens == plan_of("qwen2.5-14b").kv_tokens
    assert value(plan, "--served-model-name") == "Qwen2.5-14B-Instruct"
