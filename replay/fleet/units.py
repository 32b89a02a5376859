"""Write a fleet as systemd units or as a Compose file, which restart servers that die."""

from pathlib import Path
from typing import Any

import yaml

from forebay.replay.fleet.plan import FleetPlan, ServerPlan
from forebay.replay.fleet.servers import END_S
from forebay.replay.fleet.state import PROXY, make_folder, write_file
from forebay.traces.ground.errors import InputError

IMAGE = "vllm/vllm-openai:v{version}"
VISIBLE = "CUDA_VISIBLE_DEVICES"
RESTART_S = 5
UNIT = """\
# Written by `forebay fleet up --systemd`; the next one overwrites it.
[Unit]
Description=vLLM {name}, {model}
After=network-online.target
StartLimitIntervalSec=0

[Service]
{environment}
ExecStart={command}
Restart=always
RestartSec={restart_s}
TimeoutStopSec={stop_s:.0f}
KillMode=mixed
StandardOutput=append:{log}
StandardError=inherit

[Install]
WantedBy=default.target
"""


def write_units(plan: FleetPlan, proxy_yaml: str) -> list[Path]:
    """Write the files and the proxy's configuration into the fleet's folder, and return them.

    Raises:
        InputError: the folder cannot be written, or Compose has no image for a CPU.
    """
    folder = plan.options.folder.resolve()
    texts = {"compose.yaml": _compose(plan, folder)} if plan.options.compose else _units(plan)
    make_folder(folder)
    return [write_file(folder / name, text) for name, text in {PROXY: proxy_yaml, **texts}.items()]


def _units(plan: FleetPlan) -> dict[str, str]:
    return {
        f"vllm-{server.name}.service": UNIT.format(
            name=server.name,
            model=plan.profile.repository,
            environment="\n".join(
                f"Environment={_quoted(f'{name}={value}')}"
                for name, value in server.environment.items()
            ),
            command=" ".join(map(_quoted, server.command)),
            restart_s=RESTART_S,
            stop_s=plan.options.drain + END_S,
            log=server.log,
        )
        for server in plan.servers
    }


def _quoted(word: str) -> str:
    """Return a word as systemd reads it: quoted, without its specifiers and variables."""
    for mark, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(mark, written)
    return f'"{word}"'


def _compose(plan: FleetPlan, folder: Path) -> str:
    if any(server.gpu is None for server in plan.servers):
        raise InputError(
            "--compose: vLLM has no image for a CPU; give --systemd, or leave out --cpu"
        )
    services = {server.name: _service(plan, server, folder) for server in plan.servers}
    header = "# Written by `forebay fleet up --compose`; the next one overwrites it.\n"
    text = yaml.safe_dump({"services": services}, sort_keys=False, width=120)
    return header + text.replace("$", "$$")  # Compose fills in variables


def _service(plan: FleetPlan, server: ServerPlan, folder: Path) -> dict[str, Any]:
    """Return the service of a server. It has the host's network, as a proxy on the host needs."""
    variables = {name: value for name, value in server.environment.items() if name != VISIBLE}
    models = str(Path.home() / ".cache" / "huggingface")
    folders = {str(folder), str(Path(server.environment["VLLM_CACHE_ROOT"]).parent), models}
    if Path(plan.profile.repository).is_dir():
        folders.add(plan.profile.repository)
    devices = {
        "driver": "nvidia",
        "device_ids": server.environment[VISIBLE].split(","),
        "capabilities": ["gpu"],
    }
    return {
        "image": IMAGE.format(version=plan.install.version.partition("+")[0]),
        "entrypoint": ["vllm", "serve"],
        "command": list(server.command[2:]),
        "environment": {**variables, "HF_HOME": models},
        "network_mode": "host",
        "ipc": "host",
        "volumes": [f"{path}:{path}" for path in sorted(folders)],
        "deploy": {"resources": {"reservations": {"devices": [devices]}}},
        "restart": "unless-stopped",
        "stop_grace_period": f"{plan.options.drain + END_S:.0f}s",
    }
