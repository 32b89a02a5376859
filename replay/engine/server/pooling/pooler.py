"""Serve embeddings, rerankings and scores: prompts that end with their prefill."""

import asyncio
import json
import struct
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
from aiohttp import web

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.ranks import EngineRanks
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.api_errors import unavailable
from forebay.replay.engine.server.generation import HEADERS, JSON, Generator
from forebay.replay.engine.server.pooling.bodies import (
    Convert,
    EmbeddingCall,
    Pooled,
    ScoreCall,
    read_embeddings,
    read_rerank,
    read_score,
)
from forebay.replay.engine.server.pooling.vectors import cosine, label_of, vector_of
from forebay.replay.engine.server.streams import Collected
from forebay.replay.engine.tokenizer import Generation, OutputBlocks, Prompt

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BYTES = {**HEADERS, "Content-Type": "application/octet-stream"}


class Pooler:
    """Answers from pooled prompts. `generator` names requests, and has faults and load."""

    def __init__(self, config: EngineConfig, loop: EngineRanks, generator: Generator) -> None:
        self._config = config
        self._loop = loop
        self._generator = generator
        self._convert = cast(Convert, config.convert)

    def paths(self) -> list[tuple[str, Handler]]:
        """Return the paths that vLLM serves for this kind of model."""
        rerank, score = (
            [(path, handler) for path in paths]
            for handler, paths in (
                (self.rerank, ("/rerank", "/v1/rerank", "/v2/rerank")),
                (self.score, ("/score", "/v1/score")),
            )
        )
        if self._convert == "classify":
            return [*rerank, *score]
        return [("/v1/embeddings", self.embeddings), *rerank, *score]

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.respond(request, self._embed)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.respond(request, self._rerank)

    async def score(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.respond(request, self._score)

    async def _embed(
        self, http: web.Request, body: dict[str, Any], arrival_s: float
    ) -> web.StreamResponse:
        config = self._config
        call = read_embeddings(body, served_name=config.served_name, context=config.context)
        await self._compute(call, arrival_s)
        size = config.model_spec.hidden
        vectors = [vector_of(prompt, size) for prompt in call.prompts]
        named = self._named(http, call, "embd")
        if call.form in ("bytes", "bytes_only"):
            return await self._as_bytes(http, call, vectors, named)
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(call, vector)}
            for index, vector in enumerate(vectors)
        ]
        return self._json(http, {**named, "data": data, "usage": _usage(call)})

    async def _rerank(
        self, http: web.Request, body: dict[str, Any], arrival_s: float
    ) -> web.StreamResponse:
        call = read_rerank(body, **self._asked())
        scores = await self._scores(call, arrival_s)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {
                "index": index,
                "document": {"text": call.documents[index], "multi_modal": None},
                "relevance_score": scores[index],
            }
            for index in order[: call.top_n or None]
        ]
        named = self._named(http, call, "score")
        usage = {"prompt_tokens": call.tokens, "total_tokens": call.tokens}
        answer = {"id": named["id"], "model": named["model"], "usage": usage, "results": results}
        return self._json(http, answer)

    async def _score(
        self, http: web.Request, body: dict[str, Any], arrival_s: float
    ) -> web.StreamResponse:
        call = read_score(body, **self._asked())
        scores = await self._scores(call, arrival_s)
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        named = self._named(http, call, "score")
        return self._json(http, {**named, "data": data, "usage": _usage(call)})

    async def _scores(self, call: ScoreCall, arrival_s: float) -> list[float]:
        await self._compute(call, arrival_s)
        if self._convert == "classify":
            return [label_of(prompt) for prompt, _ in call.pairs]
        size = self._config.model_spec.hidden
        vectors = {prompt: vector_of(prompt, size) for prompt in call.prompts}
        return [cosine(vectors[first], vectors[second]) for first, second in call.pairs]

    async def _compute(self, call: Pooled, arrival_s: float) -> None:
        """Pass all prompts through the API server and the engine, and wait for their ends."""
        loop = self._loop
        if why := loop.unavailable():
            raise unavailable(why)
        text = call.prompts[0].text
        process = await loop.receive(call.tokens, text=text)
        if why := loop.unavailable():
            raise unavailable(why)
        requests = [self._request(prompt, call, arrival_s) for prompt in call.prompts]
        try:
            for request in requests:
                request.process, request.queued_s = process, loop.now()
                loop.add(request)
            await asyncio.gather(*(request.sink.done for request in requests))
        finally:
            for request in requests:
                loop.abort(request)
        for request in requests:
            if request.sink.error is not None:
                raise request.sink.error

    def _request(self, prompt: Prompt, call: Pooled, arrival_s: float) -> EngineRequest:
        """Return a request that ends with the step of its last prompt token."""
        size, salt = self._config.block_size, call.cache_salt
        return EngineRequest(
            self._generator.engine_id(),
            prompt.tokens,
            1,
            prompt.block_hashes(size, salt),
            arrival_s=arrival_s,
            priority=call.priority,
            finish_reason="stop",
            pooled=True,
            content=OutputBlocks(prompt, Generation(prompt), size, salt),
            sink=Collected(),
        )

    def _asked(self) -> dict[str, Any]:
        config = self._config
        return {
            "served_name": config.served_name,
            "context": config.context,
            "convert": self._convert,
        }

    def _named(self, http: web.Request, call: Pooled, kind: str) -> dict[str, Any]:
        """Return the first fields of an answer."""
        return {
            "id": self._generator.answer_id(http, call.request_id, kind),
            "object": "list",
            "created": int(time.time()),
            "model": call.served_name,
        }

    async def _as_bytes(
        self,
        http: web.Request,
        call: EmbeddingCall,
        vectors: list[list[float]],
        named: dict[str, Any],
    ) -> web.StreamResponse:
        """Stream the numbers, with their places in a header unless they are not wanted."""
        parts = [_packed(call, vector) for vector in vectors]
        headers = self._generator.with_request_id(http, BYTES)
        if call.form == "bytes":
            size = len(parts[0])
            items = [
                {
                    "index": index,
                    "embed_dtype": call.number,
                    "endianness": call.end,
                    "start": index * size,
                    "end": (index + 1) * size,
                    "shape": [len(vectors[0])],
                }
                for index in range(len(parts))
            ]
            del named["object"]
            usage = {"prompt_tokens": call.tokens, "total_tokens": call.tokens}
            headers = {**headers, "metadata": json.dumps({**named, "data": items, "usage": usage})}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        for part in parts:
            await response.write(part)
        await response.write_eof()
        return response

    def _json(self, http: web.Request, answer: dict[str, Any]) -> web.Response:
        headers = self._generator.with_request_id(http, JSON)
        return web.Response(body=orjson.dumps(answer), headers=headers)


def _packed(call: EmbeddingCall, vector: list[float]) -> bytes:
    return struct.pack(call.code % len(vector), *vector)


def _embedding(call: EmbeddingCall, vector: list[float]) -> list[float] | str:
    if call.form == "float":
        return vector
    return b64encode(_packed(call, vector)).decode()


def _usage(call: Pooled) -> dict[str, Any]:
    return {
        "prompt_tokens": call.tokens,
        "total_tokens": call.tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
