"""Make sessions of coding agents: long contexts that grow a little each turn.

Each turn sends the whole context again, and adds the answer and the result of a tool. So nearly the
whole prompt is a cached prefix. Some sessions start sub-agents, which share their own instruction.
The session continues when its last sub-agent has ended. A context over the limit is compacted: it
starts again with the instruction and a summary.

The defaults match vLLM's AgentX post (2026-09-08, quoted in vllm-project/vllm#57103): a median of
43 turns a session, of about 142k input and 444 output tokens a request, more than 96 % of tokens
cached, sub-agents in 44 % of sessions. Pauses between an answer and the next turn are as in
vllm-project/router#285: 86.5 % below 1 s, 95.1 % below 10 s. The spreads are assumptions.

A trace has set times, so a turn arrives when its last answer should have ended (`answer_s`). A
slower engine gets turns too early.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import exp, log
from random import Random
from typing import Annotated, Final

import typer

from forebay.traces.ground.command_line.options import a_time
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.synth.arrivals import check_rate, check_seconds, check_share
from forebay.traces.synth.documents import Instruction, check_tokens
from forebay.traces.synth.lengths import Length, Lognormal, OutputTokens, Uniform, a_length

PAUSES_S: Final = ((0.865, 0.05, 1.0), (0.951, 1.0, 10.0), (1.0, 10.0, 120.0))
"""Up to this share of pauses, least and most seconds. The logarithm is even between them."""
FIRST_TOKEN_S: Final = 1.0  # time for about 3,500 new tokens after 142k on an H200
TOKEN_S: Final = 0.012  # time for each output token


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSessions:
    """Settings of a Poisson stream of sessions.

    All sessions share an instruction (tools and system prompt), and sub-agents another of this
    length. A session or a sub-agent starts with a task after it. A session starts sub-agents at
    most once. A context that is too long is compacted to the instruction and a summary.
    """

    session_rate_per_s: Annotated[
        float, typer.Option("--session-rate", help="sessions that begin a second")
    ] = 0.01
    task_tokens: Annotated[Length, a_length("--task-tokens", "what a session begins with: ")] = (
        field(default=Lognormal(96_000.0, 0.5, 1_024, 180_000))
    )
    tool_tokens: Annotated[Length, a_length("--tool-tokens", "new input of each turn: ")] = field(
        default=Lognormal(1_700.0, 1.0, 32, 30_000)
    )
    output_tokens: OutputTokens = field(default=Lognormal(444.0, 0.8, 8, 8_000))
    subagent_share: Annotated[
        float, typer.Option(help="share of sessions with sub-agents, 0 to 1")
    ] = 0.44
    context_tokens: Annotated[int, typer.Option(help="a longer context is compacted")] = 262_144
    summary_tokens: Annotated[int, typer.Option(help="what is left of a compacted context")] = (
        49_152
    )
    instruction_tokens: Instruction = 13_312
    duration_s: Annotated[float, a_time("length of the trace", "--duration")] = 1_800.0
    seed: int = 0
    # Requests of a session, sub-agents at once, their tasks and their requests.
    turns: Length = field(default=Lognormal(43, 0.8, 2, 400))
    subagents: Length = field(default=Uniform(1, 3))
    subagent_task_tokens: Length = field(default=Lognormal(4_000, 1.0, 256, 40_000))
    subagent_turns: Length = field(default=Lognormal(10, 0.6, 2, 60))


def agent_sessions(spec: AgentSessions) -> Iterator[TraceRequest]:
    """Make the requests of `spec`, in order of arrival.

    Raises:
        InputError: a setting that makes no traffic, named as the option of `traces synth`.
    """
    check_rate(spec.session_rate_per_s, "--session-rate")
    check_tokens("--instruction-tokens", spec.instruction_tokens, least=0)
    check_share(spec.subagent_share, "--subagent-share")
    least = 2 * (spec.instruction_tokens + spec.summary_tokens)
    check_tokens("--context-tokens", spec.context_tokens, least=least)
    check_seconds(spec.duration_s, "--duration")
    return _requests(spec)


def answer_s(output_tokens: int) -> float:
    """Return the expected seconds of an answer."""
    return FIRST_TOKEN_S + TOKEN_S * output_tokens


def _requests(spec: AgentSessions) -> Iterator[TraceRequest]:
    starts = Random(f"{spec.seed}:arrivals")
    sessions = _Sessions(spec)
    pending: list[tuple[float, int, TraceRequest]] = []
    numbers = count()
    start_s = 0.0
    while start_s <= spec.duration_s:
        for row in sessions.session(start_s):
            heappush(pending, (row.arrival_s, next(numbers), row))
        start_s += starts.expovariate(spec.session_rate_per_s)
        while pending and pending[0][0] < min(start_s, spec.duration_s):
            yield heappop(pending)[2]


class _Context:
    """The prompt of one agent: an instruction that others share, and blocks of its own."""

    def __init__(self, root: tuple[int, ...], first_block: int, tokens: int) -> None:
        self.root = root
        self.first_block = first_block
        self.tokens = len(root) * BLOCK_TOKENS + tokens

    def blocks(self, partial: int) -> tuple[int, ...]:
        """Return the block ids. `partial` is the id of the last block if it is not full."""
        own = self.tokens // BLOCK_TOKENS - len(self.root)
        blocks = self.root + tuple(range(self.first_block, self.first_block + own))
        return (*blocks, partial) if self.tokens % BLOCK_TOKENS else blocks


class _Sessions:
    """Makes one session after another, each with all its requests."""

    def __init__(self, spec: AgentSessions) -> None:
        self._spec = spec
        self._dice = Random(f"{spec.seed}:sessions")
        self._numbers = count()
        self._next_block = 0
        roots = -(-spec.instruction_tokens // BLOCK_TOKENS)
        self._root = self._fresh(roots)
        self._subagent_root = self._fresh(roots)

    def session(self, start_s: float) -> list[TraceRequest]:
        """Make the requests of one session and its sub-agents, in no order."""
        spec, dice = self._spec, self._dice
        name = f"session-{next(self._numbers)}"
        turns = spec.turns.draw(dice)
        spawns = dice.randrange(turns) if dice.random() < spec.subagent_share else -1
        context = self._new(self._root, spec.task_tokens.draw(dice))
        return self._agent(context, name, name, start_s, turns, spawns)

    def _agent(
        self, context: _Context, name: str, session: str, at_s: float, turns: int, spawns: int = -1
    ) -> list[TraceRequest]:
        """Make the requests of an agent, and of the sub-agents that start after turn `spawns`."""
        spec, dice = self._spec, self._dice
        rows: list[TraceRequest] = []
        for turn in range(turns):
            row = self._turn(context, f"{name}-{turn}", session, at_s)
            rows.append(row)
            at_s = self._after(row)
            if turn == spawns:
                for number in range(spec.subagents.draw(dice)):
                    inner = self._new(self._subagent_root, spec.subagent_task_tokens.draw(dice))
                    inner_turns = spec.subagent_turns.draw(dice)
                    place = f"{name}-{turn}-{number}"
                    subagent = self._agent(inner, place, session, at_s, inner_turns)
                    rows += subagent
                    at_s = max(at_s, self._after(subagent[-1]))
            context = self._grown(context, row)
        return rows

    def _new(self, root: tuple[int, ...], tokens: int) -> _Context:
        # Ids for the largest context, so that they are one range.
        first = self._fresh(-(-self._spec.context_tokens // BLOCK_TOKENS) + 1)[0]
        return _Context(root, first, tokens)

    def _grown(self, context: _Context, row: TraceRequest) -> _Context:
        context.tokens += row.output_tokens + self._spec.tool_tokens.draw(self._dice)
        if context.tokens > self._spec.context_tokens:
            return self._new(context.root, self._spec.summary_tokens)
        return context

    def _turn(self, context: _Context, name: str, session: str, at_s: float) -> TraceRequest:
        return TraceRequest(
            id=name,
            arrival_s=round(at_s, 6),
            input_tokens=context.tokens,
            output_tokens=self._spec.output_tokens.draw(self._dice),
            blocks=context.blocks(self._fresh(1)[0]),
            session=session,
        )

    def _after(self, row: TraceRequest) -> float:
        """Draw the arrival of the turn after `row`, in seconds."""
        share, below = self._dice.random(), 0.0
        for upto, least_s, most_s in PAUSES_S:
            if share < upto:
                pause_s = least_s * exp(log(most_s / least_s) * (share - below) / (upto - below))
                break
            below = upto
        return row.arrival_s + answer_s(row.output_tokens) + pause_s

    def _fresh(self, blocks: int) -> tuple[int, ...]:
        start = self._next_block
        self._next_block += blocks
        return tuple(range(start, self._next_block))
