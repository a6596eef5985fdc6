"""Tiny random checkpoints of several model families, written at test time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.values.settings import KVFormat
from measuring.random_checkpoint import (
    CONFIGS,
    QuantizationRule,
    tiny_tokenizer,
    write_checkpoint,
)

_ARCHITECTURES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "gemma3n",
    "gemma4_text",
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "lfm2",
    "jamba",
    "nemotron_h",
    "mamba2",
    "rwkv7",
    "recurrent_gemma",
    "deepseek_v3",
    "deepseek_v32",
    "llama4",
)
"""With every kind of cache. Their configs are those of the conformance run."""


UNROUNDED = {"head_dim": 24, "index_head_dim": 24}
"""Sizes of vectors that DeepSeek-V4.1 does not round to 4 and 8 bits. Where it does, a number that
differs in its last bits in a forward of another shape may be rounded to the next code.
"""


def _mixed_bits(path: str, module: object) -> bool | dict[str, int]:
    """More bits for what is written back into the residual stream."""
    return {"bits": 6 if "down_proj" in path else 4, "group_size": 32}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture to test with, and how its checkpoint is quantized."""

    name: str
    config: dict[str, Any]
    quantization: dict[str, Any] | None = None
    rule: QuantizationRule | None = None
    kv_format: KVFormat = KVFormat.AUTO  # in which it is served


def _stored_as(kv_format: KVFormat, name: str) -> Family:
    """An architecture with K and V in a format, and with heads that groups of numbers divide."""
    return Family(f"{name}_{kv_format}", {**CONFIGS[name], "head_dim": 32}, kv_format=kv_format)


FAMILIES = {
    family.name: family
    for family in (
        *(Family(name, CONFIGS[name]) for name in _ARCHITECTURES),
        Family("deepseek_v41", {**CONFIGS["deepseek_v41"], **UNROUNDED}),
        Family("qwen3_4bit", CONFIGS["qwen3"], {"bits": 4, "group_size": 32}),
        Family("qwen3_8bit", CONFIGS["qwen3"], {"bits": 8, "group_size": 32}),
        Family("qwen3_mixed", CONFIGS["qwen3"], {"bits": 4, "group_size": 32}, _mixed_bits),
        Family("qwen3_next_4bit", CONFIGS["qwen3_next"], {"bits": 4, "group_size": 32}),
        *(_stored_as(format, "qwen3") for format in (KVFormat.Q8, KVFormat.K8V4, KVFormat.BF16)),
        *(_stored_as(KVFormat.Q8, name) for name in ("gemma3_text", "qwen3_next", "gemma4_text")),
        _stored_as(KVFormat.K8V4, "gpt_oss"),
    )
}

SHALLOW = Family("shallow", {**CONFIGS["qwen3"], "num_hidden_layers": 1})
"""Of one layer, for tests of what stands above a model."""


def write_family(family: Family, parent: Path, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Path:
    """Write the family's checkpoint below `parent`, unless it is there already."""
    directory = parent / f"{family.name}-{seed}"
    write_checkpoint(
        directory, family.config, seed, tiny_tokenizer(), dtype, family.quantization, family.rule
    )
    return directory
