"""A stand-in for `vllm` in tests: serves /health, and dies on command.

Written by `install`, which makes it a command. Its behaviour comes from the environment:
FAKE_DIES=NAME: that server's start ends with an error.
FAKE_HELP: the output of `serve --help`. FAKE_DEAF=1: SIGTERM does nothing. FAKE_SILENT=1: /health
never answers. FAKE_LOG gets a line for every start, FAKE_LOG.children the number of the process
that each has in its group.
"""

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = """\
#!{python}
import http.server, json, os, signal, subprocess, sys, time

if sys.argv[1:] == ["--version"]:
    print("{version}")
    sys.exit()
if sys.argv[1:2] == ["serve"] and sys.argv[-1].startswith("--help"):
    print(os.environ.get("FAKE_HELP", ""))
    sys.exit()
flags = dict(zip(sys.argv, sys.argv[1:]))
log = os.environ["FAKE_LOG"]
with open(log, "a") as out:
    name = os.path.basename(os.environ["VLLM_CACHE_ROOT"])
    out.write(json.dumps({{"name": name, "pid": os.getpid(), "argv": sys.argv[1:]}}) + "\\n")
print("(APIServer pid=1) INFO 11-21 13:50:34 [fake.py:1] loading", flush=True)
if name in os.environ.get("FAKE_DIES", ""):
    print("(EngineCore pid=1) ERROR 11-21 13:50:34 [f.py:2] ValueError: no such flag", flush=True)
    print("after it", flush=True)
    sys.exit(3)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if os.environ.get("FAKE_SILENT"):
            time.sleep(60)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


# A child in the same group, as vLLM's engine is.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(log + ".children", "a") as out:
    out.write(f"{{os.getpid()}} {{child.pid}}\\n")


def end(*_):
    child.kill()
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("FAKE_DEAF") else end)
http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def install(folder: Path, version: str = "0.32.0+cpu") -> Path:
    """The command, in `folder`."""
    command = folder / "vllm"
    command.write_text(SCRIPT.format(python=sys.executable, version=version))
    command.chmod(0o755)
    return command


def starts(log: Path) -> list[dict[str, Any]]:
    """Started processes in order: name, pid, argv."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def children(log: Path) -> dict[int, int]:
    """The child of each."""
    file = log.with_name(f"{log.name}.children")
    lines = file.read_text().splitlines() if file.exists() else []
    return {int(parent): int(child) for parent, child in map(str.split, lines)}
