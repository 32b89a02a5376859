"""Look up fields of a Hugging Face `config.json`. A wrong field is named in the error."""

import json
from pathlib import Path
from typing import Any

from forebay.traces.ground.errors import InputError

_ALIASES = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
"""Other names of fields, in GPT's configurations."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 4096,
    },
    "gpt_bigcode": {"multi_query": True},
}  # fmt: skip
"""Values that transformers 5.19 fills in for missing keys, of families that leave some out."""


class Uncounted(InputError):
    """A model that vLLM may serve, but whose sizes are not known here."""


class Fields:
    """The configuration of one model, or of the text part of a multi-modal model.

    A field is looked up in `text_config` first and at the top after that, because checkpoints
    differ in where they keep `tie_word_embeddings`, `quantization_config` and the like.
    """

    def __init__(self, path: Path, top: dict[str, Any]) -> None:
        self.path = path
        text = top.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise InputError(f"{path}: text_config is not an object")
        self._parts = (text, top) if text else (top,)
        self._defaults = _DEFAULTS.get(self.model_type, {})

    def names(self) -> list[str]:
        """Return the names of all fields, of the text part first."""
        return [name for part in self._parts for name in part]

    def get(self, *names: str) -> Any:
        """Return the first of `names` that exists and is not null, else None."""
        others = [_ALIASES[name] for name in names if name in _ALIASES]
        if "num_hidden_layers" in names:
            others.append("num_layers")  # EXAONE 3.5
        for part in self._parts:
            for name in (*names, *others):
                if part.get(name) is not None:
                    return part[name]
        return next((self._defaults[name] for name in names if name in self._defaults), None)

    def whole(self, *names: str) -> int | None:
        """Return the first of `names` as a whole number, 0 or more (InputError: another value)."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.path}: {'/'.join(names)} is {value!r}: not a whole number")
        return value

    def needed(self, *names: str) -> int:
        """Return a whole number of 1 or more (InputError: missing, or another value)."""
        value = self.whole(*names)
        if not value:
            missing = "missing" if value is None else "0"
            raise InputError(
                f"{self.path}: {' or '.join(names)} is {missing}; "
                "use the config.json of a decoder-only language model"
            )
        return value

    def listed(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise InputError(f"{self.path}: {name} is not a list")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """Return an object of the configuration, empty if it is missing."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: {name} is not an object")
        return value

    def part(self, name: str) -> "Fields | None":
        """Return the fields of an object of the configuration, None if it is missing or empty."""
        values = self.section(name)
        return Fields(self.path, values) if values else None

    @property
    def model_type(self) -> str:
        kinds = (part.get("model_type") for part in self._parts)
        return str(next(filter(None, kinds), ""))

    @property
    def family(self) -> str:
        """Return the model type of the whole model, also where its text part has another."""
        return str(self._parts[-1].get("model_type") or "")

    @property
    def several_kinds(self) -> bool:
        """Return True for a model that also reads images or sounds."""
        return any(key in ("vision_config", "audio_config") for key in self._parts[-1])


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. An InputError names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value
