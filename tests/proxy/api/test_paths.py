"""The paths that are passed on by default are those of vLLM that compute something."""

import pytest
from stages.proxy_stage import on_stage

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.config.checks import OPERATOR_PATHS
from forebay.proxy.config.paths import GENERATING, SHAPED, kept_response

NEW = ("/v2/rerank", "/v2/embed", "/generative_scoring", "/v1/completions/render",
       "/v1/chat/completions/render")  # fmt: skip


async def test_new_paths_are_passed_on_and_operators_are_not() -> None:
    async with on_stage(None) as (on, backends):
        for path in NEW:
            assert await on.status({"model": "m", "query": "x"}, path=path) == 200, path
        assert [call.head.split()[1] for call in backends[0].calls] == list(NEW)
        for path in (*OPERATOR_PATHS, *GENERATING, "/v1/responses/", "/v1/responses/a/b"):
            assert await on.status({}, path=path) == 404, path
        assert len(backends[0].calls) == len(NEW)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/responses/resp_1-a", ("resp_1-a", "GET")),
        ("/v1/responses/resp_1/cancel", ("resp_1", "POST")),
        ("/v1/responses/" + "a" * 129, ("", "")),
        ("/v1/responses/..", ("", "")),
        ("/v1/responses/a%2fb", ("", "")),
        ("/v1/responses", ("", "")),
    ],
)
def test_ids_in_paths(path: str, found: tuple[str, str]) -> None:
    assert kept_response(path) == found


def test_shaped_paths_are_those_of_the_dialects() -> None:
    assert tuple(DIALECTS) == tuple(SHAPED)
