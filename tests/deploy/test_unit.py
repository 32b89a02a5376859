"""systemd accepts deploy/forebay-proxy.service, starts, reloads and stops it.

systemd runs as a user manager in a mount namespace of its own, so it need not be the first process.
There it cannot mount /proc and /sys anew: the directives that would are left out of that test.
"""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from paths import ROOT
from ports import free_ports

from forebay.proxy.config.sources import load_config

UNIT = ROOT / "deploy" / "forebay-proxy.service"
EXAMPLE = ROOT / "deploy" / "forebay.yaml"
COMMAND = Path(sys.executable).parent / "forebay"
MANAGER = Path("/lib/systemd/systemd")
EXPOSURE = 20  # of 100, as `systemd-analyze security` counts it
NOT_HERE = re.compile(
    # A user manager has one user, and a checkout may be in a home or in /tmp. The rest mounts /proc
    # and /sys.
    r"^(DynamicUser|PrivateTmp|ProtectHome|ProtectProc|ProtectKernel\w+|ProtectControlGroups)=.*\n",
    re.M,
)
SCRIPT = """
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user
cp "$1" /run/forebay.yaml
export XDG_RUNTIME_DIR=/run/user XDG_CONFIG_HOME="$2"
chmod 700 /run/user
$3 --user --unit=forebay-proxy.service >/dev/null 2>&1 &
manager=$!
wait_for() {
  for _ in $(seq 300); do systemctl --user is-active -q forebay-proxy && return; sleep 0.2; done
}
show() { systemctl --user show forebay-proxy -p ActiveState,Result,StatusText,MainPID; }
wait_for
show
pid=$(systemctl --user show forebay-proxy -p MainPID --value)
grep -E '^(CapEff|NoNewPrivs|Seccomp|Umask):' "/proc/$pid/status"
awk '$5 == "/" {print "root=" $6}' "/proc/$pid/mountinfo"
sed -i s/chat/talk/ /run/forebay.yaml
systemctl --user reload forebay-proxy
"$4" "$5"
systemctl --user stop forebay-proxy
show
kill $manager
wait $manager
"""


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with this checkout's command."""
    text = UNIT.read_text(encoding="utf-8").replace("/opt/forebay/bin/forebay", str(COMMAND))
    file = tmp_path / "systemd" / "user" / UNIT.name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_stopping_leaves_time_to_drain() -> None:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(UNIT, encoding="utf-8")
    timeouts = load_config(EXAMPLE, {}, {}).timeouts
    patience_s = int(parsed["Service"]["TimeoutStopSec"].removesuffix("s"))
    assert patience_s > timeouts.lame_duck + timeouts.drain + 1


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_finds_no_mistake(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_the_service_is_hardened(unit: Path) -> None:
    words = ("security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(unit))
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    not MANAGER.exists() or not shutil.which("systemctl") or os.geteuid() != 0,
    reason="needs systemd, and to be root",
)
def test_systemd_starts_reloads_and_stops_it(unit: Path, tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    config = tmp_path / "forebay.yaml"
    config.write_text(
        f"listen: {{port: {port}, admin_port: {admin_port}}}\n"
        "backends: [{name: gpu0, url: 'http://127.0.0.1:9'}]\n"
        "buckets: [{name: chat, up_to: 5000}]\n"
    )
    text = NOT_HERE.sub("", unit.read_text())
    unit.write_text(text.replace("/etc/forebay/forebay.yaml", "/run/forebay.yaml"))
    ask = tmp_path / "ask.py"
    ask.write_text(
        "import sys, urllib.request as u\n"
        f"print(u.urlopen('http://127.0.0.1:{admin_port}/status').read().decode())\n"
    )
    given = (str(config), str(tmp_path), str(MANAGER), sys.executable, str(ask))
    words = ("unshare", "--mount", "sh", "-c", SCRIPT, "sh", *given)
    done = subprocess.run(words, capture_output=True, text=True)
    told, status, end = re.split(r"^(\{.*\})$", done.stdout, maxsplit=1, flags=re.M)
    assert "ActiveState=active" in told, done.stdout + done.stderr
    assert f"StatusText=listening on http://127.0.0.1:{port}" in told
    assert re.search(r"^CapEff:\s+0+$", told, re.M)
    assert re.search(r"^NoNewPrivs:\s+1$", told, re.M)
    assert re.search(r"^Seccomp:\s+2$", told, re.M)  # a filter of system calls
    assert re.search(r"^root=ro\b", told, re.M)  # ProtectSystem=strict
    assert "talk" in json.dumps(json.loads(status))  # after systemctl reload
    assert "ActiveState=inactive" in end
    assert "Result=success" in end
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/healthz", timeout=5)
