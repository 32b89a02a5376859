"""Compare routers when clients leave, backends reject requests and documents are hot.

    python tests/bench/routers/bench_behaviour.py                       (half a minute a router)
    python tests/bench/routers/bench_behaviour.py --routers forebay smg

Two mock backends in this process; each router as `peers.py` starts it, and not installed anew. A
limit of eight is Forebay's alone to show: how others are told theirs differs, docs of each apply.
Exit status 1 where Forebay is not what it must be.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter

import uvloop
from bench_proxy import running, serving
from load import Broken, Client, chat
from mock_backend import MODELS, STREAM_HEAD, STREAM_TAIL, WHOLE, token, whole
from peers import PEERS, Missing, Setting
from ports import free_ports

PREFILL_S, LEFT_AFTER_S = 4.0, 0.5
CASES = ("after headers", "before headers", "mid-decode", "not a stream")
STATUSES = (429, 503, 500)
COLD_S, HIT_S = 0.5, 0.03  # of a question about a document of 20,000 tokens, on an H200
WORDS = "the reservoir feeds the turbines evenly while the river rises and falls with rain "


@dataclass
class Fleet:
    """Two backends that behave as `mode` names."""

    mode: str = "whole"
    calls: int = 0
    here: int = 0
    most: int = 0
    closed: list[float] = field(default_factory=list)
    asked: dict[str, Counter[int]] = field(default_factory=dict)

    async def serve(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    writer.write(whole(MODELS))
                    continue
                body = await read_body(head, reader)
                self.calls += 1
                self.here += 1
                self.most = max(self.most, self.here)
                try:
                    if await self._answer(port, body, reader, writer):
                        return
                finally:
                    self.here -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, port: int, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; True if the connection must be closed."""
        if self.mode.isdigit():
            text = b'{"error":{"message":"no","type":"x","param":null,"code":null}}'
            head = f"HTTP/1.1 {self.mode} X\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
            return False
        if self.mode in CASES:
            if self.mode in ("after headers", "mid-decode"):
                writer.write(STREAM_HEAD)
            left = asyncio.ensure_future(reader.read())
            at = perf_counter()
            while not left.done() and perf_counter() - at < PREFILL_S:
                if self.mode == "mid-decode":
                    writer.write(token(int(1e6 * (perf_counter() - at))))
                await asyncio.wait({left}, timeout=0.02)
            if not left.done():  # the first token, or the answer: some notice only now
                writer.write(whole(WHOLE) if self.mode == "not a stream" else token(1))
                await asyncio.wait({left}, timeout=2.0)
            self.closed.append(perf_counter() if left.done() else float("inf"))
            left.cancel()
            return True
        if self.mode == "documents":
            at = body.find(b"DOC-")
            counts = self.asked.setdefault(body[at : at + 8].decode(), Counter())
            counts[port] += 1
            await asyncio.sleep(COLD_S if counts[port] == 1 else HIT_S)
        elif self.mode == "slow":
            await asyncio.sleep(1.0)
        if b'"stream":true' in body or b'"stream": true' in body:
            writer.write(STREAM_HEAD + token(0) + STREAM_TAIL)
        else:
            writer.write(whole(WHOLE))
        return False


async def read_body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    if b"content-length:" in head:
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


async def leave(port: int, fleet: Fleet, case: str) -> float:
    """Seconds from when the client has gone until the backend knows; inf for not at all."""
    fleet.mode, fleet.closed, calls = case, [], fleet.calls
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat(400, stream=None if case == "not a stream" else (100, 1)))
    while fleet.calls == calls:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(LEFT_AFTER_S)
    at = perf_counter()
    writer.transport.abort()
    while not fleet.closed:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return fleet.closed[0] - at


async def hits(port: int, fleet: Fleet, status: int, count: int = 10) -> float:
    """Backend requests for each client request, when every backend rejects all."""
    fleet.mode, before = str(status), fleet.calls
    for _ in range(count):
        client = Client(port)
        with suppress(Broken, TimeoutError):
            await client.ask(chat(400, stream=(5, 0)), 20.0)
        client.close()
    return (fleet.calls - before) / count


def question(document: int, number: int) -> bytes:
    """About a document of 80 KB that begins with its name."""
    text = f"DOC-{document:04d} " + WORDS * 1_000 + f" question {number}"
    body = f'{{"model":"mock","stream":true,"max_tokens":1,"messages":[{{"role":"user","content":"{text}"}}]}}'  # noqa: E501
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def documents(port: int, fleet: Fleet, asked: Sequence[int], at_once: int) -> Fleet:
    fleet.mode, fleet.asked = "documents", {}
    client, left = Client(port), iter(enumerate(asked))

    async def worker() -> None:
        for number, document in left:
            await client.ask(question(document, number))

    await asyncio.gather(*(worker() for _ in range(at_once)))
    client.close()
    return fleet


def majority(counts: Sequence[Counter[int]]) -> float:
    return sum(max(c.values()) for c in counts) / max(1, sum(c.total() for c in counts))


def share(counts: Counter[int]) -> str:
    return "/".join(str(n) for n in sorted(counts.values())) if len(counts) > 1 else "all on one"


async def status_of(port: int, request: bytes) -> int:
    """Once the whole answer is there: its connection is asked to close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"host:", b"connection: close\r\nhost:", 1))
    answer = await reader.read()
    writer.close()
    return int(answer[9:12])


async def eight(folder: Path, fleet: Fleet, backends: Sequence[int], *, stream: bool) -> str:
    """24 at once to a Forebay whose backends take four each, with room for four to wait."""
    port, admin_port = free_ports(2)
    listed = "".join(f"  - {{url: 'http://127.0.0.1:{b}', max_concurrency: 4}}\n" for b in backends)
    config = folder / "eight.yaml"
    config.write_text(
        f"backends:\n{listed}buckets:\n  - {{name: chat, up_to: 5000, max_queue: 4, "
        "max_wait: 500ms}\n"
    )
    command = [sys.executable, "-m", "forebay.proxy", "proxy", "--config", str(config),
               "--port", str(port), "--admin-port", str(admin_port)]  # fmt: skip
    log = folder / "eight.log"
    fleet.mode = "whole"
    with running(command, None, log):
        await serving(port, log)
        fleet.mode, fleet.most = "slow", 0
        body = chat(200, stream=(1, 0) if stream else None)
        statuses = Counter(await asyncio.gather(*(status_of(port, body) for _ in range(24))))
    return f"{statuses[200]} x 200, {statuses[429]} x 429, {fleet.most} at once"


async def measure(name: str, folder: Path) -> list[str]:
    port, side_port, *backends = free_ports(4)
    fleet, cells = Fleet(), list[str]()
    servers = [
        await asyncio.start_server(partial(fleet.serve, b), "127.0.0.1", b) for b in backends
    ]
    log = folder / "router.log"
    try:
        # One router for each group: what one finds out must not colour the next.
        for group in ("leave", "documents", *STATUSES):
            fleet.mode = "whole"
            setting = Setting(port, side_port, tuple(backends), folder)
            with running(list(PEERS[name].command(setting)), None, log):
                await serving(port, log)
                if group == "leave":
                    for case in CASES:
                        took = await asyncio.wait_for(leave(port, fleet, case), 30)
                        cells.append("never" if took > 1e3 else f"{took:.3f}")
                elif group == "documents":
                    dice = Random(0)
                    found = await documents(
                        port, fleet, [dice.randrange(16) for _ in range(160)], 4
                    )
                    cells.append(f"{majority(list(found.asked.values())):.3f}")
                    found = await documents(port, fleet, [99] * 96, 32)
                    cells.append(share(found.asked["DOC-0099"]))
                    mix = [
                        98 if dice.random() < 0.5 else 20 + dice.randrange(16) for _ in range(144)
                    ]
                    found = await documents(port, fleet, mix, 16)
                    cold = [c for n, c in found.asked.items() if n != "DOC-0098"]
                    cells.append(f"{majority(cold):.3f}, {share(found.asked['DOC-0098'])}")
                else:
                    cells.append(f"{await hits(port, fleet, int(group)):.1f}")
        if name == "forebay":
            cells += [await eight(folder, fleet, backends, stream=s) for s in (True, False)]
        else:
            cells += ["-", "-"]
    finally:
        for server in servers:
            server.close()
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--routers", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    titles = [*(f"{case}, s" for case in CASES), "16 documents: majority", "one hot, 32 at once",
              "half hot: cold majority, hot", *(f"{s}: hits a request" for s in STATUSES),
              "limit of 8: streams", "whole answers"]  # fmt: skip
    print("| router | " + " | ".join(titles) + " |\n" + "| --- " * (len(titles) + 1) + "|")
    bad = 0
    for name in options.routers:
        with tempfile.TemporaryDirectory() as temporary:
            try:
                cells = uvloop.run(measure(name, Path(temporary)))
            except (Missing, Broken, OSError, TimeoutError) as error:
                print(f"| {name} | not measured: {type(error).__name__}: {error} |", flush=True)
                bad += name == "forebay"
                continue
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        if name == "forebay":
            bad += any(cell == "never" or float(cell) >= 0.05 for cell in cells[:4])
            bad += any(float(cell) > 1.1 for cell in cells[7:10])
            bad += any("8 x 200" not in cell or "8 at once" not in cell for cell in cells[10:])
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
