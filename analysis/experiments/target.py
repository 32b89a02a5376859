"""The servers that a study can measure: the simulated engine, or an OpenAI-compatible server.

A target runs a few requests at set offsets and returns the time of each token. Prompts are never
repeated, so no prompt is found in a prefix cache. The simulated target runs the engine's own
scheduler in virtual time: no socket, no sleep, the same result every time.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from forebay.replay.clock.clock import Clock
from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.calibration.play import play
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.request import EngineRequest
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.target import Target as Address
from forebay.replay.plan.target import ask_served, parse_targets
from forebay.replay.send.bodies import RequestStyle, body_slices
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.exchange import ClientExchange, ProgressWatch
from forebay.replay.send.http.measure import Latency, OutputEvents, measure
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

SIM = "sim:"
FIRST_TOKEN_S, STALL_S = 600.0, 120.0
BATCHED_TOKENS, MOST_SEQUENCES = 8192, 256


class StudyFailed(Exception):
    """The target's answers are not enough for the study. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, due `at_s` seconds after the load begins."""

    name: str
    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """The measured answer to one request. `events_s` are output times since the load began."""

    ask: Ask
    latency: Latency
    events_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    outcome: str

    @property
    def ttft_s(self) -> float:
        """TTFT since the request was sent. Raises StudyFailed if no token came."""
        if self.latency.ttft_service_s is None or self.outcome != "ok":
            raise StudyFailed(f"{self.ask.name}: {self.outcome}")
        return self.latency.ttft_service_s


@dataclass(frozen=True, slots=True)
class About:
    """Facts about a target.

    Attributes:
        model, gpu: what one GPU computes, and its data sheet. None if it is not known.
        context: longest request in tokens, None if unknown.
        salt: seeds the text of its prompts. It is random, because a second run with equal prompts
            would find them in the cache. None where prompts have no text.
    """

    name: str
    model: ModelSpec | None
    gpu: GpuSpec | None
    context: int | None
    salt: str | None = None

    def check_length(self, tokens: int, option: str) -> None:
        """Raise InputError that names `option` if a request of `tokens` exceeds the context."""
        if self.context is not None and tokens > self.context:
            raise InputError(f"{option}: {self.name} takes at most {self.context} tokens")


class SimTarget:
    """The simulated engine in virtual time. Every load starts with an empty engine."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.config = config
        self.about = About(name, config.rank_spec, config.gpu_spec, config.context)

    async def run(self, asks: Sequence[Ask], until: str | None = None) -> list[MeasuredAnswer]:
        """Answers in the order of `asks`. The answer to `until` ends all other requests."""
        events = [OutputEvents() for _ in asks]
        requests = [
            EngineRequest(str(i), ask.prompt_tokens, ask.output_tokens, arrival_s=ask.at_s)
            for i, ask in enumerate(asks)
        ]
        last = next((r for r, ask in zip(requests, asks, strict=True) if ask.name == until), None)
        play(
            new_core(self.config),
            requests,
            lambda request, at_s: events[int(request.id)].add(at_s),
            last,
        )
        return [
            _answer(ask, of, ask.at_s, len(of.at_s), 0, "ok")
            for ask, of in zip(asks, events, strict=True)
        ]


class HttpTarget:
    """An OpenAI-compatible server."""

    def __init__(
        self, client: Client, clock: Clock, address: Address, model: str, about: About
    ) -> None:
        self._client, self._clock, self._address, self._model = client, clock, address, model
        self._salt, self._sent = token_hex(8), 0
        self.about = replace(about, salt=self._salt)

    async def run(self, asks: Sequence[Ask], until: str | None = None) -> list[MeasuredAnswer]:
        """As `SimTarget.run`, over HTTP."""
        bodies = [self._body(ask) for ask in asks]
        exchanges = [
            ClientExchange(f"study-{self._sent}-{i}", ask.at_s) for i, ask in enumerate(asks)
        ]
        self._clock.restart()
        watches = [self._client.watch() for _ in asks]
        async with asyncio.TaskGroup() as tasks:
            for ask, body, exchange, watch in zip(asks, bodies, exchanges, watches, strict=True):
                others = [w for w in watches if w is not watch] if ask.name == until else []
                tasks.create_task(self._send(ask, body, exchange, watch, others))
        answers = []
        for ask, sent, watch in zip(asks, exchanges, watches, strict=True):
            given_up = watch.reason == "given up"
            outcome = "ok" if sent.outcome == "ok" or given_up else str(sent.reason or sent.outcome)
            answers.append(
                _answer(ask, sent.events, sent.sent_s, sent.output_tokens, sent.cached_tokens or 0,
                        outcome, sent.prompt_tokens)
            )  # fmt: skip
        return answers

    def _body(self, ask: Ask) -> bytes:
        self._sent += 1
        row = TraceRequest(f"{ask.name}-{self._sent}", 0.0, ask.prompt_tokens, ask.output_tokens)
        return b"".join(body_slices(row, RequestStyle(self._model, salt=self._salt)))

    async def _send(
        self,
        ask: Ask,
        body: bytes,
        exchange: ClientExchange,
        watch: ProgressWatch,
        others: list[ProgressWatch],
    ) -> None:
        await self._clock.sleep(ask.at_s - self._clock.now())
        await self._client.send(self._address.url(PATHS["completions"]), body, exchange, watch)
        for other in others:
            other.end("given up")


StudyTarget = SimTarget | HttpTarget


def _answer(ask: Ask, events: OutputEvents, sent_s: float, output: int | None, cached: int,
            outcome: str, prompt: int | None = None) -> MeasuredAnswer:  # fmt: skip
    latency = measure(ask.at_s, sent_s, 0.0, events, output)
    return MeasuredAnswer(
        ask, latency, tuple(events.at_s), prompt or ask.prompt_tokens, cached, outcome
    )


async def ask_about(
    client: Client, urls: Sequence[str], model: str | None, gpu: str | None
) -> tuple[Sequence[Address], str, About]:
    """Ask servers for the model that they serve. Raises InputError.

    Returns:
        Their addresses, the name of the model, and the facts. The model and the GPU of the facts
        are None if they are not built in, or not named.
    """
    addresses = parse_targets(urls, ", or sim:MODEL@GPU such as sim:phi-3-mini@h200-nvl")
    served = await ask_served(client.session, addresses, model)
    label = ", ".join(address.base for address in addresses)
    try:
        spec: ModelSpec | None = find_model(served.model)
    except InputError:
        spec = None
    sheet = find_gpu(gpu) if gpu else None
    return addresses, served.model, About(label, spec, sheet, served.max_model_len)


def sim_config(text: str, gpu: str | None, **flags: Any) -> EngineConfig:
    """The engine that `sim:MODEL@GPU` names. Raises InputError.

    Args:
        flags: options of `EngineConfig`. Without them a step has at most 8,192 tokens, and at most
            256 requests.
    """
    model, _, named = text.removeprefix(SIM).partition("@")
    if not model:
        raise InputError(f"--target {text}: name a model, e.g. sim:phi-3-mini@h200-nvl")
    budget = flags.get("max_num_batched_tokens") or BATCHED_TOKENS
    limits = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(MOST_SEQUENCES, budget),
    }
    return EngineConfig(model, named or gpu or "h200", **{**limits, **flags})


@asynccontextmanager
async def open_target(
    text: str,
    *,
    model: str | None = None,
    gpu: str | None = None,
    api_key: str | None = None,
    time_scale: float = 1.0,
    flags: Mapping[str, Any] | None = None,
) -> AsyncIterator[StudyTarget]:
    """Open the target that `text` names, or raise InputError. `flags` set a simulated engine."""
    if text.startswith(SIM):
        yield SimTarget(sim_config(text, gpu, **(flags or {})), text)
        return
    clock = Clock(time_scale)
    async with Client(
        clock, first_token_timeout_s=FIRST_TOKEN_S, stall_timeout_s=STALL_S, api_key=api_key
    ) as client:
        (address,), model, about = await ask_about(client, [text], model, gpu)
        target = HttpTarget(client, clock, address, model, about)
        _ = (await target.run([Ask("warm-up", 64, 4)]))[0].ttft_s  # opens the connection
        yield target
