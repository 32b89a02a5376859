"""Answers with several choices: a list of prompts, n choices of each (vLLM 0.32, recorded).

Choice `n * p + c` is choice c of prompt p. Usage counts each prompt once and every choice's tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import orjson

from forebay.replay.engine.server.answers import AnswerOrigin, Chunks
from forebay.replay.engine.server.protocol import Call


def choices_of(call: Call) -> Iterator[tuple[int, Call]]:
    """Yield each choice as a request of its own, with its number among its prompt's choices."""
    for prompt in (call.prompt, *call.others):
        single = replace(call, prompt=prompt, others=(), n=1)
        for number in range(call.n):
            yield number, single


def prompt_tokens_of(call: Call) -> int:
    """Return the tokens of all prompts of a request."""
    return sum(prompt.tokens for prompt in (call.prompt, *call.others))


class ChoiceChunks(Chunks):
    """The events of one of `count` choices. The stream's own end is not among them."""

    __slots__ = ("_count",)

    done = b""

    def __init__(
        self,
        call: Call,
        answer_id: str,
        created: int,
        origin: AnswerOrigin,
        whole_blocks: int,
        index: int,
        count: int,
    ) -> None:
        super().__init__(call, answer_id, created, origin, whole_blocks, index)
        self._count = count

    def role(self) -> bytes:
        """Return the first delta of every choice, before the first token of the first choice."""
        return b"".join(map(self.role_of, range(self._count))) if self.index == 0 else b""

    def usage(self, produced: int, cached: int) -> bytes:
        return b""


def merged_answer(answers: Sequence[bytes], prompt_tokens: int) -> bytes:
    """Join answers of one choice each into the answer to all of them.

    Cached tokens are reported for the last choice, as in vLLM.
    """
    parts = [orjson.loads(answer) for answer in answers]
    merged = parts[0]
    merged["choices"] = [{**part["choices"][0], "index": index} for index, part in enumerate(parts)]
    produced = sum(part["usage"]["completion_tokens"] for part in parts)
    merged["usage"] |= {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + produced,
        "completion_tokens": produced,
        "prompt_tokens_details": parts[-1]["usage"]["prompt_tokens_details"],
    }
    return orjson.dumps(merged)
