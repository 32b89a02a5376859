"""Show a fleet's plan and status as text or as data."""

import textwrap
from typing import Any

from forebay.replay.fleet.gpu.flags import Flag
from forebay.replay.fleet.plan import FleetPlan

NAME_WIDTH = 45
LINE_WIDTH = 118


def plan_text(plan: FleetPlan, *, commands: bool) -> str:
    """Describe every flag and its reason, with `commands` also the commands to type."""
    where = ", ".join(
        f"{server.name} {server.url}" if server.gpu is None else f"GPU {server.gpu} {server.url}"
        for server in plan.servers
    )
    lines = [
        f"{plan.setting.profile.repository} with vLLM {plan.install.version}: {where}",
        *(f"note: {note}" for note in plan.notes),
        "",
        *_explained(plan.flags),
        "",
        *_explained(plan.variables, join="="),
    ]
    if plan.left_out:
        lines += [
            "",
            f"left out, because vLLM {plan.install.version} does not have them",
            *_explained(plan.left_out),
        ]
    if plan.options.vllm_args:
        lines += ["", f"as given: {' '.join(plan.options.vllm_args)}"]
    if commands:
        lines += ["", *(server.shell for server in plan.servers)]
    return "\n".join(lines)


def _explained(flags: tuple[Flag, ...], join: str = " ") -> list[str]:
    lines: list[str] = []
    for flag in flags:
        text = flag.name if flag.value is None else f"{flag.name}{join}{flag.value}"
        if len(text) > NAME_WIDTH:
            lines += textwrap.wrap(
                text, LINE_WIDTH - 2, initial_indent="  ", subsequent_indent="      "
            )
            text = ""
        why = textwrap.wrap(flag.why, LINE_WIDTH - NAME_WIDTH - 4)
        lines.append(f"  {text:<{NAME_WIDTH}}  {why[0]}")
        lines += [" " * (NAME_WIDTH + 4) + more for more in why[1:]]
    return lines


def plan_data(plan: FleetPlan, proxy_config: str) -> dict[str, Any]:
    """Return the plan as data for programs."""
    return {
        "model": plan.setting.profile.repository,
        "served_model_name": plan.setting.served_name,
        "vllm": plan.install.version,
        "kv_tokens": plan.kv_tokens,
        "notes": list(plan.notes),
        "flags": _flags(plan.flags),
        "environment": _flags(plan.variables),
        "left_out": _flags(plan.left_out),
        "servers": [
            {
                "name": server.name,
                "url": server.url,
                "gpu": server.gpu,
                "command": list(server.command),
                "environment": dict(server.env),
                "log": str(server.log),
                "kv_events": server.kv_events,
                "kv_replay": server.kv_replay,
            }
            for server in plan.servers
        ],
        "proxy_config": proxy_config,
    }


def _flags(flags: tuple[Flag, ...]) -> list[dict[str, str | None]]:
    return [{"name": flag.name, "value": flag.value, "why": flag.why} for flag in flags]


def status_text(status: dict[str, Any]) -> str:
    """Describe the fleet with one line for each server."""
    supervisor = status["supervisor"]
    watched = f"supervisor {supervisor['pid']}" + ("" if supervisor["alive"] else " is gone")
    lines = [f"{status['model']} with vLLM {status['vllm']}, {watched}"]
    width = max(len(row["name"]) + len(row["url"]) for row in status["servers"]) + 2
    for row in status["servers"]:
        place = f"{row['name']}  {row['url']}".ljust(width)
        phase = "healthy" if row["healthy"] else _phase(row)
        lines.append(f"{place}  {phase}  for {row['for_s']:.0f} s{_restarts(row)}{_load(row)}")
    lines.append(f"proxy: forebay proxy --config {status['proxy_config']}")
    return "\n".join(lines)


def _phase(server: dict[str, Any]) -> str:
    words = {
        "up": "not answering",
        "waiting": "waiting to be restarted",
        "failed": "given up",
        "gone": "not running",
    }
    phase: str = server["phase"]
    return words.get(phase, phase)


def _restarts(server: dict[str, Any]) -> str:
    number = server["restarts"]
    if not number and not server["last_end"]:
        return ""
    times = "restart" if number == 1 else "restarts"
    return f", {number} {times} (last: {server['last_end']})"


def _load(server: dict[str, Any]) -> str:
    load = server["load"]
    if load is None:
        return ""
    hits = "-" if load["hit_ratio"] is None else f"{load['hit_ratio']:.0%}"
    return (
        f", {load['running']} running, {load['waiting']} waiting, KV {load['kv_usage']:.0%}, "
        f"prefix hits {hits}, {load['preemptions']} preempted"
    )
