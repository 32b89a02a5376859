"""Install, configure and start the routers that an operator would use instead of Forebay.

Python ones get a virtual environment of their own in `.routers/NAME`; nginx and HAProxy come from
the system (Debian: `apt-get install nginx-light haproxy`). One that cannot be had says why.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VENVS = ROOT / ".routers"
COMPILED = ROOT / ".compiled"
BARE = "bare aiohttp"
"""No router: an aiohttp server on uvloop that answers by itself, by which other machines' figures
for Python can be compared with this one's."""
BARE_PROXY = "bare proxy"
"""The same server, which passes requests on by Forebay's client and decides nothing: the least
that a proxy in Python costs."""


class Missing(Exception):
    """The router cannot be had here, and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Ports, backends and folder that a router is started with."""

    port: int
    side_port: int  # for whatever else it must listen on
    backends: tuple[int, ...]
    folder: Path
    time_scale: float = 1.0  # of the engines; waits in a configuration are divided by it
    model: str = "mock"
    chunk: int = 0  # --long-prefill-token-threshold of the engines, for who can be told; 0: none

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.backends]

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)


@dataclass(frozen=True, slots=True)
class Peer:
    """A router. `command` gives its command line; `pip` what it is installed from."""

    name: str
    command: Callable[[Setting], Sequence[str]]
    version: Callable[[], str]
    pip: str = ""

    def install(self) -> str:
        """Install the router and return its version; raises Missing."""
        if self.pip:
            _venv(self.name.partition(" ")[0], self.pip)
        try:
            return self.version()
        except (OSError, subprocess.CalledProcessError) as error:
            raise Missing(f"{self.name}: {error}") from None


def _venv(name: str, requirement: str) -> None:
    target = VENVS / name
    if (target / "ready").exists() and (target / "ready").read_text() == requirement:
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        subprocess.run(
            [str(target / "bin/pip"), "install", "-q", "--disable-pip-version-check",
             *requirement.split()],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [str(error)]
        raise Missing(f"pip install {requirement}: {last[0]}") from None
    (target / "ready").write_text(requirement)


def _bin(venv: str, name: str) -> str:
    return str(VENVS / venv / "bin" / name)


def pip_version(venv: str, package: str) -> Callable[[], str]:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"

    def version() -> str:
        out = subprocess.run([_bin(venv, "python"), "-c", code], capture_output=True, check=True)
        return out.stdout.decode().strip()

    return version


def _says(*command: str) -> Callable[[], str]:
    """The version number in what a program prints of itself."""

    def version() -> str:
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        words = (out.stdout + out.stderr).replace("/", " ").split()
        return next(word for word in words if word[:1].isdigit())

    return version


def _nginx(at: Setting) -> Sequence[str]:
    servers = "".join(f"server 127.0.0.1:{port};" for port in at.backends)
    text = f"""
worker_processes 1; daemon off; pid {at.folder}/nginx.pid; error_log {at.folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 10m;
  client_body_temp_path {at.folder}; proxy_temp_path {at.folder}; fastcgi_temp_path {at.folder};
  uwsgi_temp_path {at.folder}; scgi_temp_path {at.folder};
  upstream engines {{ least_conn; {servers} keepalive 512; }}
  server {{
    listen 127.0.0.1:{at.port} backlog=4096; keepalive_requests 1000000;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s; proxy_next_upstream error;
    }}
  }}
}}
"""
    return ["nginx", "-c", at.write("nginx.conf", text), "-e", f"{at.folder}/error.log"]


def _haproxy(at: Setting) -> Sequence[str]:
    servers = "\n".join(
        f"  server s{port} 127.0.0.1:{port} maxconn 2048 check" for port in at.backends
    )
    text = f"""
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout client 600s
  timeout server 600s
  timeout connect 5s
  timeout queue 30s
  option http-no-delay
  option abortonclose
frontend in
  bind 127.0.0.1:{at.port} backlog 4096
  default_backend engines
backend engines
  balance leastconn
  option httpchk GET /health
{servers}
"""
    return ["haproxy", "-db", "-f", at.write("haproxy.cfg", text)]


def _forebay(*flags: str) -> Callable[[Setting], Sequence[str]]:
    def command(at: Setting) -> Sequence[str]:
        backends = "".join(f'  - {{url: "{url}", max_concurrency: 1024}}\n' for url in at.urls)
        buckets = (
            "buckets:\n  - {name: chat, up_to: 5000, max_wait: 2s}\n"
            "  - {name: document, up_to: 4000000, max_wait: 30s, prefills_per_backend: 1}\n"
        )  # the defaults, but for prompts of 8 MB
        config = at.write("forebay.yaml", f"backends:\n{backends}{buckets}")
        ports = ["--port", str(at.port), "--admin-port", str(at.side_port)]
        return [sys.executable, "-m", "forebay.proxy", "proxy", "--config", config, *ports, *flags]

    return command


def _compiled(at: Setting) -> Sequence[str]:
    return ["env", f"PYTHONPATH={COMPILED}", *_forebay()(at)]


def _observing(at: Setting) -> Sequence[str]:
    return ["env", "FOREBAY_MODE=observe", *_forebay()(at)]


def _compiled_version() -> str:
    if not COMPILED.exists():
        raise Missing("forebay compiled: nothing in .compiled: run `make compiled`")
    return _forebay_version()


def _bare(at: Setting) -> Sequence[str]:
    return [sys.executable, str(Path(__file__).with_name("bare_server.py")), str(at.port)]


def _bare_proxy(at: Setting) -> Sequence[str]:
    return [*_bare(at), str(at.backends[0])]


def _forebay_version() -> str:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return commit.stdout.strip() or "installed"


def rust(
    venv: str, policy: str, launch: Sequence[str] = (), flags: Sequence[str] = ()
) -> Callable[[Setting], Sequence[str]]:
    """Return the command of vllm-router or SMG: one family, one command line."""

    def command(at: Setting) -> Sequence[str]:
        return [
            _bin(venv, venv), *launch,
            "--worker-urls", *at.urls, "--policy", policy, "--host", "127.0.0.1",
            "--port", str(at.port), "--prometheus-port", str(at.side_port),
            "--prometheus-host", "127.0.0.1", "--log-level", "error", *flags,
        ]  # fmt: skip

    return command


PEERS = {
    peer.name: peer
    for peer in (
        Peer("forebay", _forebay(), _forebay_version),
        Peer("nginx", _nginx, _says("nginx", "-v")),
        Peer("haproxy", _haproxy, _says("haproxy", "-v")),
        Peer(
            "vllm-router",
            rust("vllm-router", "cache_aware"),
            pip_version("vllm-router", "vllm-router"),
            "vllm-router==0.1.17",
        ),
        Peer(
            "smg", rust("smg", "cache_aware", ["launch"]), pip_version("smg", "smg"), "smg==1.13.0"
        ),
    )
}

# To compare costs with: no other routers, so not among those that are compared in other ways.
YARDSTICKS = {
    peer.name: peer
    for peer in (
        Peer("forebay compiled", _compiled, _compiled_version),
        Peer("forebay observe", _observing, _forebay_version),
        Peer(BARE, _bare, lambda: version("aiohttp")),
        Peer(BARE_PROXY, _bare_proxy, lambda: version("aiohttp")),
    )
}


def environment() -> dict[str, str]:
    """Environment of the routers: no telemetry, no HTTP proxy."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**kept, "DO_NOT_TRACK": "1"}
