"""Servers, and the proxy itself, behind a gateway that puts a path in front of everything."""

import pytest
from stages.proxy_stage import Call, RawBackend, answer, by_request, error_of, stage

from forebay.proxy.config.checks import checked_base_url


async def under_a_path(call: Call) -> None:
    """A vLLM behind a gateway: it knows no path without the prefix."""
    method, target = call.head.split(" ")[:2]
    assert target.startswith("/a/b-c/"), target
    if method == "GET":
        found = target in ("/a/b-c/health", "/a/b-c/metrics")
        await call.send(answer(200 if found else 404, b""))
    else:
        await by_request(call)


@pytest.mark.parametrize("slash", ["", "/"])
async def test_a_server_under_a_path(slash: str) -> None:
    async with RawBackend(under_a_path).running() as backend:
        async with stage([f"{backend.url}/a/b-c{slash}"]) as on:
            for path in ("/v1/completions", "/v1/embeddings", "/tokenize?x=1"):
                assert await on.status({"prompt": "x"}, path=path) == 200
            assert b"[DONE]" in await on.read({"prompt": "x", "stream": True})
        targets = [call.head.split(" ")[1] for call in backend.calls]
        assert "/a/b-c/health" in targets
        assert "/a/b-c/tokenize?x=1" in targets


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("https://h/team-a/", "https://h/team-a"),
        ("https://h/x/y.z", "https://h/x/y.z"),
    ],
)
def test_paths_of_servers(url: str, checked: str) -> None:
    assert checked_base_url(url) == checked


@pytest.mark.parametrize("path", ["/v1", "/team/v1/", "/a/../b", "/a%2f", "//a", "/a?b", "/a b"])
def test_paths_that_no_server_has(path: str) -> None:
    with pytest.raises(ValueError, match=r"with no path of vLLM|is not a plain path"):
        checked_base_url(f"http://h:1{path}")


async def test_the_public_side_under_a_path() -> None:
    async with RawBackend().running() as backend:
        listen = {"port": 0, "admin_port": 0, "path_prefix": "/llm"}
        async with stage([backend.url], listen=listen) as on:
            assert await on.status(path="/llm/v1/completions?a=1") == 200
            assert backend.calls[-1].head.startswith("POST /v1/completions ")
            assert await on.status({"input": "x"}, path="/llm/v1/embeddings?a=1") == 200
            assert backend.calls[-1].head.startswith("POST /v1/embeddings?a=1 ")
            assert await on.status_of(on.url + "/llm/health") == 200
            seen = len(backend.calls)
            for path in ("/v1/completions", "/llmv1/completions", "/llm", "/llm/llm/v1/chat"):
                async with on.post(path=path) as response:
                    assert response.status == 404
                    assert "/llm/v1/completions" in (await error_of(response))["message"]
            async with on.post(b"{", path="/llm/v1/messages") as response:
                assert (await response.json())["type"] == "error"
            assert len(backend.calls) == seen
