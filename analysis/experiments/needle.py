"""The study `needle`: is a fact found, wherever it stands in a prompt of whatever length?

Only a real model can answer. A simulated engine utters meaningless words: there the study says so
and checks that the prompts arrive whole, which is all that can be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.asking import ModelReply, ask, count_tokens, is_simulated
from forebay.analysis.experiments.heat_map import heat_map
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Gpus, Seed, Study, integers, study
from forebay.analysis.experiments.target import SIM, StudyFailed, sim_config
from forebay.analysis.experiments.ways import PROXY, SimWay
from forebay.replay.bodies import PATHS
from forebay.replay.client import Client
from forebay.replay.clock import Clock
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.workload import with_blocks
from forebay.replay.target import ask_served, parse_targets
from forebay.traces.errors import InputError
from forebay.traces.needle import Answer, generated_haystack, load_haystack, needle_requests
from forebay.traces.schema import TraceRequest
from forebay.traces.tokens import ByteEstimate, TokenCounter, counter

HELP = """A number hidden in a long text, and a question about it: what share of
answers is right.

A grid of prompt length and depth of the hidden sentence (0: the beginning,
1: the end). Answers mean nothing on a simulated engine; there it is checked
that prompts arrive whole.

Example:  forebay experiment needle --target http://127.0.0.1:8000 --out runs/needle
"""
MARGIN = 1.1  # of a generated haystack, whose words are counted roughly
APART_S = 60.0  # in virtual time, so that no question waits for another
TEMPLATE_TOKENS = 64  # room for a chat template
COLUMNS = (
    Column("length", "length", "count"),
    Column("depth", "depth", "text"),
    Column("questions", "questions", "count"),
    Column("recall", "right", "share"),
    Column("whole", "arrived whole", "share"),
    Column("prompt_tokens", "prompt tokens", "count", shown=False),
    Column("refused", "refused", "count", shown=False),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One question: `right` is None on a simulated engine, `whole` where nobody can tell."""

    answer: Answer
    right: bool | None
    whole: bool | None
    prompt_tokens: int | None
    error: str | None = None


@study("needle")
def command(
    asked: Study,
    lengths: Annotated[str, typer.Option(help="Prompt tokens; k is 1,024.")] = "4k,16k,32k,64k",
    depths: Annotated[str, typer.Option(help="Of the hidden sentence.")] = "0,0.25,0.5,0.75,1",
    questions: Annotated[int, typer.Option(min=1, help="Of each length and depth.")] = 1,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, at most.")] = 32,
    haystack: Annotated[
        list[Path] | None,
        typer.Option(help="Text to hide it in: .jsonl with a text each; default: made up."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tiktoken encoding to measure lengths, or estimate.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    gpus: Gpus = 2,
    seed: Seed = 0,
) -> None:
    wanted, places = integers(lengths, "--lengths"), shares(depths, "--depths")
    if endpoint not in PATHS:
        raise InputError(f"--endpoint {endpoint}: give {' or '.join(PATHS)}")

    def prompts(room: int | None, count: TokenCounter) -> list[tuple[TraceRequest, Answer]]:
        fitting = [n for n in wanted if room is None or n + output_tokens + TEMPLATE_TOKENS <= room]
        if not fitting:
            raise InputError(f"--lengths {lengths}: none fits in the {room} tokens of the target")
        text = (
            load_haystack(haystack)
            if haystack
            else generated_haystack(round(max(fitting) * MARGIN), seed)
        )
        return list(
            needle_requests(
                text, count, lengths=fitting, depths=places, questions=questions,
                output_tokens=output_tokens, rate_per_s=1 / APART_S, seed=seed,
            )
        )  # fmt: skip

    async def work() -> Result:
        (target,) = asked.targets
        if target.startswith(SIM):
            config = sim_config(target, asked.gpu, None)
            way = SimWay(PROXY, Scenario(config, gpus), target, watched=False)
            answers = await in_virtual_time(way, prompts(config.context, ByteEstimate()))
        else:
            count = counter(tokenizer) if tokenizer else counter()
            answers = await by_url(asked, prompts, count, endpoint)
        left_out = len(wanted) - len({one.answer.haystack_tokens for one in answers})
        settings = asked.settings(seed=seed)
        return result(target, answers, left_out, settings)

    asked.finish(work())


def shares(text: str, option: str) -> list[float]:
    """`0,0.5,1` as shares, ascending. Raises InputError."""
    found = set()
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise InputError(f"{option} {text}: give shares from 0 to 1, such as 0,0.5,1")
        found.add(value)
    return sorted(found)


async def in_virtual_time(
    way: SimWay, made: Sequence[tuple[TraceRequest, Answer]]
) -> list[Answered]:
    """Whether each prompt gets through the proxy to an engine with all its tokens."""
    (load,) = await way.play("needle", [with_blocks(row) for row, _ in made])
    return [
        Answered(answer, None, seen.prompt_tokens == row.input_tokens, seen.prompt_tokens)
        for (row, answer), seen in zip(made, load.seen, strict=True)
    ]


async def by_url(asked: Study, prompts: Any, count: TokenCounter, endpoint: str) -> list[Answered]:
    """Ask the questions one by one, each haystack's together, so that it is prefilled once."""
    (address,) = parse_targets(asked.targets)
    async with Client(
        Clock(asked.time_scale), first_token_timeout_s=60, stall_timeout_s=60,
        api_key=asked.api_key,
    ) as client:  # fmt: skip
        session = client.session
        served = await ask_served(session, [address], asked.model)
        answers = []
        for row, answer in prompts(served.max_model_len, count):
            text = row.text or ""
            tokens = await count_tokens(session, address, served.model, text)
            told = await ask(session, address, served.model, text, row.output_tokens, endpoint)
            answers.append(judged(answer, told, tokens))
    if all(one.error for one in answers):
        raise StudyFailed(f"{address.base}: no question was answered ({answers[0].error})")
    return answers


def judged(answer: Answer, told: ModelReply, tokens: int | None) -> Answered:
    """Whether it is right, and whether the server counted at least the prompt's `tokens`."""
    if told.error is not None:
        return Answered(answer, False, None, None, told.error)
    whole = None
    if tokens is not None and told.prompt_tokens is not None:
        whole = told.prompt_tokens >= tokens
    right = None if is_simulated(told.text) else answer.found_in(told.text)
    return Answered(answer, right, whole, told.prompt_tokens)


def result(
    target: str, answers: Sequence[Answered], left_out: int, settings: dict[str, Any]
) -> Result:
    answered = [one for one in answers if one.error is None]
    simulated = all(one.right is None for one in answered)
    lengths = sorted({one.answer.haystack_tokens for one in answers})
    depths = sorted({one.answer.depth for one in answers})
    rows = [
        _row([a for a in answers if (a.answer.haystack_tokens, a.answer.depth) == (n, d)], n, d,
             simulated)
        for n in lengths
        for d in depths
    ]  # fmt: skip
    key = "whole" if simulated else "recall"
    title = "prompts that arrived whole (simulated engine)" if simulated else "right answers"
    plot = heat_map(
        {(row["length"], float(row["depth"])): row[key] for row in rows}, lengths, depths,
        "prompt tokens", "depth", title,
    )  # fmt: skip
    right = sum(one.right is True for one in answers)
    facts: dict[str, Any] = {
        "questions": len(answers),
        "right": None if simulated else right,
        "arrived_whole": sum(one.whole is True for one in answers),
        "simulated": simulated,
    }
    notes = []
    if left_out > 0:
        notes.append(f"{left_out} lengths do not fit in the target's context and were left out")
    errors = sorted({one.error for one in answers if one.error})
    if errors:
        notes.append(f"not answered: {', '.join(errors)}")
    if any(one.whole is None and one.error is None for one in answers):
        notes.append("–: the target has no /tokenize, so nobody can tell that a prompt was whole")
    words = _simulated(answers) if simulated else _sentence(rows, answers, right)
    columns = [c for c in COLUMNS if c.key != "recall" or not simulated]
    return Result("needle", target, words, columns, rows, facts, plot, notes, settings)


def _row(of: Sequence[Answered], length: int, depth: float, simulated: bool) -> dict[str, Any]:
    known = [one.whole for one in of if one.whole is not None]
    counted = [one.prompt_tokens for one in of if one.prompt_tokens is not None]
    return {
        "length": length,
        "depth": f"{depth:g}",
        "questions": len(of),
        "recall": None if simulated else sum(one.right is True for one in of) / len(of),
        "whole": sum(known) / len(known) if known else None,
        "prompt_tokens": max(counted, default=None),
        "refused": sum(one.error is not None for one in of),
    }


def _simulated(answers: Sequence[Answered]) -> str:
    whole = sum(one.whole is True for one in answers)
    longest = max(one.answer.haystack_tokens for one in answers)
    words = "A simulated engine answers at random, so recall means nothing here; "
    if whole == len(answers):
        return f"{words}all {whole} prompts of up to {longest:,} tokens arrived whole."
    return f"{words}only {whole} of {len(answers)} prompts are known to have arrived whole."


def _sentence(rows: Sequence[dict[str, Any]], answers: Sequence[Answered], right: int) -> str:
    words = f"{right} of {len(answers)} answers were right ({right / len(answers):.0%})"
    missed = [row for row in rows if row["recall"] < 1]
    if not missed:
        return f"{words}: the fact was found at every depth, up to {rows[-1]['length']:,} tokens."
    worst = min(missed, key=lambda row: float(row["recall"]))
    words += (
        f"; the shortest prompt with a miss has {missed[0]['length']:,} tokens, the worst is "
        f"depth {worst['depth']} of {worst['length']:,} ({worst['recall']:.0%})"
    )
    cut = sum(one.whole is False for one in answers)
    return f"{words}; {cut} prompts did not arrive whole." if cut else f"{words}."
