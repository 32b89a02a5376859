"""SmolLM2-135M-Instruct in a real vLLM: what it says through the proxy is what it says directly.

Random weights cannot show that: their answers neither end by themselves nor find anything.
All requests come one after the other, at temperature 0, so an answer depends on its prompt alone,
and on how much of it was cached. `cache_salt` divides the prefix cache.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stages.proxy_stage import Stage, stage
from stages.vllm_stage import payloads
from vllm_server import needed_vllm_python, real_model, vllm_process

from forebay.proxy.cli import main
from forebay.proxy.core.model import ENOUGH
from forebay.traces.tokens import counter

pytestmark = [pytest.mark.timeout(580), pytest.mark.real_time]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SAYS = "The capital of France is Paris."
STORY = "Once upon a time there was a small dog who lived beside a river. " * 4
"""More than two blocks of tokens, so that a part can be cached."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python, model = needed_vllm_python(), real_model()
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with vllm_process(python, model, log, "--load-format", "auto") as running:
        yield Server(running.url, model)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer. `rest` is all of it but text, names and time."""

    text: str
    finish: tuple[Any, ...]
    usage: dict[str, Any]
    rest: Any

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def text_of(choice: dict[str, Any]) -> str:
    told = choice.get("message") or choice.get("delta") or choice
    return told.get("content") or told.get("text") or ""


async def ask(on: Stage, url: str, path: str, **fields: Any) -> Said:
    """The answer of a server, or of the proxy, at temperature 0."""
    streams = fields.get("stream")
    body = {"model": "tiny", "temperature": 0, **fields}
    if streams:
        body["stream_options"] = {"include_usage": True}
    async with on.client.post(url + path, json=body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
    if not streams:
        told = json.loads(raw)
        (choice,) = told["choices"]
        anonymous = re.sub(rb'"(id|created)":("[^"]*"|\d+)', b"", raw)
        finish = choice["finish_reason"], choice.get("stop_reason")
        return Said(text_of(choice), finish, told["usage"], anonymous)
    # How many tokens a chunk has depends on how fast the client reads.
    *chunks, last = payloads(raw)
    assert raw.endswith(b"data: [DONE]\n\n")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (end,) = [choice for choice in choices if choice["finish_reason"]]
    finish = end["finish_reason"], end.get("stop_reason")
    names = {tuple(chunk) for chunk in chunks}
    return Said("".join(map(text_of, choices)), finish, last["usage"], names)


async def twice(on: Stage, server: Server, path: str, **fields: Any) -> list[tuple[Said, Said]]:
    """The direct answer and the proxy's: nothing cached for either, then all that can be."""
    mark = time.monotonic_ns()

    async def answer(url: str) -> Said:
        return await ask(on, url, path, cache_salt=f"{mark} {url == on.url}", **fields)

    return [(await answer(server.url), await answer(on.url)) for _ in range(2)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"messages": CAPITAL}), (COMPLETION, {"prompt": STORY, "max_tokens": 10})],
    ids=["chat", "completion"],
)
async def test_answers_are_the_direct_ones(
    server: Server, path: str, fields: dict[str, Any], stream: bool
) -> None:
    async with stage([server.url]) as on:
        cold, warm = await twice(on, server, path, **fields, stream=stream)
    for direct, through in (cold, warm):
        assert through == direct
    assert [cold[1].cached, warm[1].cached > 0] == [0, True]
    if path == CHAT:  # it ends by itself
        assert (through.text, through.finish[0]) == (SAYS, "stop")
    else:
        assert (through.usage["completion_tokens"], through.finish[0]) == (10, "length")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stop_string_ends_an_answer(server: Server, stream: bool) -> None:
    fields = {"messages": CAPITAL, "stream": stream}
    async with stage([server.url]) as on:
        for included, text in ((False, "The capital of"), (True, "The capital of France")):
            wanted = {"stop": [" France", "Rome"], "include_stop_str_in_output": included}
            for direct, through in await twice(on, server, CHAT, **fields, **wanted):
                assert through == direct
            assert (through.text, through.finish) == (text, ("stop", " France"))


async def test_lengths_of_answers_that_end_by_themselves_are_learned(server: Server) -> None:
    """No client says how long. What the proxy reserves for the next answer is what they took."""
    async with stage([server.url]) as on:
        lengths = on.proxy.driver.shaper._state.output_lengths
        longest = 8_192
        assert lengths.expected("", "chat", longest) == longest
        for number in range(ENOUGH):
            said = await ask(on, on.url, CHAT, messages=CAPITAL, stream=number % 2 == 0)
            assert said.text == SAYS
        tokens = said.usage["completion_tokens"]
        assert tokens == counter(str(server.model)).count(SAYS) + 1  # and the end
        assert tokens <= lengths.expected("", "chat", longest) <= 1.25 * tokens


def find_needle(server: Server, folder: Path) -> tuple[str, str]:
    """A prompt of 4,096 tokens by the model's own tokenizer, and the number that is in it."""
    trace = folder / "needle.jsonl"
    words = ("--lengths", "4096", "--depths", "0.9", "--questions", "1", "--quiet")
    command = ["traces", "needle", *words, "--tokens", str(server.model), "-o", str(trace)]
    assert main(command) == 0
    (row,) = trace.read_text().splitlines()
    (answer,) = trace.with_name("needle.jsonl.answers.jsonl").read_text().splitlines()
    return json.loads(row)["text"], json.loads(answer)["answer"]


async def test_a_needle_is_found_or_missed_alike(server: Server, tmp_path: Path) -> None:
    prompt, number = find_needle(server, tmp_path)
    fields = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    async with stage([server.url]) as on:
        cold = await ask(on, server.url, CHAT, **fields)
        warm = [await ask(on, url, CHAT, **fields, stream=False) for url in (server.url, on.url)]
    assert warm[0] == warm[1]
    assert warm[0].cached > 4_000
    assert cold.usage["prompt_tokens"] - 4_096 in range(60)  # the chat template's tokens
    found = "found" if number in warm[1].text else "not found"
    print(f"\nneedle in 4,096 tokens: {found}: {warm[1].text!r}", file=sys.stderr)


async def test_tokens_of_traces_are_the_models(server: Server) -> None:
    """`forebay traces --tokens FOLDER` counts as vLLM does with the same folder."""
    texts = (SAYS, STORY, "1 22  333\n\n4444", "def f(x):\n    return x  # é 日本 🙂 ½", " \t 7 ")
    count = counter(str(server.model)).count
    async with stage([server.url]) as on:
        for text in texts:
            body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
            async with on.client.post(on.url + "/tokenize", json=body) as answer:
                assert (await answer.json())["count"] == count(text), text
