"""Show a fleet's plan as text or as data."""

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
