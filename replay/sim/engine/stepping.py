"""Run `EngineCore` as an engine of the fleet, computing every step: the reference.

This is slow and simple. `SkippingEngine` must give the same times. Options that it cannot simulate,
such as scheduling policies other than fcfs, run here.
"""

from math import inf
from typing import Final

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.engine.request import SimRequest
from forebay.traces.ground.errors import InputError

MOST_PREEMPTIONS: Final = 50_000
"""Preemptions without a token between them. A workload that ends has far fewer."""


class SteppingEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.core = new_core(config)
        self.kv_tokens = self.core.kv_tokens
        self._at = inf
        self._stepping = False
        self._preempted = 0  # preemptions up to the last token

    @property
    def steps(self) -> int:
        return self.core.steps

    @property
    def busy_s(self) -> float:
        return self.core.busy_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second in the present step."""
        return self.core.tokens_per_s if self._stepping else 0.0

    @property
    def streams(self) -> int:
        """Requests that get a token from the present step."""
        return self.core.streams if self._stepping else 0

    @property
    def preemptions(self) -> int:
        return self.core.preemptions

    def add(self, request: SimRequest, now: float) -> None:
        self.core.add(engine_request(request, now, self.core.limits.block_size))
        if not self._stepping and self._at == inf:
            self._at = now  # the step starts after all arrivals of this instant

    def next_at(self) -> float:
        return self._at

    def advance(self, now: float) -> tuple[list[SimRequest], list[SimRequest]]:
        """End the current step, if there is one, and start the next, if there is work.

        Raises:
            InputError: the engine preempts and admits the same requests forever.
        """
        firsts: list[SimRequest] = []
        finished: list[SimRequest] = []
        if self._stepping:
            # End the step. A workload that goes on without a token never ends.
            result = self.core.finish_step()
            if result.outputs:
                self._preempted = self.core.preemptions
            elif self.core.preemptions > self._preempted + MOST_PREEMPTIONS:
                raise InputError(self._endless())
            ended = set(map(id, result.finished))
            # In the order of the server: first requests that continue, then requests that end.
            continuing = [request for request in result.outputs if id(request) not in ended]
            for served in (*continuing, *result.finished):
                request: SimRequest = served.sink
                if served.output_tokens == 1:
                    request.first_token_s = now
                    request.cached_tokens = max(0, served.cached_tokens)
                    firsts.append(request)
                else:
                    request.stall_s = max(request.stall_s, now - served.last_token_s)
                served.last_token_s = now
            for served in result.finished:
                served.sink.finished_s = now
                served.sink.preemptions = served.preemptions
                finished.append(served.sink)
        # Start the next step.
        self._stepping = self.core.has_work
        self._at = now + self.core.start_step(now) if self._stepping else inf
        return firsts, finished

    def _endless(self) -> str:
        config = self.core.config
        return (
            f"--scheduling-policy {config.scheduling_policy}: the engine preempts and admits the "
            "same requests forever, as vLLM's rules have it where "
            f"{self.kv_tokens} tokens of KV cache are too few; leave the option out, or raise "
            "--gpu-memory-utilization or --num-gpu-blocks-override"
        )


def engine_request(request: SimRequest, arrival_s: float, block_size: int) -> EngineRequest:
    """Convert `request` to a request of `EngineCore`, whose sink it becomes."""
    hashes = (
        hashes_of_ids(request.ids, request.block_tokens, request.prompt_tokens, block_size)
        if request.ids
        else []
    )
    return EngineRequest(
        request.id,
        request.prompt_tokens,
        request.output_target,
        hashes,
        arrival_s=arrival_s,
        priority=request.priority,
        sink=request,
    )
