"""Compute when a request passes the API server in front of the engine, on its way in and out.

vLLM's API server is one process with one event loop, and one worker that tokenizes, regardless of
the number of requests (`--api-server-count`, `--renderer-num-workers`). So a long text delays the
requests behind it, regardless of the engine.

    in:   the event loop reads the body, then a worker tokenizes the text
    out:  before the first token the event loop decodes the whole prompt once, and meanwhile sends
          no later token of that step. Each of these takes the loop a moment

The loop serves its work in order of arrival. Streamed tokens are a steady flow (`load`), because a
step's tokens are too many to be events. A loop with more work than time falls behind. It then sends
several tokens of a stream in one chunk, which takes less work, so it falls behind by one round of
all streams only. The engine itself never waits for the API server.

The module is pure: `now` is an argument, in simulated seconds.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

BUSY_SHARE: Final = 0.44
"""Share of `request_s`: the event loop's work. The rest is the way between processes, which delays
only the request itself. 256 short requests at once took 0.75 ms each."""
MERGED_SHARE: Final = 0.375
"""Share of `stream_token_s`: the work for a token that is not the first of its chunk. 57 of 152 us
in vLLM 0.32.0 for the CPU, whose API server was stopped for 0.2 to 1 s at a time, so that its
chunks had 1 to 78 tokens."""


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Seconds of one API server.

    The defaults were measured on vLLM 0.26.0 with an H200 on 2026-11-26 (one process, texts of 4
    characters a token), `stream_token_s` on vLLM 0.32.0 for the CPU.

    Attributes:
        request_s: time from sending a short request to an idle server until the engine takes it in.
        receive_token_s: the loop's work for each prompt token before the engine has it.
        tokenize_token_s: a worker's work for each prompt token of a text. Token ids need none.
        answer_s: time from the end of an engine step until a client has the token.
        answer_token_s: the loop's work for each prompt token before the first token is sent.
        stream_token_s: the loop's work for a chunk of one token.
    """

    request_s: float = 1.7e-3
    receive_token_s: float = 0.15e-6
    tokenize_token_s: float = 2.3e-6
    answer_s: float = 1.8e-3
    answer_token_s: float = 0.85e-6
    stream_token_s: float = 125e-6

    def alone_s(self, prompt_tokens: int) -> float:
        """Return the seconds that a text spends in an idle server before and after the engine."""
        token_s = self.receive_token_s + self.tokenize_token_s + self.answer_token_s
        return self.request_s + self.answer_s + token_s * prompt_tokens


class ApiProcess:
    """One process of the API server: an event loop and workers that tokenize."""

    __slots__ = ("_at", "_backlog_s", "_load", "_round_s", "_sent_s", "_times", "_workers")

    def __init__(self, times: ServerTimes, workers: int) -> None:
        self._times = times
        self._workers = [0.0] * workers  # when each is free
        self._at = 0.0
        self._backlog_s = 0.0  # the loop's unfinished work at `_at`
        self._load = 0.0  # work of streams, seconds in a second
        self._sent_s = 0.0  # when the loop had sent the tokens of the step before
        self._round_s = inf  # the farthest that streams alone bring the loop behind

    def receive(self, prompt_tokens: int, now: float, *, text: bool = True) -> float:
        """Receive a request, and return the time at which the engine gets it."""
        times = self._times
        busy_s = BUSY_SHARE * times.request_s
        read_at = self._work(busy_s + times.receive_token_s * prompt_tokens, now)
        if text:
            workers = self._workers
            free_at = min(workers)
            if free_at > read_at:
                read_at = free_at
            read_at += times.tokenize_token_s * prompt_tokens
            workers[workers.index(free_at)] = read_at
        return read_at + times.request_s - busy_s

    def answer(self, prompt_tokens: int, now: float) -> float:
        """Send the first token, which a step produced now, and return when the client has it.

        The later tokens of other requests in that step wait for it: call this before `sent_at`.
        """
        times = self._times
        return self._work(times.answer_token_s * prompt_tokens, now) + times.answer_s

    def sent_at(self, now: float) -> float:
        """Return when the client has a later token that a step produced now."""
        self._pass(now)
        return now + self._backlog_s + self._times.answer_s

    def pause_s(self, now: float) -> float:
        """Return the pause of the streams between their last token and one produced now."""
        self._pass(now)
        return now + self._backlog_s - self._sent_s

    def load(self, tokens_per_s: float, streams: float, now: float) -> None:
        """Set the tokens a second that `streams` streams get together from now on.

        A step has ended now, and its prompts are decoded.
        """
        self._pass(now)
        self._sent_s = now + self._backlog_s
        token_s = self._times.stream_token_s
        self._load = token_s * tokens_per_s
        # In a round each stream gets one chunk, with all tokens that came during the round.
        left = 1.0 - MERGED_SHARE * self._load
        self._round_s = streams * (1.0 - MERGED_SHARE) * token_s / left if left > 0.0 else inf

    def _work(self, seconds: float, now: float) -> float:
        """Add work to the loop, and return when it is done."""
        self._pass(now)
        self._backlog_s += seconds
        return now + self._backlog_s

    def _pass(self, now: float) -> None:
        if now <= self._at:
            return
        backlog_s = self._backlog_s + (self._load - 1.0) * (now - self._at)
        if self._load > 1.0 and backlog_s > self._round_s:
            shrunk_s = self._backlog_s - (1.0 - MERGED_SHARE * self._load) * (now - self._at)
            backlog_s = max(shrunk_s, self._round_s)
        self._backlog_s = backlog_s if backlog_s > 0.0 else 0.0
        self._at = now


class ApiServer:
    """The processes of one API server. Requests go to them in turn."""

    __slots__ = ("_processes", "_turn")

    def __init__(self, times: ServerTimes, processes: int = 1, workers: int = 1) -> None:
        self._processes = [ApiProcess(times, workers) for _ in range(processes)]
        self._turn = 0

    def next_process(self) -> ApiProcess:
        """Return the process that gets the next request."""
        process = self._processes[self._turn]
        self._turn = (self._turn + 1) % len(self._processes)
        return process

    def load(self, tokens_per_s: float, streams: int, now: float) -> None:
        """Divide the streams and their tokens a second among the processes."""
        share = 1.0 / len(self._processes)
        for process in self._processes:
            process.load(share * tokens_per_s, share * streams, now)
