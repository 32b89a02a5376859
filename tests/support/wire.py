"""HTTP answers with their varying parts masked, and recordings of real answers to compare."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

HEX_ID = re.compile(r"^(cmpl|chatcmpl|modelperm)-[0-9a-f]{16}$")
ALWAYS_MASKED = {"created", "system_fingerprint", "root", "prompt_tokens", "total_tokens"}
TOKENIZER = {"tokens", "token_strs", "count", "prompt"}  # of /tokenize: other tokens than theirs
GENERATED = {"text", "content"}


@dataclass(frozen=True)
class Question:
    """One request. `body` is sent as it stands."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


@dataclass(frozen=True)
class Answer:
    """One response. Header names are lower-case."""

    status: str
    headers: dict[str, str]
    body: bytes


async def ask(client: aiohttp.ClientSession, question: Question) -> Answer:
    async with client.request(
        question.method,
        question.path,
        data=question.body,
        headers=question.headers,
        skip_auto_headers=("Content-Type",),
    ) as response:
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(f"{response.status} {response.reason}", headers, await response.read())


def read_question(line: str, files: Mapping[str, object]) -> Question:
    """The request of a `### request: curl ...` line. `files` are bodies named with @."""
    words = shlex.split(line.partition("curl ")[2])
    url, headers, body = words[0], {}, None
    for flag, value in zip(words[1::2], words[2::2], strict=True):
        if flag == "-H":
            name, _, text = value.partition(": ")
            headers[name] = text
        elif flag == "-d":
            body = json.dumps(files[value]).encode() if value in files else value.encode()
        else:
            raise ValueError(f"{flag} in {line}")
    path = "/" + url.split("/", 3)[3]
    return Question("GET" if body is None else "POST", path, headers, body)


def read_answer(text: str) -> Answer:
    """The answer that begins with `HTTP/1.1 ...`."""
    head, _, body = text.partition("HTTP/1.1 ")[2].partition("\n\n")
    status, *lines = head.split("\n")
    headers = dict(line.split(": ", 1) for line in lines)
    data = body.encode()
    if "content-length" in headers:  # may be too large: names in recordings were shortened
        data = data[: int(headers["content-length"])].rstrip(b"\n")
    return Answer(status, headers, data)


def masked(answer: Answer, exact: bool = True) -> list[str]:
    """Status, headers and body, one line each, as far as clients may rely on them.

    `exact`: the number of generated tokens is known beforehand.
    """
    headers = dict(answer.headers)
    for name in ("date", "content-length"):
        if name in headers:
            headers[name] = "*"
    if re.fullmatch(r"[0-9a-f]{32}", headers.get("x-request-id", "")):
        headers["x-request-id"] = "*"
    lines = [answer.status, *sorted(f"{name}: {value}" for name, value in headers.items()), ""]
    if headers.get("content-type", "").startswith("text/event-stream"):
        return lines + masked_events(answer.body, exact)
    return lines + ([masked_json(answer.body.decode(), exact)] if answer.body else [])


def masked_events(body: bytes, exact: bool = True) -> list[str]:
    """Events in order. Token events count once, because chunks are not tokens."""
    events: list[str] = []
    for event in body.decode().strip("\n").split("\n\n"):
        kind, _, data = event.partition(": ")
        line = f"{kind}: {data if data == '[DONE]' else masked_json(data, exact)}"
        if not (events and line == events[-1] and '"finish_reason": null' in line):
            events.append(line)
    return events


def without_tokens(events: list[str]) -> list[str]:
    """The same without plain token events, for an answer that had none."""
    plain = ('"delta": {"content": "*"}', '"text": "*"')
    is_plain = [any(p in e for p in plain) and '"finish_reason": null' in e for e in events]
    return [event for event, drop in zip(events, is_plain, strict=True) if not drop]


def masked_json(text: str, exact: bool = True) -> str:
    """Keys in their order, types, and every value that does not differ from run to run."""
    value = json.loads(text)
    if text == json.dumps(value, separators=(",", ":"), ensure_ascii=False):
        style = "compact"
    else:
        style = "spaced" if text == json.dumps(value) else "other"
    exact = exact and ends_by_length(value)
    return f"{style} {json.dumps(mask(value, exact), ensure_ascii=False)}"


def ends_by_length(answer: dict[str, Any]) -> bool:
    """True if the number of tokens is known. After a "stop" or for a single event it is not."""
    choices = answer.get("choices") or []
    return all(choice.get("finish_reason") == "length" for choice in choices)


def mask(value: Any, exact: bool, key: str = "", role: bool = False) -> Any:
    if isinstance(value, dict):
        if "total_tokens" in value:
            total = value["prompt_tokens"] + value["completion_tokens"]
            assert value["total_tokens"] == total
        return {k: mask(v, exact, k, "role" in value) for k, v in value.items()}
    if value is None:
        return None
    if key == "id" and isinstance(value, str):
        return HEX_ID.sub(r"\1-*", value)
    if key in GENERATED and isinstance(value, str):
        return "" if role and not value else "*"
    if key in ALWAYS_MASKED or key in TOKENIZER or (key == "completion_tokens" and not exact):
        return "*"
    if key == "finish_reason" and value == "stop":
        return "length"  # which of the two it is depends on the model
    if isinstance(value, list):
        return [mask(item, exact, key) for item in value]
    return value
