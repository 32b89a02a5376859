"""The study `needle`: does a model find a fact at any depth of a long prompt?

Only a real model can answer. A simulated engine generates meaningless words, so the study then
only checks that the prompts arrive whole, and states that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.analysis.charts.heat_map import heat_map
from forebay.analysis.experiments.asking import ModelReply, ask, count_tokens, is_simulated
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Gpus, Lengths, Seed, Study, integers, shares, study
from forebay.analysis.experiments.systems import PROXY, SimWay
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.target import ask_served, parse_targets
from forebay.replay.send.http.client import Client
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.workload import with_blocks
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.prompts.needle import (
    NeedleAnswer,
    generated_haystack,
    load_haystack,
    needle_requests,
)
from forebay.traces.tokens import ByteEstimate, TokenCounter, counter

HELP = """A number hidden in a long text and a question about it: the share of right
answers.

Tries a grid of prompt lengths and depths of the hidden sentence. On a simulated
engine answers have no meaning, so only the arrival of whole prompts is checked.

Example:  forebay experiment needle --target http://127.0.0.1:8000 --out runs/needle
"""
MARGIN = 1.1  # extra length of a generated haystack, whose tokens are estimated
APART_S = 60.0  # virtual time between questions, so that no question waits for another
TEMPLATE_TOKENS = 64  # room for a chat template
COLUMNS = (
    Column("length", "length", "count"),
    Column("depth", "depth", "text"),
    Column("questions", "questions", "count"),
    Column("recall", "right", "share"),
    Column("whole", "arrived whole", "share"),
    Column("prompt_tokens", "prompt tokens", "count", shown=False),
    Column("refused", "not answered", "count", shown=False),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One question. `right` is None on a simulated engine, `whole` where it is unknown."""

    answer: NeedleAnswer
    right: bool | None
    whole: bool | None
    prompt_tokens: int | None
    error: str | None = None


@study("needle")
def command(
    options: Study,
    lengths: Lengths = "4k,16k,32k,64k",
    depths: Annotated[
        str, typer.Option(help="Positions of the hidden sentence, 0 to 1.")
    ] = "0,0.25,0.5,0.75,1",
    questions: Annotated[int, typer.Option(min=1, help="Questions for each length and depth.")] = 1,
    output_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 32,
    haystack: Annotated[
        list[Path] | None,
        typer.Option(help="Text around it: .jsonl, a text per line; default: generated."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tiktoken encoding that counts lengths, or estimate.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    gpus: Gpus = 2,
    seed: Seed = 0,
) -> None:
    tokens, places = integers(lengths, "--lengths"), shares(depths, "--depths")
    if endpoint not in PATHS:
        raise InputError(f"--endpoint {endpoint}: give {' or '.join(PATHS)}")

    def prompts(room: int | None, count: TokenCounter) -> list[tuple[TraceRequest, NeedleAnswer]]:
        fitting = [n for n in tokens if room is None or n + output_tokens + TEMPLATE_TOKENS <= room]
        if not fitting:
            raise InputError(
                f"--lengths {lengths}: none fits the target's {room} tokens of context"
            )
        # One text serves all lengths, so it must suffice for the longest prompt.
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
        (target,) = options.targets
        if target.startswith(SIM):
            config = options.engine(target)
            way = SimWay(PROXY, Scenario(config, gpus), target, watched=False)
            answers = await in_virtual_time(way, prompts(config.context, ByteEstimate()))
        else:
            count = counter(tokenizer) if tokenizer else counter()
            answers = await by_url(options, prompts, count, endpoint)
        # Lengths beyond the target's context were left out, and the result counts them.
        left_out = len(tokens) - len({question.answer.haystack_tokens for question in answers})
        settings = options.settings(seed=seed)
        return result(target, answers, left_out, settings)

    options.finish(work())


async def in_virtual_time(
    way: SimWay, prompts: Sequence[tuple[TraceRequest, NeedleAnswer]]
) -> list[Answered]:
    """Check that each prompt reaches an engine through the proxy with all its tokens."""
    (load,) = await way.play("needle", [with_blocks(row) for row, _ in prompts])
    return [
        Answered(answer, None, seen.prompt_tokens == row.input_tokens, seen.prompt_tokens)
        for (row, answer), seen in zip(prompts, load.seen, strict=True)
    ]


async def by_url(
    options: Study, prompts: Any, count: TokenCounter, endpoint: str
) -> list[Answered]:
    """Ask the questions one by one, grouped by haystack, so that each is prefilled once."""
    (address,) = parse_targets(options.targets)
    async with Client(
        Clock(options.time_scale), first_token_timeout_s=60, stall_timeout_s=60,
        api_key=options.api_key,
    ) as client:  # fmt: skip
        session = client.session
        served = await ask_served(session, [address], options.model)
        answers = []
        for row, answer in prompts(served.max_model_len, count):
            text = row.text or ""
            tokens = await count_tokens(session, address, served.model, text)
            reply = await ask(session, address, served.model, text, row.output_tokens, endpoint)
            answers.append(judged(answer, reply, tokens))
    if all(question.error for question in answers):
        raise StudyFailed(f"{address.base}: no question was answered ({answers[0].error})")
    return answers


def judged(answer: NeedleAnswer, reply: ModelReply, tokens: int | None) -> Answered:
    """Judge an answer. A prompt is whole if the server counted at least its `tokens`."""
    if reply.error is not None:
        return Answered(answer, False, None, None, reply.error)
    whole = None
    if tokens is not None and reply.prompt_tokens is not None:
        whole = reply.prompt_tokens >= tokens
    right = None if is_simulated(reply.text) else answer.found_in(reply.text)
    return Answered(answer, right, whole, reply.prompt_tokens)


def result(
    target: str, answers: Sequence[Answered], left_out: int, settings: dict[str, Any]
) -> Result:
    simulated = all(question.right is None for question in answers if question.error is None)
    rows = _rows(answers, simulated)
    right = sum(question.right is True for question in answers)
    facts: dict[str, Any] = {
        "questions": len(answers),
        "right": None if simulated else right,
        "arrived_whole": sum(question.whole is True for question in answers),
        "simulated": simulated,
    }
    words = _simulated(answers) if simulated else _sentence(rows, answers, right)
    columns = [c for c in COLUMNS if c.key != "recall" or not simulated]
    plot, notes = _plot(rows, simulated), _notes(answers, left_out)
    return Result("needle", target, words, columns, rows, facts, plot, notes, settings)


def _notes(answers: Sequence[Answered], left_out: int) -> list[str]:
    notes = []
    if left_out > 0:
        notes.append(f"{left_out} lengths were skipped: longer than the target's context")
    errors = sorted({question.error for question in answers if question.error})
    if errors:
        notes.append(f"not answered: {', '.join(errors)}")
    if any(question.whole is None and question.error is None for question in answers):
        notes.append("–: the target has no /tokenize, so prompt lengths could not be checked")
    return notes


def _plot(rows: Sequence[dict[str, Any]], simulated: bool) -> str:
    key, title = "recall", "right answers"
    if simulated:
        key, title = "whole", "prompts that arrived whole (simulated engine)"
    cells = {(row["length"], float(row["depth"])): row[key] for row in rows}
    lengths, depths = sorted({n for n, _ in cells}), sorted({d for _, d in cells})
    return heat_map(cells, lengths, depths, "prompt tokens", "depth", title)


def _rows(answers: Sequence[Answered], simulated: bool) -> list[dict[str, Any]]:
    """One row for each length and depth, shortest prompts first."""
    cells: dict[tuple[int, float], list[Answered]] = {}
    for question in answers:
        cells.setdefault((question.answer.haystack_tokens, question.answer.depth), []).append(
            question
        )
    return [_row(cell, length, depth, simulated) for (length, depth), cell in sorted(cells.items())]


def _row(of: Sequence[Answered], length: int, depth: float, simulated: bool) -> dict[str, Any]:
    arrivals = [question.whole for question in of if question.whole is not None]
    counted = [question.prompt_tokens for question in of if question.prompt_tokens is not None]
    return {
        "length": length,
        "depth": f"{depth:g}",
        "questions": len(of),
        "recall": None if simulated else sum(question.right is True for question in of) / len(of),
        "whole": sum(arrivals) / len(arrivals) if arrivals else None,
        "prompt_tokens": max(counted, default=None),
        "refused": sum(question.error is not None for question in of),
    }


def _simulated(answers: Sequence[Answered]) -> str:
    whole = sum(question.whole is True for question in answers)
    longest = max(question.answer.haystack_tokens for question in answers)
    words = "A simulated engine answers at random, so recall has no meaning here; "
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
        f"; the shortest prompt with a miss has {missed[0]['length']:,} tokens, the worst cell is "
        f"depth {worst['depth']} at {worst['length']:,} tokens ({worst['recall']:.0%})"
    )
    cut = sum(question.whole is False for question in answers)
    return f"{words}; {cut} prompts did not arrive whole." if cut else f"{words}."
