"""Put the answers that a server really gave into the history of later turns.

A turn's prompt in the trace extends the prompt and the answer of the turn before. Here the real
answer replaces it. In chat messages it is the assistant's message after the prompt. In a prompt of
block ids it is the text between the last prompt and the new text of the user or a tool. A turn that
does not extend the turn before, for example after a compaction, keeps the trace's prompt.
"""

from dataclasses import replace
from typing import Any

from forebay.replay.plan.agenda import Agenda
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import BYTES_PER_TOKEN, prompt_text


class History:
    """The prompts and answers that later turns need. Others are dropped."""

    def __init__(self, agenda: Agenda, salt: str) -> None:
        self._agenda = agenda
        self._salt = salt
        self._places = {row.id: index for index, row in enumerate(agenda.rows)}
        self._messages: dict[int, tuple[dict[str, Any], ...]] = {}
        self._prompts: dict[int, bytes] = {}
        self._answers: dict[int, str] = {}

    def ended(self, index: int, answer: str | None) -> None:
        """Record the answer to a request, None if it got no answer."""
        if answer is not None and self._agenda.followers(index):
            self._answers[index] = answer

    def row_to_send(self, index: int) -> tuple[TraceRequest, bytes | None]:
        """Return the row to send, and the text of its prompt if it is not the row's own."""
        row = self._agenda.rows[index]
        before = self._places.get(row.parent or "")
        answer = None if before is None else self._answers.get(before)
        prompt: bytes | None = None
        if before is not None and answer is not None:
            if row.messages is not None:
                row = self._with_answer(row, before, answer)
            else:
                prompt = self._continued(row, before, answer)
        if self._agenda.followers(index):
            if row.messages is not None:
                self._messages[index] = row.messages
            elif row.blocks is not None:
                self._prompts[index] = prompt or prompt_text(row, self._salt).encode()
        return row, prompt

    def _with_answer(self, row: TraceRequest, before: int, answer: str) -> TraceRequest:
        old, sent = self._agenda.rows[before].messages, self._messages.get(before)
        own = row.messages or ()
        if old is None or sent is None or own[: len(old)] != old or len(own) <= len(old):
            return row
        recorded = own[len(old)]
        if recorded.get("role") != "assistant":
            return row
        return replace(row, messages=(*sent, {**recorded, "content": answer}, *own[len(old) + 1 :]))

    def _continued(self, row: TraceRequest, before: int, answer: str) -> bytes | None:
        old, sent = self._agenda.rows[before], self._prompts.get(before)
        if row.blocks is None or old.blocks is None or sent is None:
            return None
        whole = old.input_tokens // old.block_tokens  # the last block may be filled up
        added = row.input_tokens - old.input_tokens - old.output_tokens
        if added < 0 or row.blocks[:whole] != old.blocks[:whole]:
            return None
        tail = prompt_text(row, self._salt).encode()[-added * BYTES_PER_TOKEN :] if added else b""
        return sent + answer.encode() + tail
