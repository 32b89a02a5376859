"""Build the JSON of answers, chunk by chunk, in vLLM 0.32's field order.

Generated text is plain ASCII words, so a chunk is bytes around a word. These bytes are made once
for each request and not encoded again for each token.
"""

from dataclasses import dataclass

import orjson

from forebay.replay.engine.server.protocol import Call
from forebay.replay.engine.tokenizer import BYTES_PER_TOKEN, Generation

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ends.

    Attributes:
        most: tokens that it may have.
        tokens: tokens that it has. The end-of-text token of a "stop" counts, but has no text.
        size: bytes of its text.
        reason: vLLM's finish reason.
        stopped_by: the stop string that ends it, if one does.
    """

    most: int
    tokens: int
    size: int
    reason: str
    stopped_by: str | None = None


def ending_of(call: Call, generation: Generation, room: int) -> Ending:
    """Return the ending of an answer for which the context has `room` tokens."""
    most = min(room, call.max_tokens or room)
    least = min(call.min_tokens, most)
    tokens = most if call.ignore_eos else generation.length(most, least)
    reason = "length" if tokens == most else "stop"
    size = BYTES_PER_TOKEN * (tokens if reason == "length" else tokens - 1)
    if not call.stop:
        return Ending(most, tokens, size, reason)
    text = generation.words(0, size // BYTES_PER_TOKEN).decode()
    first: tuple[int, str] | None = None
    for stop in call.stop:
        # It has to be complete behind the tokens of `min_tokens`.
        start = text.find(stop, max(0, BYTES_PER_TOKEN * least + 1 - len(stop)))
        if start >= 0 and (first is None or start + len(stop) < first[0]):
            first = start + len(stop), stop
    if first is None:
        return Ending(most, tokens, size, reason)
    end, stop = first
    size = end if call.keeps_stop else end - len(stop)
    return Ending(most, -(-end // BYTES_PER_TOKEN), size, "stop", stop)


class AnswerText:
    """The text of tokens.

    While an answer may still end with a stop string, vLLM keeps back as many characters as could
    be a part of one.
    """

    __slots__ = ("_held", "_size", "generation")

    def __init__(self, generation: Generation, call: Call, ending: Ending) -> None:
        self.generation = generation
        self._size = ending.size
        self._held = 0 if call.keeps_stop else max(map(len, call.stop), default=1) - 1

    def between(self, start: int, stop: int, reason: str | None) -> bytes:
        """Return the text that tokens `start`..`stop` add. With `reason` they are the last."""
        held = self._held
        first = max(0, BYTES_PER_TOKEN * start - held)
        if reason is None:
            end = max(0, BYTES_PER_TOKEN * stop - held)
        else:
            end = min(self._size, BYTES_PER_TOKEN * stop)  # less where the server aborts it
        if end <= first:
            return b""
        skipped = first // BYTES_PER_TOKEN
        words = self.generation.words(skipped, -(-end // BYTES_PER_TOKEN))
        return words[first - skipped * BYTES_PER_TOKEN : end - skipped * BYTES_PER_TOKEN]


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

    __slots__ = ("_call", "_head", "_origin", "_whole_blocks", "after", "before", "index")

    done = DONE

    def __init__(
        self,
        call: Call,
        answer_id: str,
        created: int,
        origin: AnswerOrigin,
        whole_blocks: int,
        index: int = 0,
    ) -> None:
        """Create the chunks of choice `index`.

        `whole_blocks` are the prompt's tokens in full, cacheable blocks.
        """
        self.index = index
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
        choice = self._head + b'"choices":[{"index":%d,' % index
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
        return self.role_of(self.index)

    def role_of(self, index: int) -> bytes:
        """Return the empty first delta of a choice."""
        return (
            self._head
            + b'"choices":[{"index":%d,"delta":{"role":"assistant","content":""},' % index
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
            after = b'"},"logprobs":null,"finish_reason":"%b","stop_reason":%b,"token_ids":null}]'
        else:
            after = (
                b'","logprobs":null,"finish_reason":"%b","stop_reason":%b,'
                b'"prompt_token_ids":null,"token_ids":null}]'
            )
        signed = b"," + self._origin.fingerprint
        tail = (b"" if self._call.include_usage else signed) + b"}\n\n"
        after %= (reason.encode(), orjson.dumps(self._call.stopped_by))
        return self.before + text + after + self._running_usage(produced) + tail

    def usage(self, produced: int, cached: int) -> bytes:
        """Return the closing usage chunk, empty unless the client asked for it."""
        return self.usage_of(self._call.prompt.tokens, produced, cached)

    def usage_of(self, prompt_tokens: int, produced: int, cached: int) -> bytes:
        """Return that chunk for prompts and choices with these tokens in all."""
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
            + b'"choices":[],"usage":{%b%b},' % (_counts(prompt_tokens, produced), details)
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
    ends = b'"logprobs":null,"finish_reason":"%b","stop_reason":%b,"token_ids":null,' % (
        answer.reason.encode(),
        orjson.dumps(call.stopped_by),
    )
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
