"""Start engines and routers as processes of their own, stop exactly those, and read their counters.

Nothing here knows what is being compared. Everything started ends with its whole process group.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from routers.peers import Missing

START_S = 60.0
STOP_S = 0.5  # nobody asks it anything any more; SMG would take five seconds
CALM_SHARE = 0.2  # of all cores: a run takes another 0.2 to 0.4 itself
SAMPLE_S = 0.25
CALM_SAMPLES = 8  # one after the other: machines that are shared come and go
CLOCK = os.sysconf("SC_CLK_TCK")
# Ends with whoever started it, however that ended.
IDLER = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    pass
"""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LE = re.compile(r'le="([^"]+)"')
# Straight to loopback, whatever proxy this machine is behind.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def come_first() -> str:
    """Let this thread, but nothing it starts, run before all else; why it cannot, or nothing.

    Real engines want every core, simulated ones and a router two at times: a load generator beside
    them would send late.
    """
    try:
        first = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, first)
    except (AttributeError, OSError) as error:
        return f"no real-time priority for the load generator ({error}): it may send late"
    return ""


@contextmanager
def cores_awake() -> Iterator[list[int]]:
    """Keep each core awake with an idle-priority process; return their pids, none if impossible.

    A virtual core that sleeps is lent to others and comes back late: on a shared machine one
    wake-up of a hundred was 9 to 11 ms late, with its cores kept awake 0.2 to 0.6 ms.
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield []
        return
    cores = len(os.sched_getaffinity(0))
    idlers = [subprocess.Popen([sys.executable, "-Sc", IDLER]) for _ in range(cores)]
    try:
        yield [one.pid for one in idlers]
    finally:
        for one in idlers:
            one.kill()
        for one in idlers:
            one.wait()


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a group of its own, ended with it. Raises Missing where it cannot start."""
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Missing(f"{command[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, signal_)
                process.wait(STOP_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        process.poll()


def wait_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Until /health answers 200; raises Missing with the end of its log."""
    _until(process, log, lambda: _answers(f"http://127.0.0.1:{port}/health"))


def wait_answers(process: "subprocess.Popen[bytes]", port: int, model: str, log: Path) -> None:
    """Until a small chat is answered through `port`; raises Missing with the end of its log."""
    request = _small_chat(port, model)
    _until(process, log, lambda: _answers(request))


def ask(port: int, model: str) -> None:
    """One small chat; raises Missing when it is not answered."""
    if why := _answers(_small_chat(port, model)):
        raise Missing(f"the engine on port {port} does not answer: {why}")


def _small_chat(port: int, model: str) -> urllib.request.Request:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "ready?"}],
        "max_tokens": 1,
    }
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )


def _until(process: "subprocess.Popen[bytes]", log: Path, there: Callable[[], str]) -> None:
    until, why = time.monotonic() + START_S, ""
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Missing(f"ended with status {process.returncode}: {last_line(log)}")
        why = there()
        if not why:
            return
        time.sleep(0.1)
    raise Missing(f"not ready within {START_S:g} s ({why}): {last_line(log)}")


def _answers(request: "urllib.request.Request | str") -> str:
    """Empty when it answers 200, else why not."""
    try:
        with _OPENER.open(request, timeout=10.0) as answer:
            answer.read()
            return "" if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}: {error.read(200).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [one.strip() for one in log.read_text(errors="replace").splitlines()]
    told = [one for one in lines if re.search(r"\w", one)]
    return told[-1][:200] if told else "it said nothing"


def counters(port: int) -> dict[str, float]:
    """Every sample of an engine's /metrics by name, labels summed; buckets as `name le=BOUND`."""
    with _OPENER.open(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        bound = _LE.search(labels or "")
        if bound is not None:
            name += f" le={float(bound[1]):g}"
        found[name] = found.get(name, 0.0) + float(value)
    return found


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process and all below it; 0 where /proc is missing.

    Linux counts nanoseconds for each thread. A process that has ended counts nothing.
    """
    return sum(map(_own_cpu_s, _tree(pid)))


def _own_cpu_s(pid: int) -> float:
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:  # a thread has just ended
        tasks = []
    if tasks:
        return sum(int(task.split()[0]) for task in tasks) / 1e9
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))


def used_ticks(idlers: Sequence[int]) -> tuple[float, int]:
    """(busy, all) ticks of all cores since boot, without those of `idlers` (`cores_awake`)."""
    busy, total = machine_ticks()
    return busy - CLOCK * sum(map(tree_cpu_s, idlers)), total


def machine_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all cores since boot, time stolen by other machines being busy."""
    fields = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def wait_calm(at_most_s: float) -> float:
    """Until others use little of the machine, or for `at_most_s` seconds; seconds waited.

    A run that begins beside a test suite is measured for nothing, and then again at half the speed.
    What other machines take shows only while cores are awake.
    """
    waited_s, calm = 0.0, 0
    with cores_awake() as idlers:
        while waited_s < at_most_s and calm < CALM_SAMPLES:
            before = used_ticks(idlers)
            time.sleep(SAMPLE_S)
            used, total = (b - a for a, b in zip(before, used_ticks(idlers), strict=True))
            calm = calm + 1 if used <= CALM_SHARE * max(1, total) else 0
            waited_s += SAMPLE_S
    return waited_s
