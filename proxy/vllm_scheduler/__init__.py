"""The scheduler that vLLM loads: `--scheduler-cls forebay.proxy.vllm_scheduler.ForebayScheduler`.

A long prompt no longer fills every step of the engine: each step lasts at most as long as the
operator's pause, and short prompts go before long ones. The decision is the core's
(`core/policy/engine_step.py`). This room carries it into vLLM.

In reading order: scheduler (the class), prefills (vLLM's requests as the decision sees them),
waiting (its queue), settings (from `--additional-config`, and which engines are supported), reports
(metrics and a log line). May import `core` and vLLM. A vLLM environment needs nothing else.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the class when vLLM asks for it: the room itself can be imported without vLLM."""
    if name != "ForebayScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forebay.proxy.vllm_scheduler import scheduler

    return scheduler.ForebayScheduler
