"""Random bodies mean the same to the proxy and to vLLM: stream, sequences, limit of the answer.

The proxy may pass on what vLLM rejects. It rejects nothing that vLLM takes, but for what `strict`
names. FOREBAY_VLLM_BODIES=100000 compares more bodies.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from body_reading import read_body
from vllm_server import needed_vllm_python

from forebay.proxy.api.body import MOST_OUTPUT_TOKENS, ParsedBody
from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.http1.errors import ApiError

BODIES = int(os.environ.get("FOREBAY_VLLM_BODIES", "5000"))
SCRIPT = Path(__file__).resolve().parents[2] / "support" / "vllm_reading.py"
NUMBERS: list[Any] = [
    0, 1, 2, 7, 128, 8192, -1, 1.0, 7.0, 7.5, "7", " 7 ", "7.0", "7e1", "1_000", "0x7", "+7", "-0",
    "", "x", 1e3, 1e300, 2**31, 2**63, 2**70, True, False, None, [], {}, "９", "7\n", "1" * 30,
]  # fmt: skip
BOOLS: list[Any] = [True, False, True, False, None, "true", "on", "1", "no", 1, 0, 2, 1.0, [], {}]
PROMPTS: list[Any] = [
    "x", "hello " * 50, ["x"], ["x", "y", "z"], [1], [1, 2, 3], [[1], [2, 3]], ["", "x"], [[], [1]],
    "", [], None, 7, {}, [1, "x"], ["x", 1], [[1], "x"], [1.0, 2.0], [True], ["7", 7], [[1.0]],
    [-1], [2**33], [[-1]], ["x", None], [None], [{}], [[["x"]]],
]  # fmt: skip
TEXT = {"type": "text", "text": "x"}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "x"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": [TEXT, TEXT]}],
    [{"role": "user", "content": ["x"]}, {"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"text": "x"}]}],
    [{"role": "user"}], [{"role": "user", "content": 7}], [{}], ["x"], "x", None, 7, {},
]  # fmt: skip
OTHER: dict[str, list[Any]] = {
    "model": ["tiny", "", None, 7, True, ["x"]],
    "n": NUMBERS,
    "max_tokens": NUMBERS,
    "max_completion_tokens": NUMBERS,
    "stream": BOOLS,
    "priority": NUMBERS,
    "cache_salt": ["x", "", None, 7],
    "stream_options": [{"include_usage": True}, None],
    "tools": [[{"type": "function", "function": {"name": "f"}}], None],
    "documents": [[{"text": "x"}], None],
    "unknown": [1, {"a": [None]}],
}


def random_body(dice: random.Random, chat: bool) -> dict[str, Any]:
    fields = {
        name: dice.choice(values)
        for name, values in OTHER.items()
        if dice.random() < 0.3 and (chat or name not in ("tools", "documents"))
    }
    sound = dice.random() < 0.7  # more than one fault in a body hides all but the first
    if chat:
        fields["messages"] = dice.choice(MESSAGES[:4] if sound else MESSAGES)
    else:
        fields["prompt"] = dice.choice(PROMPTS[:9] if sound else PROMPTS)
    return dict(dice.sample(sorted(fields.items()), len(fields)))


def strict(fields: dict[str, Any], chat: bool) -> bool:
    """Return whether the proxy may reject what vLLM's request classes take.

    A number below 2^64 is read exactly everywhere. A token id of more than 32 bits is in no
    vocabulary, so vLLM rejects it later.
    """
    limits = [fields.get(name) for name in ("max_tokens", "max_completion_tokens")[: 1 + chat]]
    numbers = (*limits, fields.get("priority"), fields.get("n"))
    odd = any(type(value) is int and value >= 1 << 64 for value in numbers)
    if not chat:
        prompt = fields["prompt"]
        ids = prompt if isinstance(prompt, list) else []
        flat = [x for one in ids for x in (one if isinstance(one, list) else [one])]
        odd |= any(type(x) is int and x >= 1 << 32 for x in flat)
    return odd


def read(body: bytes, chat: bool) -> ParsedBody | None:
    try:
        return read_body(body, CHAT if chat else COMPLETIONS)
    except ApiError:
        return None


def test_bodies_mean_the_same_to_vllm() -> None:
    dice = random.Random(f"bodies {BODIES}")
    bodies = [(number % 2 == 0, random_body(dice, number % 2 == 0)) for number in range(BODIES)]
    lines = [json.dumps({"chat": chat, "body": json.dumps(fields)}) for chat, fields in bodies]
    command = [needed_vllm_python(), "-W", "ignore", str(SCRIPT)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": ""}
    asked = "\n".join(lines)
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, env=environment, timeout=300
    )
    ready, _, answers = done.stdout.rpartition("ready\n")
    read_by_vllm = [json.loads(line) for line in answers.splitlines()]
    assert len(read_by_vllm) == BODIES, (ready, done.stderr[-2000:])
    taken = 0
    for (chat, fields), theirs in zip(bodies, read_by_vllm, strict=True):
        ours = read(json.dumps(fields).encode(), chat)
        if ours is None:
            assert theirs is None or strict(fields, chat), fields
            continue
        if theirs is None:
            continue
        taken += 1
        assert ours.streams == theirs["stream"], fields
        limit, prompts = theirs["limit"], theirs["prompts"]
        counted = getattr(ours.request, "sequences", None)  # else n alone is counted
        sequences = max(1, theirs["n"]) * (1 if counted is None else prompts)
        assert counted in (None, min(sequences, MOST_OUTPUT_TOKENS)), fields
        names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
        if any(fields.get(name) is not None for name in names):
            least = min(max(0, limit) * sequences, MOST_OUTPUT_TOKENS)
            assert ours.request.output_tokens == least, fields
    assert taken > BODIES / 5


@pytest.mark.parametrize("chat", [True, False])
def test_the_bodies_are_of_many_kinds(chat: bool) -> None:
    dice = random.Random(1)
    bodies = [random_body(dice, chat) for _ in range(2000)]
    good = [fields for fields in bodies if read(json.dumps(fields).encode(), chat)]
    assert 300 < len(good) < 1700
    streams = {fields["stream"] for fields in good if "stream" in fields}
    assert streams == {True, False, None, "true", "on", "1", "no"}  # 1 and 1.0 equal True
