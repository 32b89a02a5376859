"""Run parts of a replay on the nodes of a Ray cluster.

On each node an actor starts `part_process`, and passes on its lines. Nothing of Ray is between a
part and its sockets. The clocks of the nodes are compared with ours, so that all parts start at the
same moment: a node's clock is read many times, and the reading with the shortest way there and back
tells how far it is ahead, with an error of at most half of that way.
"""

import asyncio
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from forebay.replay.parts.divide import PartJob
from forebay.replay.parts.pool import connect
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import say
from forebay.replay.results.folder import ANSWERS, FILES
from forebay.traces.ground.errors import InputError

READINGS = 25
MOST_CLOCK_ERROR_S = 0.005
BEGIN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeClock:
    """How far the monotonic clock of a node is ahead of ours, in seconds, within `error_s`."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster."""

    id: str
    address: str


class PartHost:
    """The actor on a node: a process and its pipes."""

    def __init__(self, job: bytes, trace_name: str | None, trace: bytes | None) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="forebay-")
        folder = Path(self._place.name)
        part: PartJob = pickle.loads(job)
        options = replace(part.options, out=folder / "run")
        if trace is not None:
            path = folder / (trace_name or "trace.jsonl")
            path.write_bytes(trace)
            options = replace(options, trace=path)
        self._folder = options.out
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.replay.part_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.order(replace(part, options=options).line())

    def clock_s(self) -> float:
        return time.monotonic()

    def order(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode("ascii"))
            self._process.stdin.flush()

    def line(self) -> bytes:
        """Wait for the next line of the process, b"" when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def status(self) -> int:
        return self._process.wait()

    def files(self) -> dict[str, bytes]:
        """Return the files of the part's folder."""
        names = [name for name in (*FILES, ANSWERS) if (self._folder / name).exists()]
        return {name: (self._folder / name).read_bytes() for name in names}

    def close(self) -> None:
        """End the process, and delete its files."""
        self._process.kill()
        self._process.wait()
        self._place.cleanup()


class RayPart:
    """A part that runs on a node, used as a process of this machine is."""

    def __init__(self, ray: Any, actor: Any, node: ClusterNode, place: Path) -> None:
        self.option = "--ray"
        self.name = f"node {node.address}"
        self.clock = NodeClock(0.0, 0.0)
        self._ray = ray
        self._actor = actor
        self._place = place
        self._orders: set[asyncio.Task[Any]] = set()

    async def read_clock(self) -> NodeClock:
        """Compare the node's clock with ours."""
        readings = []
        for _ in range(READINGS):
            asked_s = time.monotonic()
            read_s = await self._actor.clock_s.remote()
            told_s = time.monotonic()
            readings.append(NodeClock(read_s - (asked_s + told_s) / 2, (told_s - asked_s) / 2))
        return min(readings, key=attrgetter("error_s"))

    def start_at(self, monotonic_s: float) -> str:
        """Return the line that starts the part when our clock shows `monotonic_s`."""
        return repr(monotonic_s + self.clock.ahead_s)

    def order(self, line: str) -> None:
        task = asyncio.ensure_future(self._told(self._actor.order.remote(line)))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def line(self) -> bytes:
        try:
            return bytes(await self._actor.line.remote())
        except self._ray.exceptions.RayError:
            return b""

    async def status(self) -> str:
        try:
            return f"ended with status {await self._actor.status.remote()}"
        except self._ray.exceptions.RayError:
            return "cannot be reached any more"

    async def finish(self) -> None:
        """Fetch the part's files."""
        try:
            files = await self._actor.files.remote()
        except self._ray.exceptions.RayError as error:
            raise InputError(f"--ray: {self.name} cannot be reached any more ({error})") from None
        self._place.mkdir()
        for name, content in files.items():
            (self._place / name).write_bytes(content)

    async def kill(self) -> None:
        """End the actor, whose end ends the part."""
        with suppress(self._ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_TIMEOUT_S)
        self._ray.kill(self._actor)

    async def _told(self, answer: Awaitable[Any]) -> None:
        with suppress(self._ray.exceptions.RayError):
            await answer


class Machines:
    """The machines of a cluster, each of which replays a part or several."""

    def __init__(self, ray: Any, nodes: Sequence[ClusterNode], options: ReplayOptions) -> None:
        self.nodes = nodes
        self.clocks: list[dict[str, Any]] = []
        self._ray = ray
        self._options = options
        trace = options.trace
        self._trace_name = trace.name if isinstance(trace, Path) else None
        self._trace = ray.put(trace.read_bytes()) if isinstance(trace, Path) else None

    @classmethod
    async def connect(cls, options: ReplayOptions) -> "Machines":
        """Connect to the cluster that `options.ray` names (InputError: it cannot be reached)."""
        ray = connect(options.ray or "")
        up = [node for node in ray.nodes() if node["Alive"]]
        nodes = [ClusterNode(node["NodeID"], node["NodeManagerAddress"]) for node in up]
        return cls(ray, sorted(nodes, key=lambda node: (node.address, node.id)), options)

    async def begin(self, job: PartJob) -> RayPart:
        """Start a part on the next node (InputError: that takes more than a minute, or fails)."""
        node = self.nodes[job.number % len(self.nodes)]
        place = job.options.out
        if self._trace is not None:
            job = replace(job, options=replace(job.options, trace=()))
        # An actor on exactly this node, with one of its processors.
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        host = self._ray.remote(PartHost).options(
            num_cpus=1,
            max_concurrency=4,  # a call waits for a line, others read the clock and give orders
            scheduling_strategy=affinity(node.id, soft=False),
        )
        actor = host.remote(pickle.dumps(job), self._trace_name, self._trace)
        part = RayPart(self._ray, actor, node, place)
        # A start without a common clock would make wrong times, so no part stays behind then.
        try:
            part.clock = await asyncio.wait_for(part.read_clock(), BEGIN_TIMEOUT_S)
            if part.clock.error_s > MOST_CLOCK_ERROR_S:
                raise InputError(
                    f"--ray: the clock of {part.name} is known only within "
                    f"{part.clock.error_s * 1e3:.1f} ms; use machines whose round trip is below "
                    f"{2 * MOST_CLOCK_ERROR_S * 1e3:g} ms"
                )
        except BaseException as error:
            await part.kill()
            if isinstance(error, TimeoutError):
                raise InputError(
                    f"--ray: {part.name} started nothing within {BEGIN_TIMEOUT_S:g} s; it may have "
                    "no free processor"
                ) from None
            if isinstance(error, self._ray.exceptions.RayError):
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"--ray: {part.name} cannot replay ({reason}); install this version of "
                    "Forebay on it"
                ) from None
            raise
        if job.number < len(self.nodes):  # once for each machine, also if it has several parts
            self.clocks.append({"address": node.address, **asdict(part.clock)})
        say(
            f"{part.name}: its clock is {part.clock.ahead_s:+.6f} s ahead of ours, "
            f"within {part.clock.error_s * 1e3:.2f} ms"
        )
        return part

    def leave(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()
