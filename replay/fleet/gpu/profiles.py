"""The models that a fleet knows: repository, longest context and prefill chunk of each.

Any other name is passed to vLLM unchanged: a Hugging Face repository or a folder.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.hf_fields import Uncounted
from forebay.replay.engine.hardware.kv_layout import ModelShape
from forebay.replay.engine.hardware.specs import LLAMA_3_8B, PHI_3_MINI, QWEN_2_5_14B, ModelSpec
from forebay.traces.errors import InputError

STEP_TARGET_S = 0.3
"""Longest step, seconds, that computes the last chunk of a document of full context length. Answers
that run at the same time have gaps between tokens of this length."""
USUAL_CHUNK = 2048
CPU_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Profile:
    """A model for vLLM to serve.

    Attributes:
        repository: Hugging Face repository or folder that vLLM reads.
        context: most tokens of prompt and answer together. None: as in the model's config.json.
        native: context without YaRN, tokens.
        chunk: --long-prefill-token-threshold, tokens: the largest power of two whose step on an
            H200 stays under STEP_TARGET_S (a test computes it again).
        shape: sizes that its memory depends on. None where only vLLM will read them.
        note: remark for the user.
    """

    repository: str
    context: int | None
    native: int | None = None
    chunk: int = USUAL_CHUNK
    shape: ModelShape | None = None
    note: str = ""


def _known(
    repository: str, spec: ModelSpec, context: int, chunk: int, note: str = "", native: int = 0
) -> Profile:
    return Profile(repository, context, native or context, chunk, spec.shape, note)


_LLAMA_3 = _known(
    "meta-llama/Meta-Llama-3-8B-Instruct",
    LLAMA_3_8B,
    8_192,
    2_048,
    "Llama-3-8B holds 8,192 tokens; llama-3.1-8b has the same size and holds 131,072",
)
_LLAMA_3_1 = _known("meta-llama/Llama-3.1-8B-Instruct", LLAMA_3_8B, 131_072, 2_048)
_QWEN = _known(
    "Qwen/Qwen2.5-14B-Instruct",
    QWEN_2_5_14B,
    131_072,
    1_024,
    "Qwen2.5 holds 32,768 tokens, beyond them with YaRN, which costs short prompts a little; "
    "--max-model-len 32768 leaves it out",
    native=32_768,
)
_PHI = _known("microsoft/Phi-3-mini-128k-instruct", PHI_3_MINI, 131_072, 2_048)
PROFILES = {
    "llama-3-8b": _LLAMA_3,
    "llama-3.1-8b": _LLAMA_3_1,
    "qwen2.5-14b": _QWEN,
    "phi-3-mini-128k": _PHI,
}
_NAMES = {
    "llama38b": _LLAMA_3,
    "metallama38b": _LLAMA_3,
    "llama318b": _LLAMA_3_1,
    "metallama318b": _LLAMA_3_1,
    "qwen2514b": _QWEN,
    "phi3mini128k": _PHI,
}


def find_profile(model: str) -> Profile:
    """Find a model by its name (spelled loosely), its repository or its folder.

    Raises InputError for another bare word: vLLM would look for it on the Internet.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return _of_folder(path)
    if path.exists() or model.startswith((".", "/", "~")):
        raise InputError(f"--model {model}: no config.json in it; give the folder of a model")
    last = model.rsplit("/", 1)[-1].lower()
    profile = _NAMES.get(re.sub(r"(instruct|chat)$", "", re.sub(r"[^a-z0-9]", "", last)))
    if profile is not None:
        # A copy in another repository has the same sizes.
        return profile if "/" not in model or model == profile.repository else _copy(profile, model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise InputError(
            f"--model {model}: give {', '.join(PROFILES)}, a Hugging Face repository such as "
            "Qwen/Qwen2.5-7B-Instruct, or the folder of a model"
        )
    return Profile(model, None)


def _of_folder(path: Path) -> Profile:
    """Read the sizes of a model in a folder. vLLM may serve a model with sizes unknown here."""
    try:
        shape = read_shape(path)
    except Uncounted as error:
        return Profile(str(path.resolve()), None, note=f"its KV cache is not computed: {error}")
    longest = shape.default_len or shape.max_model_len
    return Profile(str(path.resolve()), shape.max_model_len, longest, shape=shape)


def _copy(profile: Profile, repository: str) -> Profile:
    return Profile(
        repository, profile.context, profile.native, profile.chunk, profile.shape, profile.note
    )
