"""Put the tokenizer `bench/words` into the cache of Hugging Face, for peers that need one offline.

It is trained on Python's own library, so that a token of a prompt has about four bytes. Run it with
the Python of a peer's environment, which has `tokenizers`, and set HF_HOME for it and the bench:

    HF_HOME=FOLDER PEERS/aiperf/bin/python tests/bench/replay/make_tokenizer.py
"""

import json
import os
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REVISION = "0" * 40
END = "<|endoftext|>"


def main() -> None:
    place = Path(os.environ["HF_HOME"], "hub", "models--bench--words")
    folder = place / "snapshots" / REVISION
    folder.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(REVISION)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    files = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    tokenizer.train(files, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), END)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **special}))
    model = {"model_type": "gpt2", "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps({**model, "n_positions": 1_000_000}))


if __name__ == "__main__":
    main()
