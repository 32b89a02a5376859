"""The models that a fleet knows: repository, longest context and prefill chunk of each.

Any other name is passed to vLLM unchanged: a Hugging Face repository or a folder.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.traces.ground.errors import InputError

STEP_TARGET_S = 0.3
"""Longest step, seconds, that computes the last chunk of a document of full context length. Answers
that run at the same time have gaps between tokens of this length."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A model for vLLM to serve.

    Attributes:
        repository: Hugging Face repository or folder that vLLM reads.
        model: name of the model of equal sizes in the simulated engine. None: unknown sizes.
        context: most tokens of prompt and answer together. None: as in the model's config.json.
        native: context without YaRN, tokens. None: all of it.
        chunk: --long-prefill-token-threshold, tokens: the largest power of two whose step on an
            H200 stays under STEP_TARGET_S (a test computes it again).
    """

    repository: str
    model: str | None = None
    context: int | None = None
    native: int | None = None
    chunk: int = 2048

    @property
    def served_name(self) -> str:
        """Return the model's name for clients: the repository, or a folder's name."""
        return Path(self.repository).name if self.repository[0] == "/" else self.repository


PROFILES = {
    "llama-3-8b": Profile("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", 8_192),
    "llama-3.1-8b": Profile("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b", 131_072),
    "qwen2.5-14b": Profile("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b", 131_072, 32_768, 1_024),
    "phi-3-mini-128k": Profile("microsoft/Phi-3-mini-128k-instruct", "phi-3-mini", 131_072),
}


def _plain(name: str) -> str:
    """Return a model's name without organisation, punctuation and words that change no size."""
    letters = re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
    return re.sub(r"^meta|(instruct|chat)$", "", letters)


_BY_PLAIN_NAME = {_plain(name): profile for name, profile in PROFILES.items()}


def find_profile(model: str) -> Profile:
    """Find a model by its name (spelled loosely), its repository or its folder.

    A copy in another repository or in a folder has the sizes that its name tells.
    Raises InputError for another bare word: vLLM would look for it on the Internet.
    """
    path, profile = Path(model), _BY_PLAIN_NAME.get(_plain(model))
    if (path / "config.json").is_file():
        model = str(path.resolve())
    elif path.exists() or model.startswith((".", "/", "~")):
        raise InputError(f"--model {model}: no config.json in it; give the folder of a model")
    elif profile is not None and "/" not in model:
        return profile
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise InputError(
            f"--model {model}: give {', '.join(PROFILES)}, a Hugging Face repository such as "
            "Qwen/Qwen2.5-7B-Instruct, or the folder of a model"
        )
    return replace(profile or Profile(model), repository=model)
