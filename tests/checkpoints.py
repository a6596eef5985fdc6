"""Tiny random checkpoints of several model families, written at test time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from engine.mlx_backend.checkpoint import QuantizationRule, train_tokenizer, write_checkpoint
from tests.cache_configs import CONFIGS

VOCAB_SIZE = 320
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_QWEN3 = {**_COMMON, "model_type": "qwen3"}


def _mixed_bits(path: str, module: object) -> bool | dict[str, int]:
    """More bits for what is written back into the residual stream."""
    return {"bits": 6 if "down_proj" in path else 4, "group_size": 32}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture to test with, and how its checkpoint is quantized."""

    name: str
    config: dict[str, Any]
    quantization: dict[str, int] | None = None
    rule: QuantizationRule | None = None


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", {**_COMMON, "model_type": "llama"}),
        Family("qwen3", _QWEN3),
        Family("qwen3_moe", {**_COMMON, **_MOE, "model_type": "qwen3_moe"}),
        Family("qwen3_4bit", _QWEN3, {"bits": 4, "group_size": 32}),
        Family("qwen3_8bit", _QWEN3, {"bits": 8, "group_size": 32}),
        Family("qwen3_mixed", _QWEN3, {"bits": 4, "group_size": 32}, _mixed_bits),
        *(Family(name, config) for name, config in CONFIGS.items()),
        Family("qwen3_next_4bit", CONFIGS["qwen3_next"], {"bits": 4, "group_size": 32}),
    )
}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of a few merges."""
    return train_tokenizer(["the cat sat on the mat and the dog sat on the log\n"] * 4, VOCAB_SIZE)


def write_family(family: Family, parent: Path, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
    """Write the family's checkpoint below `parent`, unless it is there already."""
    directory = parent / f"{family.name}-{seed}"
    write_checkpoint(
        directory, family.config, seed, tiny_tokenizer(), dtype, family.quantization, family.rule
    )
    return directory
