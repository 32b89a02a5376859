"""Print a real vLLM's reading of request bodies. Run by the interpreter that has vLLM.

A line of standard input is `{"chat": ..., "body": ...}`. For each, a line of output is null if vLLM
rejects the body, else its reading: stream, n, number of prompts and the limit of output tokens.
"""

import json
import sys
from importlib import import_module
from typing import Any


def _protocol(api: str) -> Any:
    return import_module(f"vllm.entrypoints.openai.{api}.protocol")


def reading(chat: bool, body: str) -> dict[str, Any] | None:
    """Return vLLM's reading of a body, or None if it rejects the body."""
    try:
        name = "ChatCompletionRequest" if chat else "CompletionRequest"
        model = getattr(_protocol("chat_completion" if chat else "completion"), name)
        read = model.model_validate(json.loads(body))
        prompts, limit = 1, read.max_tokens
        if chat:
            if read.max_completion_tokens is not None:
                limit = read.max_completion_tokens
        else:
            prompt = read.prompt
            if not prompt:
                return None  # an empty prompt is rejected later
            if isinstance(prompt, list) and not isinstance(prompt[0], int):
                prompts = len(prompt)
    except Exception:  # vLLM answers any of them with an error
        return None
    return {"stream": bool(read.stream), "n": read.n or 1, "prompts": prompts, "limit": limit}


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(reading(**json.loads(line))), flush=True)
