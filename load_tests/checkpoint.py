"""A random Qwen3-shaped checkpoint of 27 M parameters on which servers do equal work.

A single thing about its weights is not random: the output layer has a row of zeros for every token
that is no word of the lexicon. Such a token's logit is 0, which is never the greatest of thousands
of random ones, so greedy decoding writes words alone: no answer ends early, and none changes when a
client sends it back as text.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

from engine.mlx_backend.checkpoint import write_checkpoint
from load_tests.tokenizer import build_tokenizer, word_ids

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1344,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def checkpoint(seed: int = 0, cache: Path = Path("build/load_tests")) -> Path:
    """The directory of the float32 checkpoint with these weights, written at the first call."""
    directory = cache.resolve() / f"qwen3-27m-seed{seed}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            tokenizer = build_tokenizer()
            write_checkpoint(unfinished, CONFIG, seed, tokenizer, mx.float32)
            silence_all_but(word_ids(tokenizer), unfinished / "model.safetensors")
            unfinished.rename(directory)
    return directory


def silence_all_but(token_ids: Sequence[int], weights_file: Path) -> None:
    """Zero the other tokens' rows of the output layer, in place."""
    weights = load_file(weights_file)
    rows = weights["lm_head.weight"]
    rows[np.setdiff1d(np.arange(len(rows)), token_ids)] = 0
    save_file(weights, weights_file, {"format": "mlx"})
