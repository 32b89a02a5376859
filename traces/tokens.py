"""Count tokens exactly if a vocabulary is on this machine, else by a named estimate.

This module never uses the network. tiktoken would download a missing vocabulary, so the file is
found and checked first: in the places that tiktoken reads, and in an installed litellm, which
contains cl100k and o200k. A model's own tokenizer.json is read by the library that wrote it.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    import tiktoken

FILE = "tokenizer.json"
BYTES_PER_TOKEN = 4
DEFAULT_ENCODING = "o200k_base"

# A name to hash, never fetched.
_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
# encoding: sha256 of its vocabulary, from tiktoken_ext/openai_public.py
_VOCABULARIES = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "p50k_base": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    "r50k_base": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
}
_SAME_VOCABULARY = {"o200k_harmony": "o200k_base", "p50k_edit": "p50k_base"}


class TokenCounter(Protocol):
    """Counts tokens of text. `name` is the method, and `exact` is False for an estimate."""

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    def count(self, text: str) -> int: ...
    def head(self, text: str, tokens: int) -> str:
        """Return the longest prefix of `text` of at most `tokens` tokens and whole characters."""


class ByteEstimate:
    """Counts four UTF-8 bytes as a token, like the simulated engine. It is close for English."""

    exact = False

    def __init__(self, why: str = "") -> None:
        self.name = f"estimate of bytes/4{f' ({why})' if why else ''}"

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // BYTES_PER_TOKEN)

    def head(self, text: str, tokens: int) -> str:
        return text.encode()[: max(tokens, 0) * BYTES_PER_TOKEN].decode("utf-8", "ignore")


class VocabularyCount:
    """Counts with tiktoken and a local vocabulary. Special tokens count as plain text."""

    exact = True

    def __init__(self, encoding: "tiktoken.Encoding") -> None:
        self.name = encoding.name
        self._encoding = encoding

    def count(self, text: str) -> int:
        return len(self._encoding.encode_ordinary(text))

    def head(self, text: str, tokens: int) -> str:
        ids = self._encoding.encode_ordinary(text)[: max(tokens, 0)]
        # A token may end inside a character: leave out the incomplete character.
        return self._encoding.decode(ids, errors="ignore")


class TokenizerFile:
    """Counts with a model's own tokenizer.json, as its server does.

    A special token in a text is one token. Tokens that a server adds to a prompt do not count.
    """

    exact = True

    def __init__(self, path: Path) -> None:
        """Read `path`, or the file of that name in a folder. Raises InputError."""
        from tokenizers import Tokenizer

        self.name = str(path)
        try:
            body = (path / FILE if path.is_dir() else path).read_bytes()
            self._tokenizer = Tokenizer.from_buffer(body)
        except OSError as error:
            raise InputError(f"--tokens {path}: {error.strerror or error}") from error
        except ValueError as error:  # the library's words, which name what it does not know
            raise InputError(f"--tokens {path}: not a tokenizer.json: {error}") from error
        # A file may ask to cut or fill texts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def count(self, text: str) -> int:
        return len(self._places(text))

    def head(self, text: str, tokens: int) -> str:
        places = self._places(text)
        if not 0 < tokens < len(places):
            return text if tokens > 0 else ""
        # The tokens of a character all have its place. Spaces belong to no place in some files.
        return text[: min(places[tokens - 1][1], places[tokens][0])]

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return where each token begins and ends in the text, in characters."""
        places: list[tuple[int, int]]
        places = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return places


def counter(model_or_encoding: str = DEFAULT_ENCODING) -> TokenCounter:
    """Make the counter for an encoding, a model of tiktoken, a tokenizer.json, or `estimate`.

    A path names the file or its folder. Without a local vocabulary, the counter is the estimate,
    and its name has the reason.

    Raises:
        InputError: the tokenizer.json cannot be read.
        ModuleNotFoundError: the extra that reads a tokenizer.json is not installed.
    """
    if model_or_encoding == "estimate":
        return ByteEstimate()
    path = Path(model_or_encoding)
    if path.suffix == ".json" or (path / FILE).is_file():
        return TokenizerFile(path)
    encoding = _encoding_name(model_or_encoding)
    if encoding is None:
        return ByteEstimate(f"no vocabulary for {model_or_encoding!r} here")
    folder = _folder_with(encoding)
    if folder is None:
        return ByteEstimate(f"the {encoding} vocabulary is not on this machine")
    return VocabularyCount(_load(encoding, folder))


def _encoding_name(model_or_encoding: str) -> str | None:
    if _SAME_VOCABULARY.get(model_or_encoding, model_or_encoding) in _VOCABULARIES:
        return model_or_encoding
    from tiktoken.model import encoding_name_for_model

    try:
        encoding = encoding_name_for_model(model_or_encoding)
    except KeyError:
        return None
    return encoding if _SAME_VOCABULARY.get(encoding, encoding) in _VOCABULARIES else None


def _folder_with(encoding: str) -> Path | None:
    """Find the first folder with a complete vocabulary, under the name that tiktoken gives it."""
    vocabulary = _SAME_VOCABULARY.get(encoding, encoding)
    sha256 = _VOCABULARIES[vocabulary]
    name = hashlib.sha1(_URL.format(vocabulary).encode(), usedforsecurity=False).hexdigest()
    for folder in _folders():
        try:
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256:
                return folder
        except OSError:  # not here, or not readable
            continue
    return None


def _folders() -> Iterator[Path]:
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    yield Path(tempfile.gettempdir()) / "data-gym-cache"
    litellm = find_spec("litellm")  # does not import it
    for place in (litellm and litellm.submodule_search_locations) or ():
        yield Path(place) / "litellm_core_utils" / "tokenizers"


def _load(encoding: str, folder: Path) -> "tiktoken.Encoding":
    """Load the encoding from `folder`, which tiktoken reads from the environment only."""
    import tiktoken

    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    try:
        return tiktoken.get_encoding(encoding)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before
