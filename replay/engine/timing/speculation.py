"""Speculative decoding: the number of proposals, their acceptance, and the size of the draft.

A decode step verifies k proposed tokens of a request and its next token. It yields the accepted
ones and one more: (1 - a^(k+1)) / (1 - a) tokens on average, if each proposal is accepted with
probability a once all before it were (Leviathan et al., arXiv:2211.17192, equation 1).

The options are named as in vLLM's --speculative-config. No text is simulated, so acceptance is
given: by --acceptance, or by vLLM's own options of synthetic acceptance.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.replay.engine.hardware.layers import PLAIN
from forebay.replay.engine.hardware.specs import ModelSpec
from forebay.traces.ground.errors import InputError

OPTION = "--speculative-config"
NGRAM, DRAFT_MODEL = "ngram", "draft_model"
HEADS = ("eagle", "eagle3", "mtp")
"""Methods whose draft is a head on the target's hidden states: one layer of the target's size."""
METHODS = (NGRAM, DRAFT_MODEL, *HEADS)
_UNUSED = ("prompt_lookup_max", "prompt_lookup_min", "rejection_sample_method")
_KEYS = (
    *("method", "model", "num_speculative_tokens", "disable_eagle_block_drop"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    *_UNUSED,
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A checked --speculative-config.

    Attributes:
        tokens: proposed tokens of a request in a step (num_speculative_tokens).
        rates: probabilities, by position, that a token and all before it are accepted.
        model: name of the draft model, for the method of that name only.
        drops_block: a prefix hit loses its last block, as heads need its hidden states.
    """

    method: str
    tokens: int
    rates: tuple[float, ...]
    model: str | None = None
    drops_block: bool = False

    @property
    def mean_tokens(self) -> float:
        """Return the mean tokens that a decode step yields for a request."""
        return 1.0 + sum(self.rates)

    @property
    def on_cpu(self) -> bool:
        """Return True if the CPU proposes tokens, which excludes asynchronous scheduling."""
        return self.method == NGRAM

    @property
    def lookahead(self) -> int:
        """Return the tokens whose KV slots the draft needs beyond the scheduled ones."""
        return 0 if self.method == NGRAM else self.tokens

    @property
    def slots(self) -> int:
        """Return the places in the token budget that each request of a step leaves to the draft."""
        return 1 if self.method == DRAFT_MODEL else 0

    def check(self, async_scheduling: bool | None, batched_tokens: int) -> None:
        """Raise InputError for options of the engine with which vLLM would not start."""
        if self.on_cpu and async_scheduling:
            raise InputError(
                "--async-scheduling: vLLM has none with the method ngram; leave it out, or give a "
                "draft_model or a head"
            )
        if self.tokens + self.slots >= batched_tokens:
            raise InputError(
                f"--max-num-batched-tokens {batched_tokens}: a request with {self.tokens} proposed "
                "tokens does not fit; raise it"
            )

    def accepted(self, proposed: int, seed: int, request_id: str, position: int) -> int:
        """Return the number of accepted tokens among `proposed`, at a position of a request.

        Equal arguments give equal results, regardless of other requests.
        """
        key = f"{seed}/{request_id}/{position}".encode()
        drawn = xxh3_64_intdigest(key) * 2.0**-64
        count = 0
        while count < proposed and drawn < self.rates[count]:
            count += 1
        return count


def read_speculation(text: str | None, acceptance: float | None) -> Speculation | None:
    """Read --speculative-config and --acceptance (InputError: a wrong or a missing value)."""
    if acceptance is not None and not 0.0 <= acceptance <= 1.0:
        raise InputError(f"--acceptance {acceptance:g}: give a share in [0, 1], such as 0.7")
    if text is None:
        if acceptance is not None:
            raise InputError(
                f"--acceptance {acceptance:g}: nothing is drafted; give {OPTION} "
                '\'{"method": "eagle3", "num_speculative_tokens": 3}\' as well'
            )
        return None
    options = _read_object(text)
    # The source of drafts: a head, a model of its own, or a search in the prompt.
    method, model = options.get("method"), options.get("model")
    if method is None:
        method = NGRAM if model == NGRAM else DRAFT_MODEL
    if method not in METHODS:
        raise InputError(f"{OPTION}: method {method!r} is not simulated; give {_listed(METHODS)}")
    if method == DRAFT_MODEL and not isinstance(model, str):
        raise InputError(f"{OPTION}: draft_model needs model, a name or a config.json")
    # The length of a draft, and its accepted share.
    count = options.get("num_speculative_tokens")
    if type(count) is not int or not 1 <= count <= 64:
        raise InputError(f"{OPTION}: num_speculative_tokens {count!r}: give 1 to 64, such as 3")
    return Speculation(
        method,
        count,
        _rates(options, acceptance, count),
        model if method == DRAFT_MODEL else None,
        method in HEADS and not options.get("disable_eagle_block_drop"),
    )


def draft_of(
    target: ModelSpec, speculation: Speculation, model: ModelSpec | None
) -> ModelSpec | None:
    """Return the whole draft, or None if the method has no model.

    A head is taken as one layer of the target's size behind a product that takes in hidden states.
    It shares the target's embedding and its head of the vocabulary.

    Args:
        model: the draft model, for the method of that name.
    """
    # A draft model must have the target's vocabulary.
    if speculation.method == NGRAM:
        return None
    if model is not None:
        if model.vocab != target.vocab:
            raise InputError(
                f"{OPTION}: model {model.name} has a vocabulary of {model.vocab:,} tokens, "
                f"{target.name} has {target.vocab:,}; give a draft of the same family"
            )
        return model
    # A head has one layer like the target's, without states and indexer.
    mixture = target.mixture
    layer = replace(
        target,
        name=f"{speculation.method} head of {target.name}",
        layers=1,
        sliding_layers=0,
        near=None,
        state=None,
        index=None,
        mlps=0,
        mixture=None if mixture is None else replace(mixture, dense_layers=0),
        weights=PLAIN,
    )
    matrices = sum(
        product.experts * product.weights
        for group in layer.layer_groups
        for product in group.products
    )
    states = 2 * target.hidden * target.hidden
    return replace(layer, served_bytes=(matrices + states) * target.bytes_per_value)


def _read_object(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise InputError(
            f"{OPTION} {text}: give a JSON object, such as "
            '\'{"method": "eagle3", "num_speculative_tokens": 3}\''
        )
    for key in options:
        if key not in _KEYS:
            raise InputError(f"{OPTION}: {key} is not simulated; leave it out")
    return options


def _rates(options: dict[str, Any], acceptance: float | None, count: int) -> tuple[float, ...]:
    """Return the unconditional acceptance of each position (InputError: a wrong value)."""
    rates, length = (
        options.get("synthetic_acceptance_rates"),
        options.get("synthetic_acceptance_length"),
    )
    if (rates is not None) + (length is not None) + (acceptance is not None) != 1:
        raise InputError(
            f"{OPTION}: acceptance depends on text and draft; give --acceptance 0.7, or one "
            "of synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    if acceptance is not None:
        return tuple(acceptance ** (place + 1) for place in range(count))
    if rates is not None:
        right = isinstance(rates, list) and len(rates) == count
        if not right or not all(_is_number(rate, 0.0, before) for before, rate in _pairs(rates)):
            raise InputError(
                f"{OPTION}: synthetic_acceptance_rates {rates}: give {count} shares in [0, 1], "
                "none above the one before it"
            )
        return tuple(map(float, rates))
    if length is None or not _is_number(length, 1.0, count + 1.0):
        raise InputError(
            f"{OPTION}: synthetic_acceptance_length {length}: give 1 to {count + 1} tokens"
        )
    # As vLLM: as many positions as fit are always accepted, and the next one at times.
    return tuple(min(1.0, max(0.0, length - 1.0 - place)) for place in range(count))


def _pairs(rates: list[Any]) -> list[tuple[float, Any]]:
    before = [rate if _is_number(rate, 0.0, 1.0) else 1.0 for rate in rates]
    return list(zip([1.0, *before], rates, strict=False))


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
