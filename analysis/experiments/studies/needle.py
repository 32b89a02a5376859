"""The study `needle`: does a model find a fact at any depth of a long prompt?

Only a real model can answer. A simulated engine generates meaningless words, so the study then
only checks that the prompts arrive whole, and states that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
import typer

from forebay.analysis.charts.heat_map import heat_map
from forebay.analysis.experiments.result import FILLED, Column, Row
from forebay.analysis.experiments.study import Gpus, Lengths, Seed, Study, integers, shares
from forebay.analysis.experiments.systems import PROXY, SimWay
from forebay.analysis.experiments.target import SIM, StudyFailed, ask_about
from forebay.replay.clock.clock import Clock
from forebay.replay.engine.tokenizer import WORDS
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.target import Target as Address
from forebay.replay.send.http import outcome
from forebay.replay.send.http.client import Client
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.workload import with_blocks
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.prompts.needle import (
    NeedleAnswer,
    generated_haystack,
    load_haystack,
    needle_requests,
)
from forebay.traces.tokens import ByteEstimate, TokenCounter, counter

MARGIN = 1.1  # extra length of a generated haystack, whose tokens are estimated
APART_S = 60.0  # virtual time between questions, so that no question waits for another
TEMPLATE_TOKENS = 64  # room for a chat template
TIMEOUT_S = 600.0
SIMULATED_WORDS = frozenset(word.decode().strip() for word in WORDS)
LEAST_WORDS = 4  # a real model could answer with fewer of these words


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The answer of a model. `error` is set instead of `text` when the request failed."""

    text: str = ""
    prompt_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One question. `right` is None on a simulated engine, `whole` where it is unknown."""

    answer: NeedleAnswer
    right: bool | None
    whole: bool | None
    prompt_tokens: int | None
    error: str | None = None

    @property
    def cell(self) -> tuple[int, float]:
        """The prompt length and the depth."""
        return self.answer.haystack_tokens, self.answer.depth


@dataclass(kw_only=True)
class Needle(Study):
    """A number hidden in a long text and a question about it: the share of right
    answers.

    Tries a grid of prompt lengths and depths of the hidden sentence. On a simulated
    engine answers have no meaning, so only the arrival of whole prompts is checked.

    Example:  forebay experiment needle --target http://127.0.0.1:8000 --out runs/needle
    """

    NAME = "needle"
    COLUMNS = (
        Column("length", "length", "count"),
        Column("depth", "depth", "text"),
        Column("questions", "questions", "count"),
        Column("recall", "right", "share", when=FILLED),
        Column("whole", "arrived whole", "share"),
        Column("prompt_tokens", "prompt tokens", "count", shown=False),
        Column("refused", "not answered", "count", shown=False),
    )
    SETTINGS = ("seed",)

    lengths: Lengths = "4k,16k,32k,64k"
    depths: Annotated[str, typer.Option(help="Positions of the hidden sentence, 0 to 1.")] = (
        "0,0.25,0.5,0.75,1"
    )
    questions: Annotated[int, typer.Option(min=1, help="Questions for each length and depth.")] = 1
    output_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 32
    haystack: Annotated[
        list[Path] | None,
        typer.Option(help="Text around it: .jsonl, a text per line; default: generated."),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="tiktoken encoding that counts lengths, or estimate.")
    ] = None
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat"
    gpus: Gpus = 2
    seed: Seed = 0
    answers: Sequence[Answered] = field(default=(), init=False)

    async def loads(self) -> Sequence[Sequence[Answered]]:
        """Ask all questions. A load is the answers of one length and depth, shortest first."""
        self.grid()  # raises InputError before anything is asked
        if self.endpoint not in PATHS:
            raise InputError(f"--endpoint {self.endpoint}: give {' or '.join(PATHS)}")
        if self.target.startswith(SIM):
            self.answers = await self.in_virtual_time()
        else:
            self.answers = await self.by_url()
        ordered = sorted(self.answers, key=lambda answered: answered.cell)
        return [list(group) for _, group in groupby(ordered, lambda answered: answered.cell)]

    def grid(self) -> tuple[list[int], list[float]]:
        """The prompt lengths and depths. Raises InputError."""
        return integers(self.lengths, "--lengths"), shares(self.depths, "--depths")

    def prompts(
        self, room: int | None, count: TokenCounter
    ) -> list[tuple[TraceRequest, NeedleAnswer]]:
        """The questions that fit a context of `room` tokens. Raises InputError."""
        tokens, depths = self.grid()
        # The answer and the chat template need room beside the prompt.
        more = self.output_tokens + TEMPLATE_TOKENS
        fitting = [n for n in tokens if room is None or n + more <= room]
        if not fitting:
            raise InputError(
                f"--lengths {self.lengths}: none fits the target's {room} tokens of context"
            )
        if left_out := len(tokens) - len(fitting):
            self.note(f"{left_out} lengths were skipped: longer than the target's context")
        # One text serves all lengths, so it must suffice for the longest prompt.
        text = (
            load_haystack(self.haystack)
            if self.haystack
            else generated_haystack(round(max(fitting) * MARGIN), self.seed)
        )
        pairs = needle_requests(
            text,
            count,
            lengths=fitting,
            depths=depths,
            questions=self.questions,
            output_tokens=self.output_tokens,
            rate_per_s=1 / APART_S,
            seed=self.seed,
        )
        return list(pairs)

    async def in_virtual_time(self) -> list[Answered]:
        """Check that each prompt reaches an engine through the proxy with all its tokens."""
        config = self.engine_config()
        way = SimWay(PROXY, Scenario(config, self.gpus), self.target, watched=False)
        prompts = self.prompts(config.context, ByteEstimate())
        (load,) = await way.play("needle", [with_blocks(row) for row, _ in prompts])
        return [
            Answered(answer, None, seen.prompt_tokens == row.input_tokens, seen.prompt_tokens)
            for (row, answer), seen in zip(prompts, load.seen, strict=True)
        ]

    async def by_url(self) -> list[Answered]:
        """Ask the questions one by one, grouped by haystack, so that each is prefilled once."""
        count = counter(self.tokenizer) if self.tokenizer else counter()
        clock = Clock(self.time_scale)
        async with Client(
            clock, first_token_timeout_s=60, stall_timeout_s=60, api_key=self.api_key
        ) as client:
            (address,), model, about = await ask_about(client, self.targets, self.model, self.gpu)
            answers = []
            for row, answer in self.prompts(about.context, count):
                question = (client.session, address, model, row.text or "")
                tokens = await count_tokens(*question)
                reply = await ask(*question, row.output_tokens, self.endpoint)
                answers.append(judged(answer, reply, tokens))
        if all(question.error for question in answers):
            raise StudyFailed(f"{address.base}: no question was answered ({answers[0].error})")
        return answers

    @property
    def simulated(self) -> bool:
        return all(answered.right is None for answered in self.answers if answered.error is None)

    async def row(self, load: Sequence[Answered]) -> Row:
        (length, depth), right = load[0].cell, sum(question.right is True for question in load)
        arrivals = [question.whole for question in load if question.whole is not None]
        counted = [q.prompt_tokens for q in load if q.prompt_tokens is not None]
        return {
            "length": length,
            "depth": f"{depth:g}",
            "questions": len(load),
            "recall": None if self.simulated else right / len(load),
            "whole": sum(arrivals) / len(arrivals) if arrivals else None,
            "prompt_tokens": max(counted, default=None),
            "refused": sum(question.error is not None for question in load),
        }

    def sentence(self, rows: Sequence[Row]) -> str:
        answers, simulated = self.answers, self.simulated
        right = sum(question.right is True for question in answers)
        whole = sum(question.whole is True for question in answers)
        self.facts |= {
            "questions": len(answers),
            "right": None if simulated else right,
            "arrived_whole": whole,
            "simulated": simulated,
        }
        if errors := sorted({question.error for question in answers if question.error}):
            self.note(f"not answered: {', '.join(errors)}")
        self.note(
            "–: the target has no /tokenize, so prompt lengths could not be checked",
            when=any(question.whole is None and question.error is None for question in answers),
        )
        return self._words(rows, right, whole)

    def _words(self, rows: Sequence[Row], right: int, whole: int) -> str:
        """The conclusion from the numbers of right answers and of whole prompts."""
        longest, questions = rows[-1]["length"], len(self.answers)
        if self.simulated:
            words = "A simulated engine answers at random, so recall has no meaning here; "
            if whole == questions:
                return f"{words}all {whole} prompts of up to {longest:,} tokens arrived whole."
            return f"{words}only {whole} of {questions} prompts are known to have arrived whole."
        words = f"{right} of {questions} answers were right ({right / questions:.0%})"
        missed = [row for row in rows if row["recall"] < 1]
        if not missed:
            return f"{words}: the fact was found at every depth, up to {longest:,} tokens."
        worst = min(missed, key=lambda row: float(row["recall"]))
        words += (
            f"; the shortest prompt with a miss has {missed[0]['length']:,} tokens, the worst cell "
            f"is depth {worst['depth']} at {worst['length']:,} tokens ({worst['recall']:.0%})"
        )
        cut = sum(question.whole is False for question in self.answers)
        return f"{words}; {cut} prompts did not arrive whole." if cut else f"{words}."

    def plot(self, rows: Sequence[Row]) -> str:
        key, title = "recall", "right answers"
        if self.simulated:
            key, title = "whole", "prompts that arrived whole (simulated engine)"
        cells = {(row["length"], float(row["depth"])): row[key] for row in rows}
        lengths, depths = sorted({n for n, _ in cells}), sorted({d for _, d in cells})
        return heat_map(cells, lengths, depths, "prompt tokens", "depth", title)


def judged(answer: NeedleAnswer, reply: ModelReply, tokens: int | None) -> Answered:
    """Judge an answer. A prompt is whole if the server counted at least its `tokens`."""
    if reply.error is not None:
        return Answered(answer, False, None, None, reply.error)
    whole = None
    if tokens is not None and reply.prompt_tokens is not None:
        whole = reply.prompt_tokens >= tokens
    right = None if is_simulated(reply.text) else answer.found_in(reply.text)
    return Answered(answer, right, whole, reply.prompt_tokens)


async def ask(
    session: aiohttp.ClientSession,
    address: Address,
    model: str,
    prompt: str,
    output_tokens: int,
    endpoint: str,
) -> ModelReply:
    """The answer at temperature 0. Raises StudyFailed if the server is gone."""
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    status, raw = await _post(session, address, PATHS[endpoint], body)
    if status != 200:
        kind, reason = outcome.of_status(status, raw)
        return ModelReply(error=f"{status} {reason or kind}")
    try:
        reply = orjson.loads(raw)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        text = choice["message"]["content"] if endpoint == "chat" else choice["text"]
        return ModelReply(text or "", outcome.token_count(usage.get("prompt_tokens")))
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return ModelReply(error="malformed answer")


async def count_tokens(
    session: aiohttp.ClientSession, address: Address, model: str, prompt: str
) -> int | None:
    """Tokens of `prompt` without a chat template, or None if the server has no /tokenize."""
    body = {"model": model, "prompt": prompt, "add_special_tokens": False}
    status, raw = await _post(session, address, "/tokenize", body)
    if status != 200:
        return None
    try:
        return outcome.token_count(orjson.loads(raw)["count"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def is_simulated(text: str) -> bool:
    """True if `text` holds only the words that the simulated engine generates."""
    words = text.split()
    return len(words) >= LEAST_WORDS and all(word in SIMULATED_WORDS for word in words)


async def _post(
    session: aiohttp.ClientSession, address: Address, path: str, body: dict[str, Any]
) -> tuple[int, bytes]:
    try:
        async with session.post(
            address.url(path),
            data=orjson.dumps(body),
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise StudyFailed(f"{address.base}: no longer answers ({reason})") from error
