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


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer, as it is before its first token.

    Attributes:
        created: Unix time, seconds.
        whole_blocks: the prompt's tokens in full, cacheable blocks.
    """

    call: Call
    id: str
    created: int
    origin: AnswerOrigin
    whole_blocks: int

    def head(self, kind: bytes) -> bytes:
        """Return the first fields of an object of this kind."""
        return b'{"id":%b,"object":"%b","created":%d,"model":%b,' % (
            orjson.dumps(self.id),
            kind,
            self.created,
            orjson.dumps(self.origin.model),
        )

    def cache_writes(self, cached: int) -> int:
        """Return the prompt's tokens that entered the cache, of which `cached` were in it."""
        return max(0, self.whole_blocks - cached)


class Chunks:
    """The events of one streamed answer. `done` is the last event."""

    __slots__ = ("_answer", "_call", "_head", "after", "before")

    done = DONE

    def __init__(self, answer: ServedAnswer) -> None:
        self._answer = answer
        self._call = call = answer.call
        kind = b"chat.completion.chunk" if call.chat else b"text_completion"
        self._head = b"data: " + answer.head(kind)
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
        signed = b"," + self._answer.origin.fingerprint
        tail = (b"" if self._call.include_usage else signed) + b"}\n\n"
        after %= reason.encode()
        return self.before + text + after + self._running_usage(produced) + tail

    def usage(self, produced: int, cached: int) -> bytes:
        """Return the closing usage chunk, empty unless the client asked for it."""
        if not self._call.include_usage:
            return b""
        details, origin = b"", self._answer.origin
        if origin.tells_cached:
            cache_writes = b',"created_cache_tokens":%d' % self._answer.cache_writes(cached)
            details = b',"prompt_tokens_details":{"cached_tokens":%d%b}' % (
                cached,
                cache_writes if self._call.chat else b"",
            )
        return (
            self._head
            + b'"choices":[],"usage":{%b%b},'
            % (_counts(self._call.prompt.tokens, produced), details)
            + origin.fingerprint
            + b"}\n\n"
        )

    def _running_usage(self, produced: int) -> bytes:
        if not self._call.continuous_usage or not self._call.include_usage:
            return b""
        details = b',"completion_tokens_details":null' if self._call.chat else b""
        return b',"usage":{%b%b}' % (_counts(self._call.prompt.tokens, produced), details)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is not streamed."""

    begun: ServedAnswer
    text: bytes
    produced: int
    cached: int
    reason: str


def whole_answer(answer: WholeAnswer) -> bytes:
    """Return the body of a completion or a chat completion."""
    call, origin = answer.begun.call, answer.begun.origin
    head = answer.begun.head(b"chat.completion" if call.chat else b"text_completion")
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
        cache_writes = b"%d" % answer.begun.cache_writes(answer.cached) if call.chat else b"null"
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
        + b'"choices":[{"index":0,'
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
