"""The generation endpoints: read a body, run a request in the engine, write the answer."""

import asyncio
import time
from contextlib import suppress
from itertools import count
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
    Chunks,
    ServedAnswer,
    WholeAnswer,
    ending_of,
    text_between,
)
from forebay.replay.engine.server.api_errors import EngineApiError, bad_value, unavailable
from forebay.replay.engine.server.dialects.apis import Api
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.protocol import Call, check_length, read_json
from forebay.replay.engine.server.streams import Collected, TokenStream
from forebay.replay.engine.tokenizer import Generation, OutputBlocks

HEADERS = {"Server": "uvicorn", "Vary": "Origin"}
JSON = {**HEADERS, "Content-Type": "application/json"}
EVENTS = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
MAX_ID_BYTES = 512  # longest X-Request-Id of a client: a longer id is cut


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
        self._engine_ids = count(1)  # two concurrent requests may have the same client id

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
        # Reject a prompt that no engine could take before the answer starts.
        loop, config = self._loop, self._config
        call = api.read(body, served_name=config.served_name)
        check_length(call.prompt, config.context)
        if why := loop.unavailable():
            raise unavailable(why)
        answer = ServedAnswer(
            call,
            self._answer_id(http, call.request_id, api.kind),
            int(time.time()),
            self._origin,
            self._whole_blocks(call),
        )
        generation = Generation(call.prompt, config.seed or 0)
        if not call.stream:
            collected = Collected()
            request = self._request(call, generation, arrival_s, collected)
            await self._run(api, http, call, request)
            if collected.error is not None:
                raise collected.error
            sink = request.sink
            text = text_between(generation, 0, sink.produced, sink.reason)
            cached = max(0, request.cached_tokens)
            whole = WholeAnswer(answer, text, sink.produced, cached, sink.reason)
            return web.Response(body=api.whole(whole), headers=self.with_request_id(http, JSON))
        # vLLM, too, sends the status before the first token.
        response = web.StreamResponse(headers=self.with_request_id(http, EVENTS))
        writer = await response.prepare(http)
        chunks = api.chunks(answer)
        stream = self._stream(http, call, chunks, generation)
        if opening := chunks.opening():
            stream.write(stream.frame(opening))
        request = self._request(call, generation, arrival_s, stream)
        try:
            await self._run(api, http, call, request)
        except EngineApiError as error:
            # The second admission check comes after the status line: an error inside a 200.
            await response.write(error.event() + DONE)
        else:
            if stream.closing_events:
                if writer is not None:
                    await writer.drain()
                stream.write(stream.closing_events)
        await response.write_eof()
        return response

    async def _run(self, api: Api, http: web.Request, call: Call, request: EngineRequest) -> None:
        """Pass a request through the API server into the engine, and wait for its end.

        If the handler is cancelled, the engine drops the request.
        """
        loop, sink = self._loop, request.sink
        rank = rank_of(http, len(loop.loops)) if api.takes_rank else None
        request.process = await loop.receive(call.prompt.tokens, text=call.prompt.text)
        if why := loop.unavailable():
            raise unavailable(why)
        loop.add(request, rank)
        commenting = None
        interval_s = self._options.sse_keep_alive_interval
        if interval_s and isinstance(sink, TokenStream):
            commenting = asyncio.create_task(self._comment(request, sink, interval_s))
        try:
            await sink.done
        finally:
            loop.abort(request)
            if commenting is not None:
                commenting.cancel()
                with suppress(asyncio.CancelledError):
                    await commenting

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
        size = self._config.kv_budget.layout.block_size
        return call.prompt.tokens // size * size if self._config.enable_prefix_caching else 0

    def _request(
        self, call: Call, generation: Generation, arrival_s: float, sink: Sink
    ) -> EngineRequest:
        config, prompt = self._config, call.prompt
        size = config.kv_budget.layout.block_size
        ending = ending_of(call, generation, config.context - prompt.tokens)
        content = OutputBlocks(prompt, generation, size, call.cache_salt)
        request = EngineRequest(
            str(next(self._engine_ids)),
            prompt.tokens,
            ending.tokens,
            prompt.block_hashes(size, call.cache_salt),
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

    def _stream(
        self, http: web.Request, call: Call, chunks: Chunks, generation: Generation
    ) -> TokenStream:
        stream = TokenStream(
            http.protocol,
            chunks,
            generation,
            chat=call.chat,
            plain=not (call.continuous_usage and call.include_usage),
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
