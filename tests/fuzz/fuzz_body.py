"""Fuzz the body reader: `make fuzz`, or python tests/fuzz/fuzz_body.py -max_total_time=60."""

import json
import sys

import atheris

with atheris.instrument_imports(
    include=["forebay.proxy.http1.server.client_body", "forebay.proxy.api.body"]
):
    from invariants import check_body, check_prompt, cut

HEADERS = ("content-encoding", "expect", "content-type")

KEYS = ["prompt", "messages", "role", "content", "text", "tools", "tool_calls", "max_tokens",
        "max_completion_tokens", "stream", "model", "type", "image_url", "n",
        "documents", "reasoning", "chat_template_kwargs"]  # fmt: skip


def value(given: atheris.FuzzedDataProvider, depth: int = 0) -> object:
    """JSON of the shapes that requests have, and near them."""
    match given.ConsumeIntInRange(0, 6 if depth < 4 else 4):
        case 0:
            return given.ConsumeUnicodeNoSurrogates(40) * given.ConsumeIntInRange(0, 20)
        case 1:
            return given.ConsumeInt(9)
        case 2:
            return given.ConsumeBool()
        case 3:
            return None
        case 4:
            return given.ConsumeRegularFloat()
        case 5:
            return [value(given, depth + 1) for _ in range(given.ConsumeIntInRange(0, 4))]
    return {given.PickValueInList(KEYS): value(given, depth + 1)
            for _ in range(given.ConsumeIntInRange(0, 5))}  # fmt: skip


def one(data: bytes) -> None:
    given = atheris.FuzzedDataProvider(data)
    match given.ConsumeIntInRange(0, 2):
        case 0:
            chat = given.ConsumeBool()
            check_prompt(given.ConsumeBytes(given.remaining_bytes()), chat)
            return
        case 1:
            chat = given.ConsumeBool()
            fields = {given.PickValueInList(KEYS): value(given) for _ in range(4)}
            check_prompt(json.dumps(fields).encode(), chat)
            return
    headers = [
        (HEADERS[given.ConsumeIntInRange(0, 2)], given.ConsumeUnicode(12))
        for _ in range(given.ConsumeIntInRange(0, 3))
    ]
    cuts = [given.ConsumeIntInRange(0, 400) for _ in range(given.ConsumeIntInRange(0, 6))]
    stated, taken = given.ConsumeBool(), given.ConsumeIntInRange(0, 300)
    body = given.ConsumeBytes(given.remaining_bytes())
    check_body(cut(body, cuts), headers, len(body) if stated else None, taken)


atheris.Setup(sys.argv, one)
atheris.Fuzz()
