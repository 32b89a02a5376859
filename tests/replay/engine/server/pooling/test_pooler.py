"""Embeddings, rerankings and scores against answers recorded from vLLM 0.32.0, and its schemas.

The recorded server was a vLLM for the CPU with a small Llama, once with --convert embed and once
with --convert classify. Its vectors are cut to two numbers.
"""

import base64
import json
import math
import struct
import subprocess
from typing import Any

import pytest
import wire
from engine_stage import Client, get, on_server, post
from paths import ROOT
from vllm_server import needed_vllm_python

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import RunningEngine
from forebay.traces.errors import InputError

RECORDED = [
    json.loads(line) for line in (ROOT / "tests/data/pooling.jsonl").read_text().splitlines()
]
HIDDEN = 4096
EMBEDDINGS = "/v1/embeddings"
FEW = {"input": ["Hello world", "Hi"]}
CHECK = """
import json, sys
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse
from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse
kinds = {"embedding": EmbeddingResponse, "rerank": RerankResponse, "score": ScoreResponse}
for kind, answer in json.load(sys.stdin):
    assert kinds[kind].model_validate(answer).model_dump() == answer, (kind, answer)
print("equal")
"""


def asked(convert: str, *questions: tuple[str, Any], **engine: Any) -> list[wire.Answer]:
    async def scene(engine: RunningEngine, client: Client) -> list[wire.Answer]:
        return [
            await wire.ask(client, get(path) if body is None else post(path, body))
            for path, body in questions
        ]

    given = {"max_model_len": 4096, "enable_request_id_headers": False, **engine}
    answers: list[wire.Answer] = on_server(scene, convert=convert, **given)
    return answers


def answers(convert: str, *questions: tuple[str, Any], **engine: Any) -> list[Any]:
    return [json.loads(answer.body) for answer in asked(convert, *questions, **engine)]


def shape(value: Any) -> Any:
    """Names and kinds of all fields, in their order."""
    if isinstance(value, dict):
        return [(name, shape(field)) for name, field in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize("convert", ["embed", "classify"])
def test_answers_are_those_of_vllm(convert: str) -> None:
    mine = [recorded for recorded in RECORDED if recorded["convert"] == convert]
    assert len(mine) > 20
    told = asked(convert, *((recorded["path"], recorded["body"]) for recorded in mine))
    for recorded, answer in zip(mine, told, strict=True):
        assert answer.status.startswith(f"{recorded['status']} "), recorded
        body, theirs = json.loads(answer.body), recorded["answer"]
        if "error" in theirs:
            same_error(body["error"], theirs["error"])
        else:
            assert shape(body) == shape(theirs), recorded
            if "messages" not in recorded["body"] and not chats(recorded["body"]):
                assert body.get("usage") == theirs.get("usage"), recorded


def chats(body: dict[str, Any]) -> bool:
    """True for chats, whose template is another one here."""
    value = body.get("input")
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def same_error(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert the same error. Of several validation errors, the simulated server reports one."""
    assert (ours["type"], ours["code"]) == (theirs["type"], theirs["code"])
    said = theirs["message"]
    if "validation error" in said:
        assert ours["message"].startswith("1 validation error:")
    elif "MultiModalParam" in said:
        assert ours["message"].startswith("MultiModalParam is not supported for ")
    else:
        assert ours["message"] == said
        assert ours["param"] == theirs["param"]


def test_an_embedding_has_length_1_and_depends_on_its_text_only() -> None:
    one, again, base = answers(
        "embed",
        (EMBEDDINGS, FEW),
        (EMBEDDINGS, {"input": "Hi"}),
        (EMBEDDINGS, {**FEW, "encoding_format": "base64"}),
    )
    vectors = [item["embedding"] for item in one["data"]]
    assert [len(vector) for vector in vectors] == [HIDDEN, HIDDEN]
    assert all(abs(math.hypot(*vector) - 1) < 1e-6 for vector in vectors)
    assert again["data"][0]["embedding"] == vectors[1] != vectors[0]
    packed = base64.b64decode(base["data"][0]["embedding"])
    assert list(struct.unpack(f"<{HIDDEN}f", packed)) == vectors[0]


def test_embeddings_as_bytes_tell_their_places_in_a_header() -> None:
    places, bare = asked(
        "embed",
        (EMBEDDINGS, {**FEW, "encoding_format": "bytes", "embed_dtype": "float16"}),
        (EMBEDDINGS, {**FEW, "encoding_format": "bytes_only", "endianness": "big"}),
    )
    told = json.loads(places.headers["metadata"])
    assert list(told) == ["id", "created", "model", "data", "usage"]
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert told["data"][1] == {
        "index": 1, "embed_dtype": "float16", "endianness": "native", "start": 2 * HIDDEN,
        "end": 4 * HIDDEN, "shape": [HIDDEN],
    }  # fmt: skip
    assert len(places.body) == 4 * HIDDEN
    assert "metadata" not in bare.headers
    assert len(struct.unpack(f">{2 * HIDDEN}f", bare.body)) == 2 * HIDDEN


def test_equal_texts_score_highest_and_rank_first() -> None:
    documents = ["a b c d", "Hello world", "other"]
    ranked, cut, scored = answers(
        "embed",
        ("/v1/rerank", {"query": "Hello world", "documents": documents}),
        ("/rerank", {"query": "Hello world", "documents": documents, "top_n": 1}),
        ("/score", {"text_1": "Hello world", "text_2": documents}),
    )
    scores = [item["score"] for item in scored["data"]]
    assert scores[1] == pytest.approx(1.0)
    assert max(abs(scores[0]), abs(scores[2])) < 0.2
    assert [item["relevance_score"] for item in ranked["results"]] == sorted(scores, reverse=True)
    assert ranked["results"][0]["document"] == {"text": "Hello world", "multi_modal": None}
    assert [item["index"] for item in cut["results"]] == [1]


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    fits, cut, refused = asked(
        "embed",
        (EMBEDDINGS, {"input": "a" * 4 * 4096}),
        (EMBEDDINGS, {"input": "a" * 4 * 5000, "truncate_prompt_tokens": -1}),
        (EMBEDDINGS, {"input": "a" * (4 * 4096 + 1)}),
    )
    assert json.loads(fits.body)["usage"]["prompt_tokens"] == 4096
    assert json.loads(cut.body)["usage"]["prompt_tokens"] == 4096
    assert refused.status.startswith("400 ")
    assert b"at least 4097 input tokens" in refused.body


def test_pooled_prompts_hit_the_prefix_cache_and_generate_nothing() -> None:
    text = {"input": "x" * 4 * 320}
    *_, metrics = asked("embed", (EMBEDDINGS, text), (EMBEDDINGS, text), ("/metrics", None))
    told = metrics.body.decode()
    for line in (
        'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 288.0',
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 640.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0',
        'vllm:request_generation_tokens_sum{engine="0",model_name="tiny"} 0.0',
    ):
        assert line in told.splitlines()


def test_a_server_of_text_has_none_of_these_paths() -> None:
    paths = [EMBEDDINGS, "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"]
    for answer in asked("none", *((path, {"input": "x"}) for path in paths)):
        assert (answer.status, answer.body) == ("404 Not Found", b'{"detail":"Not Found"}')


def test_a_full_queue_rejects_embeddings_too() -> None:
    async def scene(engine: RunningEngine, client: Client) -> wire.Answer:
        return await wire.ask(client, post(EMBEDDINGS, FEW))

    answer = on_server(scene, fault="reject", convert="embed")
    assert answer.status.startswith("503 ")


def test_wrong_conversions_name_the_remedy() -> None:
    with pytest.raises(InputError, match="--convert rank: give one of none, embed, classify"):
        EngineConfig(convert="rank")
    with pytest.raises(InputError, match=r"--convert embed: .* leave --speculative-config out"):
        EngineConfig(
            convert="embed",
            speculative_config='{"method":"ngram","num_speculative_tokens":3}',
            acceptance=0.5,
        )


def test_the_fields_are_those_of_vllms_schemas() -> None:
    """A field too many, too few or of another kind would not survive the schema unchanged."""
    python = needed_vllm_python()
    pair = {"query": "Hello", "documents": ["a", "b"], "top_n": 1}
    texts = {"text_1": "Hello", "text_2": ["a", "b"]}
    floats, encoded, ranked, scored = answers(
        "embed",
        (EMBEDDINGS, {"input": ["Hello", "Hi"]}),
        (EMBEDDINGS, {"input": [1, 2, 3], "encoding_format": "base64"}),
        ("/rerank", pair),
        ("/score", texts),
    )
    ranked_pairs, scored_pairs = answers("classify", ("/v2/rerank", pair), ("/v1/score", texts))
    told: list[tuple[str, Any]] = [
        ("embedding", floats), ("embedding", encoded), ("rerank", ranked),
        ("rerank", ranked_pairs), ("score", scored), ("score", scored_pairs),
    ]  # fmt: skip
    done = subprocess.run(
        [python, "-W", "ignore", "-c", CHECK],
        input=json.dumps(told), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.endswith("equal\n")
