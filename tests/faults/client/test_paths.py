"""Paths, methods and headers that get through, and all their spellings."""

import json
from typing import Any

import pytest
from stages.proxy_stage import DONE, EVENT, USAGE, by_request, on_stage
from stages.raw_client import (
    CLOSE,
    GOOD,
    HOST,
    LAST,
    ask,
    before_oracle,
    connected,
    post,
    raw,
    responses,
)

from forebay.proxy.config.sources import load_config
from forebay.traces.ground.errors import InputError

TRAVERSAL = (
    "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/%2E%2E/sleep", "/v1/.%2e/sleep", "/v1/..%2fsleep",
    "/v1/..%5csleep", "/v1/..\\sleep", "/v1/%252e%252e/sleep", "/v1/..;/sleep", "/./v1/models",
    "/v1//models", "//v1/models", "//evil/v1/models", "///v1/models", "/v1/models/", "/v1/models/.",
    "/v1/models;x", "/v1%2fmodels", "/%761/models", "/V1/models", "/v1/models%00", "/v1/models%20",
    "/v1/models%0d%0aX:y", "/v1/models%3fx", "/v1/chat/completions/..", "/v1/completions/../models",
    "/v1/completions%2f..%2f..%2fsleep", "/", "/v1", "/.", "/..", "/%", "/v1/modelsx", "/v1/model",
)  # fmt: skip
ADMIN = (
    "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache",
    "/reset_mm_cache", "/reset_encoder_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/metrics", "/load", "/server_info", "/start_profile", "/stop_profile", "/pause", "/resume",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/invocations", "/ping", "/docs", "/redoc",
    "/openapi.json", "/inference/v1/generate", "/update_weights", "/init_weight_transfer_engine",
    "/readyz", "/healthz", "/status", "/drain", "/live",
)  # fmt: skip


async def test_nothing_else_is_reachable() -> None:
    async with before_oracle() as (on, oracle):
        for path in TRAVERSAL + ADMIN:
            for method in ("GET", "POST"):
                request = post(body=b"", path=path.encode()).replace(b"POST", method.encode(), 1)
                answer = await ask(on, request)
                assert (answer.status, answer.error["code"]) == (404, "not_found"), path
        assert not oracle.requests


async def test_a_query_goes_as_it_came() -> None:
    async with before_oracle() as (on, oracle):
        for query in (b"a=b&a=%2e%2e/%2F", b"?", b"x=/../y", b"%00", b"=&;+[]{}|^`"):
            line = b"GET /v1/models?" + query + b" HTTP/1.1\r\n"
            assert (await ask(on, line + HOST + CLOSE + b"\r\n")).status == 200, query
            assert oracle.requests[-1].target == f"/v1/models?{query.decode()}"


class TestMethods:
    @pytest.mark.parametrize(
        ("path", "allow"),
        [
            (b"/v1/chat/completions", "post, options"),
            (b"/v1/completions", "post, options"),
            (b"/v1/models", "get, post, head, options"),
            (b"/health", "get, head, options"),
        ],
    )
    async def test_others_are_refused_and_options_says_which(self, path: bytes, allow: str) -> None:
        async with before_oracle() as (on, oracle):
            for method in (b"PUT", b"DELETE", b"PATCH", b"TRACE", b"PROPFIND"):
                answer = await ask(on, post(path=path).replace(b"POST", method, 1))
                assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
                assert answer.headers["allow"] == allow
            answer = await ask(on, b"OPTIONS " + path + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
            assert (answer.status, answer.headers["allow"], answer.body) == (204, allow, b"")
            assert answer.headers["x-request-id"]
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert not oracle.requests

    async def test_options_of_the_server_and_of_nothing(self) -> None:
        async with before_oracle() as (on, _):
            answer = await ask(on, b"OPTIONS * HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
            assert (answer.status, answer.headers["allow"]) == (204, "get, head, post, options")
            answer = await ask(on, b"OPTIONS /sleep HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
            assert answer.status == 404

    @pytest.mark.parametrize("path", [b"/v1/models", b"/health"])
    async def test_head_is_get_less_the_body(self, path: bytes) -> None:
        async with before_oracle() as (on, _):
            seen = []
            for method in (b"GET", b"HEAD"):
                line = method + b" " + path + b" HTTP/1.1\r\n"
                got = await raw(on, line + HOST + CLOSE + b"\r\n")
                (answer,) = responses(got, method.decode())
                seen.append({k: v for k, v in answer.headers.items() if k != "x-request-id"})
                seen[-1].pop("date", None)
                if seen[-1].get("content-length") == "0":
                    del seen[-1]["content-length"]
                assert answer.status == 200
                assert got.endswith(b"\r\n\r\n") or method == b"GET"
            assert seen[0] == seen[1]

    @pytest.mark.parametrize("path", [b"/v1/models", b"/health"])
    async def test_get_takes_no_body(self, path: bytes) -> None:
        async with before_oracle() as (on, oracle):
            answer = await ask(on, post(path=path).replace(b"POST", b"GET", 1))
            assert answer.status == 400
            assert answer.closes
            assert not oracle.requests


class TestHeaders:
    async def test_only_allowed_ones_reach_the_backend(self) -> None:
        hostile = (
            b"Cookie: a=b", b"Proxy-Authorization: Basic x", b"Proxy-Connection: keep-alive",
            b"Keep-Alive: timeout=9", b"TE: trailers", b"Trailer: X", b"Via: 1.1 x",
            b"Upgrade: h2c", b"X-Forwarded-For: 1.2.3.4", b"Forwarded: for=1.2.3.4",
            b"X-Forwarded-Host: evil", b"X-Original-URL: /sleep", b"X-Rewrite-URL: /sleep",
            b"X-HTTP-Method-Override: GET", b"Content_Length: 5", b"Transfer_Encoding: chunked",
            b"Range: bytes=0-1", b"If-None-Match: x", b"Accept-Encoding: gzip", b"User-Agent: x",
            b"Expect: 100-continue", b"Max-Forwards: 0", b"X-Data-Parallel-Rank: 1",
            b"X-Vllm-Priority: -9",
        )  # fmt: skip
        kept = (
            b"Authorization: Bearer k", b"traceparent: 00-1", b"tracestate: a=1", b"Accept: x/y",
            b"Accept: z/z", b"Content-Type: application/json", b"X-Request-Id: my-1",
            b"X-Session-ID: s 1",
        )  # fmt: skip

        async with before_oracle() as (on, oracle):
            got = await raw(on, post(*hostile, *kept))
            assert responses(got)[-1].status == 200
            (seen,) = oracle.requests
            host, length = seen.headers.pop("host"), seen.headers.pop("content-length")
            assert (host, length) == (oracle.url.removeprefix("http://"), "33")
            assert seen.headers == {
                "authorization": "Bearer k", "traceparent": "00-1", "tracestate": "a=1",
                "accept": "x/y, z/z", "content-type": "application/json", "x-request-id": "my-1",
                "accept-encoding": "identity", "x-session-id": "s 1",
            }  # fmt: skip

    @pytest.mark.parametrize("given", [b"a b", b"", b"x" * 65, b"a\xff", b"a;b", b"../x", b"\x01"])
    async def test_an_ill_formed_request_id_is_replaced(self, given: bytes) -> None:
        async with before_oracle() as (on, oracle):
            answer = await ask(on, post(b"x-request-id: " + given))
            if answer.status == 200:
                made = answer.headers["x-request-id"]
                assert len(made) == 32
                assert oracle.requests[0].headers["x-request-id"] == made
            else:
                assert (answer.status, given) == (400, b"\x01")

    @pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
    @pytest.mark.parametrize("method", [b"GET", b"POST"])
    async def test_upgrades_are_ignored(self, protocol: bytes, method: bytes) -> None:
        headers = (
            b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHTTP2-Settings: AAAA\r\n"
        )

        async with before_oracle() as (on, oracle):
            if method == b"GET":
                request = b"GET /v1/models HTTP/1.1\r\n" + HOST + headers + b"\r\n"
            else:
                request = GOOD.replace(HOST, HOST + headers)
            (answer,) = responses(await raw(on, request + GOOD))  # and what follows is not read
            assert answer.status == 200
            assert answer.closes
            assert len(oracle.requests) == 1


class TestOldHttp:
    STREAM = b'{"prompt":"x","stream":true}'

    @pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive"])
    async def test_a_stream_to_http_1_0_is_not_chunked(self, connection: bytes) -> None:
        async with on_stage(by_request) as (on, _):
            line = b"POST /v1/completions HTTP/1.0\r\n"
            length = b"Content-Length: %d\r\n" % len(self.STREAM)
            headers = length + (connection + b"\r\n" if connection else b"")
            got = await raw(on, line + headers + b"\r\n" + self.STREAM)
            (answer,) = responses(got)
            assert answer.version == "1.0"
            assert "transfer-encoding" not in answer.headers
            assert answer.body == EVENT + EVENT + USAGE + DONE
            assert answer.closes

    async def test_whole_answers_and_keep_alive(self) -> None:
        async with before_oracle() as (on, _):
            old = LAST.replace(b"1.1", b"1.0").replace(HOST, b"")
            assert (await ask(on, old)).closes
            kept = old.replace(CLOSE, b"Connection: keep-alive\r\n")
            answers = responses(await raw(on, kept + old))
            assert [a.status for a in answers] == [200, 200]
            assert [a.closes for a in answers] == [False, True]


class TestCors:
    ORIGIN = b"Origin: https://chat.example"
    ALLOWED = {"cors_origins": ["https://chat.example", "http://localhost:3000"]}  # noqa: RUF012

    def preflight(self, *headers: bytes) -> bytes:
        lines = b"".join(header + b"\r\n" for header in headers)
        return b"OPTIONS /v1/chat/completions HTTP/1.1\r\n" + HOST + CLOSE + lines + b"\r\n"

    async def test_off_unless_configured(self) -> None:
        async with before_oracle() as (on, _):
            for request in (
                self.preflight(self.ORIGIN, b"Access-Control-Request-Method: POST"),
                post(self.ORIGIN),
                post(self.ORIGIN, path=b"/sleep"),
            ):
                names = (await ask(on, request)).headers
                assert not [n for n in names if n.startswith("access-control") or n == "vary"]

    async def test_a_listed_origin(self) -> None:
        async with before_oracle(**self.ALLOWED) as (on, _):
            wanted = (self.ORIGIN, b"Access-Control-Request-Method: POST")
            answer = await ask(on, self.preflight(*wanted))
            assert answer.status == 204
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert answer.headers["access-control-allow-methods"] == "post"
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert answer.headers["vary"] == "origin"
            for status, request in (
                (200, post(self.ORIGIN)),
                (400, post(self.ORIGIN, body=b"{")),
                (404, post(self.ORIGIN, path=b"/sleep")),
                (200, post(self.ORIGIN, body=b'{"prompt":"x","stream":true}')),
            ):
                answer = await ask(on, request)
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == "https://chat.example"
                assert answer.headers["vary"] == "origin"
                assert "access-control-allow-credentials" not in answer.headers

    @pytest.mark.parametrize(
        "origin",
        [b"https://evil.example", b"https://chat.example.evil", b"http://chat.example", b"null",
         b"https://CHAT.example", b"https://chat.example:8443", b"*", b""],
    )  # fmt: skip
    async def test_another_origin(self, origin: bytes) -> None:
        async with before_oracle(**self.ALLOWED) as (on, _):
            wanted = b"Access-Control-Request-Method: POST"
            for request in (
                self.preflight(b"Origin: " + origin, wanted),
                post(b"Origin: " + origin),
            ):
                headers = (await ask(on, request)).headers
                assert not [name for name in headers if name.startswith("access-control")]
                assert headers["vary"] == "origin"

    @pytest.mark.parametrize("origin", ["*", "chat.example", "https://x/", "https://*.x", "null"])
    def test_only_exact_origins_are_configured(self, origin: str) -> None:
        with pytest.raises(InputError, match="origin"):
            load_config(None, {"cors_origins": [origin]}, {})


async def test_parser_errors_name_a_request_id_and_quote_nothing() -> None:
    async with before_oracle() as (on, _):
        answer = await ask(on, b"GET /secret-path\x00 HTTP/1.1\r\nAuthorization: hunter2\r\n\r\n")
        error: dict[str, Any] = answer.error
        assert error["code"] == "bad_http"
        assert "hunter2" not in json.dumps(error)
        assert "secret" not in json.dumps(error)
        async with connected(on):
            pass
