"""A vLLM environment has nothing else of Forebay's: the class asks for nothing else."""

import subprocess
import sys
from pathlib import Path

from paths import ROOT

# What the class imports of vLLM, without vLLM.
STUBS = {
    "__init__": "__version__ = '0.33.0'",
    "v1/__init__": "",
    "v1/core/__init__": "",
    "v1/core/sched/__init__": "",
    "v1/core/sched/scheduler": "class Scheduler: pass",
    "v1/core/sched/async_scheduler": (
        "from vllm.v1.core.sched.scheduler import Scheduler\nclass AsyncScheduler(Scheduler): pass"
    ),
    "v1/core/sched/request_queue": "class RequestQueue: pass\nclass SchedulingPolicy: pass",
    "v1/kv_cache_interface": "class FullAttentionSpec: pass",
    "v1/request": "class RequestStatus: WAITING = PREEMPTED = 0",
    "logger": "from logging import getLogger as init_logger",
}
SCRIPT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in {*sys.stdlib_module_names, "forebay", "vllm"}:
            raise ImportError(f"{name} is not part of a vLLM environment")

sys.meta_path.insert(0, Blocked())
room = importlib.import_module("forebay.proxy.vllm_scheduler")
print(room.ForebayScheduler.__name__)
print(*sorted(name for name in sys.modules if name.startswith("forebay.")))
"""


def test_the_class_imports_the_core_and_vllm_alone(tmp_path: Path) -> None:
    for name, text in STUBS.items():
        path = tmp_path / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / '.typing'}"}
    run = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    name, modules = run.stdout.splitlines()
    assert name == "ForebayScheduler"
    own = ("forebay.proxy.core", "forebay.proxy.vllm_scheduler")
    assert [m for m in modules.split() if m != "forebay.proxy" and not m.startswith(own)] == []
