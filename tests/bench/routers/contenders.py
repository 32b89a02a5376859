"""Every router of the side-by-side runs with the strongest sensible settings it has.

`docs/benchmarks/bench-routers.md` prints these notes and commands. Waits in a configuration are
wall-clock seconds: in front of engines that run X times fast they are divided by X, for every
router alike.
"""

import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml
from routers import peers
from routers.peers import Missing, Peer, Setting

from forebay.analysis.demo.processes import proxy_config

DIRECT = "direct"
PER_ENGINE = 64  # requests at once on one engine, wherever a router can be told
QUEUE_S = 15.0  # longest wait in a router's own queue: the first-token target of a document
CHAT_QUEUE_S = 2.0  # and that of a chat
QUICK_START = ("--worker-startup-check-interval", "1")
LONG_BYTES = 20_000  # 5,000 tokens: where documents begin


@dataclass(frozen=True, slots=True)
class Contender:
    """One router as it is run.

    Attributes:
        peer: how it is installed and started; None sends straight to the engines in turn.
        note: its settings in a sentence, and what they cannot do.
    """

    name: str
    peer: Peer | None
    note: str

    def install(self) -> str:
        """Install the router and return its version; raises Missing."""
        return self.peer.install() if self.peer is not None else "none"

    def command(self, at: Setting) -> list[str]:
        return list(self.peer.command(at)) if self.peer is not None else []

    def shown_command(self, at: Setting) -> str:
        """The router's command line without the paths of this machine."""
        if self.peer is None:
            return "forebay replay --target " + " --target ".join(at.urls)
        words = shlex.join(self.command(at))
        for path, short in (
            (str(at.folder) + "/", ""),
            (str(peers.VENVS) + "/", ".routers/"),
            (sys.executable, "python"),
        ):
            words = words.replace(path, short)
        return words


def _haproxy(at: Setting) -> Sequence[str]:
    """Long bodies wait in a queue of their own, a few at a time: all it can know of a prompt."""
    queues = (
        ("documents", f"{{ req.hdr_val(content-length) gt {LONG_BYTES} }}", 1, QUEUE_S),
        ("chats", "", PER_ENGINE // 2, CHAT_QUEUE_S),
    )
    rules = "\n".join(
        f"  use_backend {name} if {condition}" if condition else f"  default_backend {name}"
        for name, condition, _, _ in queues
    )
    text = f"""\
global
  nbthread 1
  maxconn 8192
  tune.bufsize 65536
defaults
  mode http
  timeout client 600s
  timeout server 600s
  timeout connect 5s
  option http-no-delay
  option abortonclose
frontend in
  bind 127.0.0.1:{at.port} backlog 4096
{rules}
"""
    for name, _, at_once, wait_s in queues:
        servers = "\n".join(
            f"  server s{port} 127.0.0.1:{port} maxconn {at_once} check" for port in at.backends
        )
        text += f"""\
backend {name}
  balance leastconn
  timeout queue {wait_s / at.time_scale * 1e3:.0f}ms
  option httpchk GET /health
{servers}
"""
    return ["haproxy", "-db", "-f", at.write("haproxy.cfg", text)]


def _forebay(at: Setting) -> Sequence[str]:
    told = yaml.safe_load(proxy_config(at.urls, at.time_scale))
    for backend in told["backends"] if at.chunk else ():
        # As `forebay fleet up` would write: what the engines were started with.
        backend["long_prefill_token_threshold"] = at.chunk
    config = at.write("forebay.yaml", yaml.safe_dump(told, sort_keys=False))
    ports = ["--port", str(at.port), "--admin-port", str(at.side_port)]
    return [sys.executable, "-m", "forebay.proxy", "proxy", "--config", config, *ports]


def _forebay_version() -> str:
    """By content, not by commit: a run need not be repeated because a page was written."""
    digest = hashlib.sha256(proxy_config([], 1.0).encode())
    for folder in ("proxy", "traces"):
        for file in sorted((peers.ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return f"sources {digest.hexdigest()[:8]}"


def _listed() -> Sequence[Contender]:
    known = peers.PEERS
    return (
        Contender(
            "forebay", replace(known["forebay"], command=_forebay, version=_forebay_version),
            "the defaults; nothing is set for a workload, but each engine's "
            "--long-prefill-token-threshold is told where it has one",
        ),
        Contender(DIRECT, None, "the client asks the engines in turn"),
        Contender(
            "smg cache_aware",
            replace(known["smg"], command=peers.rust(
                "smg", "cache_aware", ["launch"],
                [*QUICK_START, "--load-monitor-interval", "1", "--backend", "vllm",
                 "--worker-overload-shed", "--max-concurrent-requests", "0"],
            )),
            "radix tree of characters, spill by load, engines' queues polled every second, 503 "
            "when all of them are overloaded",
        ),
        Contender(
            "nginx least_conn", known["nginx"],
            "unbuffered, bodies kept in memory",
        ),
        Contender(
            "haproxy by length", replace(known["haproxy"], command=_haproxy),
            f"leastconn with two queues: bodies over {LONG_BYTES} bytes one an engine at once and "
            f"{QUEUE_S:g} s in the queue, the others {PER_ENGINE // 2} and {CHAT_QUEUE_S:g} s",
        ),
        Contender(
            "vllm-router cache_aware",
            replace(known["vllm-router"],
                    command=peers.rust("vllm-router", "cache_aware", flags=QUICK_START)),
            "defaults; a chat request without a session header has no key of its own for it",
        ),
    )  # fmt: skip


CONTENDERS = {contender.name: contender for contender in _listed()}


def install_all(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of those that can be had, and why the others cannot."""
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = CONTENDERS[name].install()
        except Missing as error:
            missing[name] = str(error)
    return versions, missing


def environment() -> dict[str, str]:
    return {**peers.environment(), "HF_HUB_OFFLINE": "1"}
