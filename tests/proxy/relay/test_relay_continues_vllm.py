"""Two real vLLMs with SmolLM2-135M-Instruct: a stream that is killed is the direct answer.

Wires before the servers cut connections after a number of events, which costs nothing. At
temperature 0 an answer depends on its prompt alone.
"""

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
from stages.proxy_stage import Stage, stage
from stages.vllm_stage import nothing_held, payloads, running, until
from vllm_server import Running, needed_vllm_python, real_model, vllm_process

pytestmark = [pytest.mark.timeout(580), pytest.mark.real_time]
STREAMS = int(os.environ.get("FOREBAY_KILLED_STREAMS", "24"))
SECONDS = 420.0  # no stream begins later
TOKENS = 32
FEWEST_EVENTS = 4  # of an answer that is cut before its reason to finish
TASKS = (
    "Write a short poem about {}.", "List three facts about {}, one on each line.",
    "What is {}? Answer in two sentences.", "Write a Python function named {} that adds numbers.",
    "Tell a child about {}, with numbers such as 1234.5 and a quotation.",
)  # fmt: skip
TOPICS = (
    "rivers", "bread", "the moon", "a clock", "snow", "music", "ants", "gold", "a bridge", "tea",
)  # fmt: skip
PROMPTS = [task.format(topic) for task, topic in product(TASKS, TOPICS)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Running]]:
    python, model = needed_vllm_python(), real_model()
    folder = tmp_path_factory.mktemp("vllm")
    # In bfloat16 two words are often equally likely: a prefill and steps round them otherwise.
    flags = "--load-format", "auto", "--dtype", "float32"
    with vllm_process(python, model, folder / "0.log", *flags) as one, \
            vllm_process(python, model, folder / "1.log", *flags) as two:  # fmt: skip
        yield [one, two]


@dataclass(slots=True)
class Wires:
    """Connections to servers.

    Attributes:
        cuts: events after which the next connection with this request id is cut.
    """

    cuts: dict[str, int] = field(default_factory=dict)

    @asynccontextmanager
    async def to(self, target: str) -> AsyncIterator[str]:
        parts = urlsplit(target)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, there = await asyncio.open_connection(parts.hostname, parts.port)
            left = 0  # events until it is cut

            async def ask() -> None:
                nonlocal left
                while data := await reader.read(65_536):
                    if data.startswith(b"POST /v1/"):
                        (name,) = re.findall(rb"x-request-id: (\S+)", data)
                        left = self.cuts.pop(name.decode(), 0)
                    there.write(data)
                there.close()

            asking = asyncio.create_task(ask())
            with suppress(ConnectionError):
                while data := await back.read(65_536):
                    events = [match.end() for match in re.finditer(rb"data: .*\n\n", data)]
                    if 0 < left <= len(events):
                        writer.write(data[: events[left - 1]])
                        await writer.drain()
                        break
                    left = max(0, left - len(events))
                    writer.write(data)
            asking.cancel()
            for end in (writer, there):
                end.close()
                with suppress(ConnectionError):
                    await end.wait_closed()

        carrying = set[asyncio.Task[None]]()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            carrying.add(asyncio.create_task(carry(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await asyncio.gather(*carrying)


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request."""
    extra = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "stream": True,
             "stream_options": {"include_usage": True}}  # fmt: skip
    if number % 3 == 0:
        return "/v1/completions", {"prompt": PROMPTS[number], **extra}
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": PROMPTS[number]}], **extra
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """An answer without names. `events` is how many the stream had."""

    text: str
    finish: str
    prompt_tokens: int
    output_tokens: int
    events: int = field(compare=False)


async def ask(on: Stage, url: str, number: int, name: str = "direct") -> Said:
    path, body = body_of(number)
    async with on.client.post(url + path, json=body, headers={"x-request-id": name}) as answer:
        raw = await answer.read()
    assert answer.status == 200, raw
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1
    events = payloads(raw)
    assert len({event["id"] for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    (finish,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = events[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Said(text, finish, usage["prompt_tokens"], usage["completion_tokens"], len(events))


async def continued(on: Stage) -> float:
    """Number of streams that a server went on with."""
    lines = on.proxy.metrics.text().decode().splitlines()
    counts = [line for line in lines if line.startswith("forebay_streams_continued_total")]
    return sum(float(line.split()[-1]) for line in counts)


@asynccontextmanager
async def scene(servers: list[Running]) -> AsyncIterator[tuple[Stage, Wires]]:
    wires = Wires()
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(wires.to(server.url)) for server in servers]
        yield await stack.enter_async_context(stage(urls)), wires


async def test_killed_streams_are_the_direct_answers(servers: list[Running]) -> None:
    """Killed at any place, one after the other."""
    dice, until_s = random.Random(7), time.monotonic() + SECONDS
    async with scene(servers) as (on, wires):
        numbers = dice.sample(range(len(PROMPTS)), min(len(PROMPTS), max(6, STREAMS // 20)))
        asked = {number: await ask(on, servers[1].url, number) for number in numbers}
        direct = {number: said for number, said in asked.items() if said.events >= FEWEST_EVENTS}
        numbers = list(direct)
        different, killed = [], 0
        while killed < STREAMS and time.monotonic() < until_s:
            number, name = numbers[killed % len(numbers)], f"cut-{killed}"
            # The last events come at one instant: behind the reason to finish, usage is missing.
            at = wires.cuts[name] = dice.randrange(1, direct[number].events - 1)
            said = await ask(on, on.url, number, name)
            killed += 1
            if said != direct[number]:
                different.append(f"{number} cut after {at}: {said} not {direct[number]}")
        moved = await continued(on)
        await nothing_held(on)
    figures = f"{killed} killed, {moved:.0f} moved, {len(different)} differ"
    print("\n".join(["", figures, *different]), file=sys.stderr, flush=True)
    assert killed - moved <= killed / 10  # the text was complete, and so was the rest
    assert len(different) <= max(1, killed // 100)


async def test_a_server_that_is_killed_costs_its_clients_nothing(servers: list[Running]) -> None:
    """SIGKILL, with streams on it. It ends the first server."""
    async with stage([server.url for server in servers]) as on:
        direct = [await ask(on, servers[1].url, number) for number in range(4)]
        asking = [
            asyncio.create_task(ask(on, on.url, n, f"killed-{n}")) for n in range(4)
        ]  # fmt: skip

        async def runs() -> bool:
            return await running(on.client, servers[0].url) >= 1

        await until(runs)
        await asyncio.sleep(0.3)
        os.killpg(servers[0].pid, signal.SIGKILL)
        said = await asyncio.gather(*asking)
        assert await continued(on) >= 1
        await nothing_held(on)
    equal = [one == other for one, other in zip(said, direct, strict=True)]
    print(f"\n{sum(equal)} of {len(equal)} as the direct answers", file=sys.stderr, flush=True)
    # Four answers are computed in one batch, which may round otherwise than one alone.
    assert sum(equal) >= 2
