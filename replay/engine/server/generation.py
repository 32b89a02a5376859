"""The generation endpoints: read a body, run a request in the engine, write the answer."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from aiohttp import HttpVersion11, web

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.core_loop import Sink, Unavailable
from forebay.replay.engine.loop.faults import Fault
from forebay.replay.engine.loop.ranks import EngineRanks
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.answers import (
    DONE,
    AnswerOrigin,
    AnswerText,
    Chunks,
    Ending,
    WholeAnswer,
    ending_of,
)
from forebay.replay.engine.server.api_errors import EngineApiError, bad_value, unavailable
from forebay.replay.engine.server.dialects.apis import Api
from forebay.replay.engine.server.dialects.several import (
    ChoiceChunks,
    choices_of,
    merged_answer,
    prompt_tokens_of,
)
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.protocol import Call, check_length, read_json
from forebay.replay.engine.server.streams import Collected, TokenStream
from forebay.replay.engine.tokenizer import Generation, OutputBlocks

HEADERS = {"Server": "uvicorn", "Vary": "Origin"}
JSON = {**HEADERS, "Content-Type": "application/json"}
EVENTS = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
MAX_ID_BYTES = 512  # longest X-Request-Id of a client: a longer id is cut

"""Answer a request, from its body and its arrival in simulated seconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer: its request in the engine, and where its tokens go."""

    call: Call
    request: EngineRequest
    sink: Collected | TokenStream
    text: AnswerText


class Generator:
    """Serves the endpoints of `APIS`.

    Attributes:
        fault: failure of streams. None serves properly. Tests may change it at any time.
        load: number of requests being served now, for /load.
    """

    def __init__(
        self, config: EngineConfig, loop: EngineRanks, options: ServerOptions, fault: Fault | None
    ) -> None:
        self.fault = fault
        self.load = 0
        self._config = config
        self._options = options
        self._loop = loop
        self._random = Random(config.seed)
        self._origin = AnswerOrigin(
            config.served_name, config.release.wheel, options.enable_prompt_tokens_details
        )
        self._engine_ids = 0

    async def serve(self, http: web.Request, api: Api) -> web.StreamResponse:
        """Answer a request to this endpoint. An error has the form of its API."""
        self.load += 1
        arrival_s = self._loop.now()
        try:
            if self.fault is not None and self.fault.reject:
                raise unavailable(Unavailable.QUEUE_FULL)
            body = read_json(await http.read(), http.content_type)
            return await self._generate(api, http, body, arrival_s)
        except EngineApiError as error:
            headers = self.with_request_id(http, JSON)
            return web.Response(body=api.error(error), status=error.status, headers=headers)
        finally:
            self.load -= 1

    async def _generate(
        self, api: Api, http: web.Request, body: dict[str, Any], arrival_s: float
    ) -> web.StreamResponse:
        # Reject prompts that no engine could take before any choice starts.
        loop = self._loop
        call = api.read(body, served_name=self._config.served_name)
        for prompt in (call.prompt, *call.others):
            check_length(prompt, self._config.context)
        if why := loop.unavailable():
            raise unavailable(why)
        named = self._answer_id(http, call.request_id, api.kind), int(time.time())
        response = writer = None
        if call.stream:  # vLLM, too, sends the status before the first token
            response = web.StreamResponse(headers=self.with_request_id(http, EVENTS))
            writer = await response.prepare(http)
        # Run each choice as a request of its own. After a failure the engine drops the others.
        choices = [
            self._choice(http, api, call, single, index, named, arrival_s)
            for index, single in enumerate(choices_of(call))
        ]
        try:
            await self._run(choices, rank_of(http, len(loop.loops)) if api.takes_rank else None)
        except EngineApiError as error:
            if response is None:
                raise
            # The second admission check comes after the status line: an error inside a 200.
            await response.write(error.event() + DONE)
            await response.write_eof()
            return response
        finally:
            for choice in choices:
                loop.abort(choice.request)
        # End the stream, or write the collected answers in the order of the choices.
        if response is not None:
            stream, events = self._closing_events(call, named, choices)
            if events:
                if writer is not None:
                    await writer.drain()
                stream.write(events)
            await response.write_eof()
            return response
        answers = [self._whole(api, named, choice) for choice in choices]
        answer = merged_answer(answers, prompt_tokens_of(call)) if _several(call) else answers[0]
        return web.Response(body=answer, headers=self.with_request_id(http, JSON))

    def _choice(
        self,
        http: web.Request,
        api: Api,
        call: Call,
        single: tuple[int, Call],
        index: int,
        named: tuple[str, int],
        arrival_s: float,
    ) -> Choice:
        """Create choice `index`, with words and an end of its own, and open its stream."""
        number, own = single
        generation = Generation(own.prompt, (self._config.seed or 0) + number)
        ending = ending_of(own, generation, self._config.context - own.prompt.tokens)
        own = replace(own, stopped_by=ending.stopped_by)
        text = AnswerText(generation, own, ending)
        sink: Collected | TokenStream = Collected()
        if call.stream:
            common = own, *named, self._origin, self._whole_blocks(own)
            if _several(call):
                count = call.n * (1 + len(call.others))
                sink = stream = self._stream(http, own, ChoiceChunks(*common, index, count), text)
                stream.done.add_done_callback(lambda _: _write_last(stream))
            else:
                chunks = api.chunks(*common)
                sink = self._stream(http, own, chunks, text)
                if opening := chunks.opening():
                    sink.write(sink.frame(opening))
        request = self._request(own, generation, ending, arrival_s, sink)
        request.choices = call.n if number == 0 else 0
        return Choice(own, request, sink, text)

    def _whole(self, api: Api, named: tuple[str, int], choice: Choice) -> bytes:
        """Return the whole answer of one choice (EngineApiError: the engine ended it)."""
        sink = choice.sink
        assert isinstance(sink, Collected)
        if sink.error is not None:
            raise sink.error
        answer = WholeAnswer(
            choice.call,
            *named,
            self._origin,
            choice.text.between(0, sink.produced, sink.reason),
            sink.produced,
            max(0, choice.request.cached_tokens),
            sink.reason,
            self._whole_blocks(choice.call),
        )
        return api.whole(answer)

    async def _run(self, choices: Sequence[Choice], rank: int | None) -> None:
        """Pass all choices through one process of the API server, and wait for their ends.

        Args:
            rank: the engine of all choices. None: the least loaded for each.
        """
        loop, first = self._loop, choices[0]
        prompts = {id(choice.call.prompt): choice.call.prompt for choice in choices}.values()
        tokens = sum(prompt.tokens for prompt in prompts)
        process = await loop.receive(tokens, text=first.call.prompt.text)
        if why := loop.unavailable():
            raise unavailable(why)
        for choice in choices:
            choice.request.process = process
            loop.add(choice.request, rank)
        # Only a stream of one choice gets comments.
        interval_s, sink = self._options.sse_keep_alive_interval, first.sink
        if not (interval_s and isinstance(sink, TokenStream) and len(choices) == 1):
            await asyncio.gather(*(choice.sink.done for choice in choices))
            return
        commenting = asyncio.create_task(self._comment(first.request, sink, interval_s))
        try:
            await sink.done
        finally:
            commenting.cancel()
            with suppress(asyncio.CancelledError):
                await commenting

    def _closing_events(
        self, call: Call, named: tuple[str, int], choices: Sequence[Choice]
    ) -> tuple[TokenStream, bytes]:
        """Return a stream, and its framed end: usage, or the error that ended it."""
        streams = [choice.sink for choice in choices if isinstance(choice.sink, TokenStream)]
        first = streams[0]
        if not _several(call):
            return first, first.closing_events
        if any(stream.dead for stream in streams):
            return first, first.frame(unavailable(Unavailable.ENGINE_DEAD).event() + DONE)
        produced = sum(stream.produced for stream in streams)
        cached = max(0, choices[0].request.cached_tokens)
        chunks = Chunks(call, *named, self._origin, self._whole_blocks(call))
        usage = chunks.usage_of(prompt_tokens_of(call), produced, cached)
        return first, first.frame(usage + DONE)

    async def _comment(
        self, request: EngineRequest, stream: TokenStream, interval_s: float
    ) -> None:
        """Send a comment whenever the stream was silent for `interval_s` simulated seconds."""
        loop = self._loop
        last_s = loop.now()
        while True:
            last_s = max(last_s, request.last_token_s)
            left_s = last_s + interval_s - loop.now()
            if left_s > 1e-9:
                await asyncio.sleep(loop.wall_s(left_s))
            else:
                stream.comment()
                last_s = loop.now()

    def _whole_blocks(self, call: Call) -> int:
        size = self._config.block_size
        return call.prompt.tokens // size * size if self._config.enable_prefix_caching else 0

    def _request(
        self, call: Call, generation: Generation, ending: Ending, arrival_s: float, sink: Sink
    ) -> EngineRequest:
        config, prompt = self._config, call.prompt
        content = OutputBlocks(prompt, generation, config.block_size, call.cache_salt)
        request = EngineRequest(
            self._engine_id(),
            prompt.tokens,
            ending.tokens,
            prompt.block_hashes(config.block_size, call.cache_salt),
            arrival_s=arrival_s,
            priority=call.priority,
            finish_reason=ending.reason,
            max_tokens=ending.most,
            extend=content,
            content=content,
            sink=sink,
        )
        if isinstance(sink, TokenStream):
            sink.request = request
        return request

    def _engine_id(self) -> str:
        """Return a new id: two concurrent requests may have the same client id."""
        self._engine_ids += 1
        return str(self._engine_ids)

    def _stream(
        self, http: web.Request, call: Call, chunks: Chunks, text: AnswerText
    ) -> TokenStream:
        stream = TokenStream(
            http.protocol,
            chunks,
            text,
            chat=call.chat,
            plain=not (call.stop or (call.continuous_usage and call.include_usage)),
            framed=http.version >= HttpVersion11,
        )
        if self.fault is not None and self.fault.breaks_streams:
            stream.fault = self.fault.on_stream or self._kill
            stream.fault_after = self.fault.tokens
        return stream

    def _kill(self, stream: TokenStream) -> None:
        """Kill the engine and fail `stream`, which the engine may have finished already."""
        self._loop.die()
        stream.fail(Unavailable.ENGINE_DEAD)

    def _answer_id(self, http: web.Request, request_id: str | None, kind: str) -> str:
        """Return the id of an answer: the client's, in a header or the body, or a new one."""
        if kind == "resp":
            return request_id or f"resp_{self._random.getrandbits(128):032x}"
        name = http.headers.get("X-Request-Id", "")[:MAX_ID_BYTES] or request_id
        return f"{kind}-{name or f'{self._random.getrandbits(64):016x}'}"

    def with_request_id(self, http: web.Request, headers: dict[str, str]) -> dict[str, str]:
        """Return `headers`, with the request's id if --enable-request-id-headers is set."""
        if not self._config.enable_request_id_headers:
            return headers
        name = http.headers.get("X-Request-Id", "")[:MAX_ID_BYTES]
        return {**headers, "X-Request-Id": name or f"{self._random.getrandbits(128):032x}"}


def rank_of(http: web.Request, ranks: int) -> int | None:
    """Return the rank that the client chose (EngineApiError: there is no such rank)."""
    try:
        rank = int(http.headers.get("X-data-parallel-rank", ""))
    except ValueError:
        return None
    if not 0 <= rank < ranks:
        raise bad_value(f"data_parallel_rank {rank} is out of range [0, {ranks}).")
    return rank


def _several(call: Call) -> bool:
    """True if the answer has more than one choice."""
    return call.n > 1 or bool(call.others)


def _write_last(stream: TokenStream) -> None:
    """Write the last chunk of a choice. An error ends the whole stream, so it is written there."""
    if not stream.dead:
        stream.write(stream.closing_events)
