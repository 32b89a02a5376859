"""Units and Compose files start the servers of the plan, and restart those that die."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forebay.replay.fleet.commands import make_plan
from forebay.replay.fleet.gpu.gpus import Gpu
from forebay.replay.fleet.gpu.vllm_install import VllmInstall
from forebay.replay.fleet.options import FleetOptions
from forebay.replay.fleet.plan import FleetPlan
from forebay.replay.fleet.units import _quoted, write_units
from forebay.traces.ground.errors import InputError

WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


def words_in(line: str) -> list[str]:
    """Return the words that systemd reads: quoted, with `\\`, `%%` and `$$` (systemd.service)."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in WORD.findall(line)]
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


@given(st.lists(st.text(st.characters(exclude_characters="\n\0"))))
def test_a_word_is_read_as_it_was_written(words: list[str]) -> None:
    assert words_in(" ".join(map(_quoted, words))) == words


def a_plan(folder: Path, gpus: int, **options: Any) -> FleetPlan:
    chosen = FleetOptions(model="llama-3.1-8b", folder=folder, **options)
    found = [Gpu(index, "NVIDIA H200", 140.4) for index in range(gpus)]
    ports = [8001 + number for number in range(gpus // chosen.tensor_parallel_size or 1)]
    return make_plan(chosen, VllmInstall(sys.executable, "0.26.0"), found, ports)


def test_a_unit_has_the_command_and_variables_of_its_server(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "fleet", 2)
    proxy, *units = write_units(plan, "backends: []\n")
    assert proxy.read_text() == "backends: []\n"
    assert [unit.name for unit in units] == ["vllm-gpu0.service", "vllm-gpu1.service"]
    for unit, server in zip(units, plan.servers, strict=True):
        text = unit.read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        assert words_in(command) == list(server.command)
        variables = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
        assert [words_in(line) for line in variables] == [
            [f"{name}={value}"] for name, value in server.environment.items()
        ]
        assert "Restart=always" in text
        assert "TimeoutStopSec=45" in text
    if analyse := shutil.which("systemd-analyze"):
        subprocess.run([analyse, "verify", *units], check=True)


def test_a_compose_file_gives_each_server_its_gpus(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "a$HOME", 4, compose=True, tensor_parallel_size=2)
    _, file = write_units(plan, "backends: []\n")
    services = yaml.safe_load(file.read_text().replace("$$", "$"))["services"]
    assert list(services) == ["gpu0", "gpu2"]
    for server in plan.servers:
        service = services[server.name]
        assert service["entrypoint"] == ["vllm", "serve"]
        assert service["command"] == list(server.command[2:])
        assert service["image"] == "vllm/vllm-openai:v0.26.0"
        assert service["restart"] == "unless-stopped"
        assert "CUDA_VISIBLE_DEVICES" not in service["environment"]
        assert f"{tmp_path / 'a$HOME'}:{tmp_path / 'a$HOME'}" in service["volumes"]
    assert "a$HOME" not in file.read_text()
    (device,) = services["gpu2"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["2", "3"]


def test_compose_has_no_image_for_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--compose: vLLM has no image for a CPU; give --systemd"):
        write_units(a_plan(tmp_path / "fleet", 0, compose=True), "")
