"""A process that converts the GGUF file of SmolLM2 into a checkpoint of mlx-lm.

    python -m engine.mlx_backend.loading.gguf SOCKET GGUF FOLDER

The weights stay quantized as they are in the file. What fails is written to the socket.
"""

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.api import ModelError, one_line
from engine.mlx_backend.environment import mlx_imports
from engine.process.sockets import send_all

if TYPE_CHECKING:
    import mlx.core as mx

_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""The names of a layer's modules in Hugging Face's checkpoints, by those in GGUF."""

_FACTS = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_bos_token": False,
}
"""What the metadata must say for this conversion to be right: byte-level BPE, digits singly."""

_GROUP_SIZE = 32  # of Q4_1 and of Q8_0
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the makers recommend for this model: https://huggingface.co/HuggingFaceTB"""


def convert(gguf: Path, folder: Path) -> None:
    """Write a checkpoint into an empty folder. Raises ModelError for another model's GGUF file, or
    whatever MLX raises.
    """
    with mlx_imports():
        import mlx.core as mx  # noqa: PLC0415 - MLX comes after the BLAS

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays: dict[str, mx.array] = loaded[0]
    metadata: dict[str, Any] = loaded[1]
    for name, expected in _FACTS.items():
        if _plain(metadata.get(name)) != expected:
            raise ModelError(f"{name} is {metadata.get(name)!r} and should be {expected!r}")
    config = _config(metadata)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        ordered = _split_halves(array, heads[part]) if part in heads else array
        tensors[f"{_module(module)}.{kind}"] = ordered
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    files = {
        "config.json": config,
        "generation_config.json": {f"{name}_token_id": id for name, id in ids.items()} | _SAMPLING,
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[id] for name, id in ids.items()},
            "unk_token": tokens[_plain(metadata["tokenizer.ggml.unknown_token_id"])],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _plain(value: Any) -> Any:
    """A value of the metadata, with an array of one number as that number."""
    return value.item() if hasattr(value, "item") else value


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json."""

    def number(name: str) -> Any:
        return metadata[name].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "rms_norm_eps": float(f"{number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("llama.rope.freq_base"),
        "rope_traditional": False,
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
        "quantization": {
            "group_size": _GROUP_SIZE,
            "bits": 4,  # Q4_1
            "model.embed_tokens": {"group_size": _GROUP_SIZE, "bits": 8},  # Q8_0
        },
    }


def _module(name: str) -> str:
    """A module's name in Hugging Face's checkpoints."""
    match name.split("."):
        case ["token_embd"]:
            return "model.embed_tokens"
        case ["output_norm"]:
            return "model.norm"
        case ["blk", layer, part] if part in _MODULES:
            return f"model.layers.{layer}.{_MODULES[part]}"
        case _:
            raise ModelError(f"there is no place for {name}")


def _split_halves(array: "mx.array", heads: int) -> "mx.array":
    """The rows of q or k in Hugging Face's order, in which a rotary pair is half a head apart.
    llama.cpp stores the rows of a pair next to each other.
    """
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE that reads each digit alone."""
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {"special": True, "normalized": False}
    exact = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": id, "content": tokens[id], **special, **exact}
        for id, kind in enumerate(metadata["tokenizer.ggml.token_type"].tolist())
        if kind == _CONTROL_TOKEN
    ]
    bytes_as_characters = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_as_characters]},
        "post_processor": None,
        "decoder": bytes_as_characters,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def main(descriptor: int, gguf: str, folder: str) -> None:
    """Convert. Exits with 1, and the reason in the socket, where that fails."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            convert(Path(gguf), Path(folder))
        except Exception as error:  # MLX's, or of a file that cannot be written
            send_all(connection, one_line(error).encode())
            sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
