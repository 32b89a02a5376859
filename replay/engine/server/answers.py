"""Build the JSON of answers, chunk by chunk, in vLLM 0.32's field order.

Generated text is plain ASCII words, so a chunk is bytes around a word. These bytes are made once
for each request and not encoded again for each token.
"""

from dataclasses import dataclass

import orjson

from forebay.replay.engine.server.protocol import Call
from forebay.replay.engine.tokenizer import Generation

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ends.

    Attributes:
        most: tokens that it may have.
        tokens: tokens that it has. The end-of-text token of a "stop" counts, but has no text.
        reason: vLLM's finish reason.
    """

    most: int
    tokens: int
    reason: str


def ending_of(call: Call, generation: Generation, room: int) -> Ending:
    """Return the ending of an answer for which the context has `room` tokens."""
    most = min(room, call.max_tokens or room)
    tokens = most
    if not call.ignore_eos:
        tokens = generation.length(most, min(call.min_tokens, most))
    return Ending(most, tokens, "length" if tokens == most else "stop")


def text_between(generation: Generation, start: int, stop: int, reason: str | None) -> bytes:
    """Return the text that tokens `start`..`stop` add. With `reason` they are the last."""
    return generation.words(start, stop - (reason == "stop"))


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """The common parts of all answers of one server.

    Attributes:
        model: name for clients.
        version: version of the simulated vLLM.
        tells_cached: usage has prompt_tokens_details.
    """

    model: str
    version: str
    tells_cached: bool

    @property
    def fingerprint(self) -> bytes:
        return b'"system_fingerprint":"vllm-%b-simulated"' % self.version.encode()


class Chunks:
    """The events of one streamed answer. `done` is the last event."""

    __slots__ = ("_call", "_head", "_origin", "_whole_blocks", "after", "before")

    done = DONE

    def __init__(
        self, call: Call, answer_id: str, created: int, origin: AnswerOrigin, whole_blocks: int
    ) -> None:
        """Create the chunks. `whole_blocks` are the prompt's tokens in full, cacheable blocks."""
        self._call = call
        self._origin = origin
        self._whole_blocks = whole_blocks
        kind = b"chat.completion.chunk" if call.chat else b"text_completion"
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,' % (
            orjson.dumps(answer_id),
            kind,
            created,
            orjson.dumps(origin.model),
        )
        choice = self._head + b'"choices":[{"index":0,'
        if call.chat:
            self.before = choice + b'"delta":{"content":"'
            self.after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            self.before = choice + b'"text":"'
            self.after = (
                b'","logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]'
            )

    def opening(self) -> bytes:
        """Return the events that a client gets before the first token is ready."""
        return b""

    def role(self) -> bytes:
        """Return the empty first delta of a chat, sent when the first token is ready."""
        return (
            self._head
            + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
            + b'"logprobs":null,"finish_reason":null}]'
            + self._running_usage(0)
            + b',"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def tokens(self, text: bytes, produced: int) -> bytes:
        """Return the chunk of some tokens before the last."""
        return self.before + text + self.after + self._running_usage(produced) + b"}\n\n"

    def last(self, text: bytes, produced: int, reason: str) -> bytes:
        """Return the last chunk, which has the finish reason."""
        if self._call.chat:
            after = b'"},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}]'
        else:
            after = (
                b'","logprobs":null,"finish_reason":"%b","stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]'
            )
        signed = b"," + self._origin.fingerprint
        tail = (b"" if self._call.include_usage else signed) + b"}\n\n"
        after %= reason.encode()
        return self.before + text + after + self._running_usage(produced) + tail

    def usage(self, produced: int, cached: int) -> bytes:
        """Return the closing usage chunk, empty unless the client asked for it."""
        if not self._call.include_usage:
            return b""
        details = b""
        if self._origin.tells_cached:
            cache_writes = b',"created_cache_tokens":%d' % max(0, self._whole_blocks - cached)
            details = b',"prompt_tokens_details":{"cached_tokens":%d%b}' % (
                cached,
                cache_writes if self._call.chat else b"",
            )
        return (
            self._head
            + b'"choices":[],"usage":{%b%b},'
            % (_counts(self._call.prompt.tokens, produced), details)
            + self._origin.fingerprint
            + b"}\n\n"
        )

    def _running_usage(self, produced: int) -> bytes:
        if not self._call.continuous_usage or not self._call.include_usage:
            return b""
        details = b',"completion_tokens_details":null' if self._call.chat else b""
        return b',"usage":{%b%b}' % (_counts(self._call.prompt.tokens, produced), details)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The parts of an answer that is not streamed, with `whole_blocks` as in `Chunks`."""

    call: Call
    answer_id: str
    created: int
    origin: AnswerOrigin
    text: bytes
    produced: int
    cached: int
    reason: str
    whole_blocks: int


def whole_answer(answer: WholeAnswer) -> bytes:
    """Return the body of a completion or a chat completion."""
    call, origin = answer.call, answer.origin
    head = b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":[{"index":0,' % (
        orjson.dumps(answer.answer_id),
        b"chat.completion" if call.chat else b"text_completion",
        answer.created,
        orjson.dumps(origin.model),
    )
    ends = b'"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null,'
    ends %= answer.reason.encode()
    # A chat and a completion have other keys, in vLLM's order.
    if call.chat:
        choice = (
            b'"message":{"role":"assistant","content":"%b","refusal":null,"annotations":null,'
            b'"audio":null,"function_call":null,"reasoning":null},%b"routed_experts":null}],'
            % (answer.text, ends)
        )
        tail = b',"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null'
    else:
        choice = (
            b'"text":"%b",%b"prompt_logprobs":null,"prompt_token_ids":null,'
            b'"routed_experts":null}],' % (answer.text, ends)
        )
        tail = b""
    # Usage ends the answer. Cache writes are counted for chats only.
    details = b"null"
    if origin.tells_cached:
        cache_writes = b"%d" % max(0, answer.whole_blocks - answer.cached) if call.chat else b"null"
        details = b'{"cached_tokens":%d,"created_cache_tokens":%b,"multimodal_tokens":null}' % (
            answer.cached,
            cache_writes,
        )
    usage = b'"usage":{%b,"prompt_tokens_details":%b,"completion_tokens_details":null}' % (
        _counts(call.prompt.tokens, answer.produced),
        details,
    )
    return (
        head
        + choice
        + b'"service_tier":null,'
        + origin.fingerprint
        + b","
        + usage
        + tail
        + b',"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


def _counts(prompt: int, produced: int) -> bytes:
    return b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (
        prompt,
        prompt + produced,
        produced,
    )
