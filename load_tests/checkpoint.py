"""Random checkpoints on which servers do equal work.

`qwen3`, 27 M parameters, has full attention in every layer; of the eight layers of `hybrid`, 28 M
and Granite-shaped, six are Mamba2 and two attention. `agent` is a `qwen3` of two layers, 3.5 M,
with a context of 65,536 tokens and a template that knows tools; `wide` has the KV of a model of 8 G
parameters, 128 KiB a token, and hardly anything else. `real` is of a real model's shape: 28 layers,
1,024 wide, 16 heads of 128 over 8, 151,936 tokens, 596 M parameters in 2.4 GB.

A single thing about their weights is not random: the output layer has a row of zeros, or nearly so,
for every token that is no word of the lexicon. Such a token's logit is about 0, which is never the
greatest of thousands of random ones, so greedy decoding writes words alone: no answer ends early,
and none changes when a client sends it back as text.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

from engine.mlx_backend.loading.source import DEFAULT_CHECKPOINT
from load_tests.random_checkpoint import CHATML, write_checkpoint
from load_tests.tokenizer import build_tokenizer, word_ids

Shape = Literal["qwen3", "hybrid", "agent", "wide", "real"]

_COMMON: Mapping[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_QWEN3: Mapping[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 1344,
    "head_dim": 64,
    "hidden_act": "silu",
}
CONFIGS: Mapping[Shape, Mapping[str, Any]] = {
    "qwen3": _QWEN3,
    "agent": {
        **_QWEN3,
        "hidden_size": 256,
        "intermediate_size": 672,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65_536,
    },
    "real": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "wide": {
        **_QWEN3,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    },
    "hybrid": {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "intermediate_size": 1024,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "position_embedding_type": "nope",
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
}


TEMPLATES: Mapping[Shape, str] = {
    "qwen3": CHATML,
    "agent": json.loads((DEFAULT_CHECKPOINT / "tokenizer_config.json").read_text())[
        "chat_template"
    ],
    "wide": CHATML,
    "hybrid": CHATML,
    "real": CHATML,
}


def checkpoint(
    shape: Shape = "qwen3", seed: int = 0, cache: Path = Path("build/load_tests")
) -> Path:
    """The directory of the float32 checkpoint with these weights, written at the first call."""
    directory = cache.resolve() / f"{shape}-seed{seed}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            tokenizer = build_tokenizer(CONFIGS[shape]["vocab_size"])
            template = TEMPLATES[shape]
            write_checkpoint(
                unfinished, CONFIGS[shape], seed, tokenizer, mx.float32, chat_template=template
            )
            silence_all_but(word_ids(tokenizer), unfinished / "model.safetensors")
            unfinished.rename(directory)
    return directory


def silence_all_but(token_ids: Sequence[int], weights_file: Path) -> None:
    """Zero the other tokens' rows of the output layer, in place. Where that is the embeddings, make
    them a thousand times smaller: norms undo it where they are read.
    """
    weights = load_file(weights_file)
    name, factor = ("lm_head.weight", 0.0)
    if name not in weights:
        name, factor = ("model.embed_tokens.weight", 1e-3)
    rows = weights[name]
    rows[np.setdiff1d(np.arange(len(rows)), token_ids)] *= factor
    save_file(weights, weights_file, {"format": "mlx"})
