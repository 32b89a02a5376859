"""Compare the model that a run or a result file names with the model that is simulated."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.replay.engine.config import EngineConfig
from forebay.replay.validation.measured import model_of
from forebay.traces.ground.errors import InputError

FAMILIES = ("llama", "qwen", "phi", "mistral", "mixtral", "gemma", "deepseek", "gpt-oss", "glm")


def check_model(sources: Sequence[Path], config: EngineConfig) -> None:
    """Compare the model that a source says it is of with the configuration's.

    Raises InputError if they differ in family or size. A server can serve a model under any name,
    so other differences are a warning.
    """
    for source in sources:
        named = model_of(source)
        if named is None:
            continue
        both = f"{source}: is of {named}, --model is {config.model_name}"
        if differ(named, config.model_name):
            raise InputError(f"{both}; give the same model")
        if not any(_alike(named, ours) for ours in (config.model_name, config.model_spec.name)):
            print(f"forebay engine: warning: {both}; are they one model?", file=sys.stderr)


def _plain(model: str) -> str:
    return model.lower().rsplit("/config.json", 1)[0].rsplit("/", 1)[-1]


def _alike(*models: str) -> bool:
    """True if one name has all words of the other: Meta-Llama-3-8B-Instruct and llama-3-8b."""
    words, others = ({*re.findall(r"[a-z\d.]+", _plain(model))} for model in models)
    return words <= others or others <= words


def differ(*models: str) -> bool:
    """True if two names of models are of different families, or of different sizes."""
    names = [_plain(model) for model in models]
    families = [{word for word in FAMILIES if word in name} for name in names]
    sizes = [set(re.findall(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z\d])", name)) for name in names]
    return any(all(pair) and pair[0].isdisjoint(pair[1]) for pair in (families, sizes))
