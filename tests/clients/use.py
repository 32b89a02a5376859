"""Clients that people have, pointed at a base URL: each must work unchanged.

    python use.py http://127.0.0.1:8080/v1 MODEL

Runs in the virtual environment that `make clients` builds, not in the project's own.
"""

import asyncio
import json
import sys

import aiohttp
import anthropic
import openai
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

QUESTION = "Say something."


def openai_python(base_url: str, model: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="k", max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    answer = client.chat.completions.create(**asked)
    assert answer.usage.completion_tokens == 6, answer.usage
    events = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    response = client.responses.create(model=model, input=QUESTION, max_output_tokens=6)
    assert response.usage.output_tokens == 6, response.usage
    assert model in [entry.id for entry in client.models.list()]


def anthropic_python(base_url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="k", max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    assert client.messages.create(**asked).usage.output_tokens == 6
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().usage.output_tokens == 6


def langchain(base_url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=base_url, api_key="k", model=model, max_tokens=6, max_retries=0, stream_usage=True
    )
    answer = chat.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 6, answer.usage_metadata
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks)
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == 6, usage
    assert len(chat.batch([QUESTION] * 4)) == 4


def llama_index(base_url: str, model: str) -> None:
    for is_chat_model in (True, False):
        llm = OpenAILike(
            api_base=base_url, api_key="k", model=model, max_tokens=6, max_retries=0,
            is_chat_model=is_chat_model,
        )  # fmt: skip
        assert llm.complete(QUESTION).text
        assert list(llm.stream_complete(QUESTION))[-1].text
    chat = OpenAILike(
        api_base=base_url, api_key="k", model=model, max_tokens=6, max_retries=0, is_chat_model=True
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert chat.chat(messages).message.content
    assert list(chat.stream_chat(messages))[-1].message.content


async def vllm_bench(base_url: str, model: str) -> None:
    """Send and read as `vllm bench serve` does: raw lines, usage in the last event."""
    async with aiohttp.ClientSession(trust_env=True, read_bufsize=10 * 1024**2) as session:
        for path, prompt in (
            ("/completions", {"prompt": QUESTION}),
            ("/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
        ):
            payload = {
                "model": model, "temperature": 0.0, "max_tokens": 6, "stream": True,
                "ignore_eos": True, "stream_options": {"include_usage": True}, **prompt,
            }  # fmt: skip
            headers = {"Authorization": "Bearer k", "x-request-id": "bench-1"}
            text, usage, done = "", None, False
            async with session.post(base_url + path, json=payload, headers=headers) as response:
                assert response.status == 200
                async for line in response.content:
                    line = line.strip()
                    if not line or line.startswith(b":"):
                        continue
                    data = line.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        done = True
                        continue
                    event = json.loads(data)
                    if choices := event.get("choices"):
                        text += choices[0].get("text") or choices[0]["delta"].get("content") or ""
                    usage = event.get("usage") or usage
            assert done
            assert text
            assert usage["completion_tokens"] == 6


if __name__ == "__main__":
    base_url, model = sys.argv[1:]
    openai_python(base_url, model)
    anthropic_python(base_url, model)
    langchain(base_url, model)
    llama_index(base_url, model)
    asyncio.run(vllm_bench(base_url, model))
    print("openai, anthropic, langchain, llama-index and vllm bench's client: all work")
