"""Read a model's own `tokenizer.json` as a tiktoken encoding, without the network.

Llama 3, Qwen 2.5, SmolLM2 and others have byte-level BPE: their vocabulary is a list of byte
strings, and merges follow the order of ids, as tiktoken's do. Other kinds, such as SentencePiece,
are refused.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    import tiktoken

FILE = "tokenizer.json"
GPT2 = (  # the pattern of a ByteLevel pre-tokenizer, unless the file has a pattern of its own
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)
SINGLE_DIGITS = (  # the same after a Digits pre-tokenizer, which cuts out each digit first
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"""
)


def read_tokenizer(path: Path) -> "tuple[tiktoken.Encoding, bool]":
    """Read a tokenizer.json, or the file of that name in a folder.

    Returns the encoding, and True if texts are normalised to NFC first.

    Raises:
        InputError: the file cannot be read, or is not a byte-level BPE.
    """
    import tiktoken

    file = path / FILE if path.is_dir() else path
    try:
        body = json.loads(file.read_bytes())
        ranks, levels = dict[str, int](body["model"]["vocab"]), _steps(body["pre_tokenizer"])
        merge_ranks = [ranks.get(whole, -1) for whole in _merged(body["model"]["merges"])]
    except OSError as error:
        raise InputError(f"--tokens {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path) from error
    normal = body.get("normalizer")
    if normal not in (None, {"type": "NFC"}) or not any(s["type"] == "ByteLevel" for s in levels):
        raise _refused(path)
    if any(later < earlier for earlier, later in pairwise([0, *merge_ranks])):
        raise _refused(path)  # merges are not in the order of ids
    try:
        plain = _in_bytes(ranks, {token["content"] for token in body.get("added_tokens", ())})
        encoding = tiktoken.Encoding(
            str(path), pat_str=_pattern(levels), mergeable_ranks=plain, special_tokens={}
        )
    except (ValueError, KeyError) as error:
        raise _refused(path) from error
    return encoding, normal is not None


def _in_bytes(ranks: dict[str, int], added: set[str]) -> dict[bytes, int]:
    """Return the vocabulary as byte strings, without added tokens (KeyError: other letters).

    A byte that is missing there, such as a control character, counts as a token of its own.
    """
    letters = {letter: byte for byte, letter in enumerate(_letters())}
    plain = {
        bytes(letters[letter] for letter in token): rank
        for token, rank in ranks.items()
        if token not in added
    }
    for byte in range(256):
        plain.setdefault(bytes([byte]), max(ranks.values()) + 1 + byte)
    return plain


def _refused(path: Path) -> InputError:
    return InputError(
        f"--tokens {path}: not a byte-level BPE tokenizer.json, such as Llama 3's or Qwen 2.5's; "
        "give one, or an encoding such as o200k_base"
    )


def _merged(merges: list[str | list[str]]) -> list[str]:
    """Return the token that each merge makes. Older files have `a b`, newer files `["a", "b"]`."""
    return [
        merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in merges
    ]


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    return (
        pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    )


def _pattern(levels: list[dict[str, Any]]) -> str:
    """Return the pattern of the file or of its steps (ValueError: steps that are unknown here)."""
    match [step for step in levels if step["type"] != "ByteLevel"]:
        case []:
            return GPT2
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}}]:
            return pattern
        case [{"type": "Digits", "individual_digits": True}]:
            return SINGLE_DIGITS
    raise ValueError("other splits")


def _letters() -> list[str]:
    """Return the letter that stands for each byte in the vocabulary, as GPT-2 chose them."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
