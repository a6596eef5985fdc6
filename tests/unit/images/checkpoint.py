"""Checkpoints of which there are the files that say how images are prepared, and no weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring.random_checkpoint import tiny_tokenizer
from tests.vision_checkpoints import VISION_FAMILIES, VisionFamily


@dataclass(frozen=True)
class Published:
    """What the files of a published checkpoint say, where that differs from the tiny ones."""

    family: str
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    patch: int = 14  # of the tower
    vision: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()


PUBLISHED = {
    "Qwen2.5-VL-7B": Published(
        "qwen2_5_vl", {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14}
    ),
    "Qwen3-VL-8B": Published(
        "qwen3_vl",
        {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16},
        patch=16,
    ),
    "pixtral-12b": Published(
        "pixtral",
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16},
        patch=16,
    ),
    "Mistral-Small-3.1": Published(
        "mistral3", {"size": {"longest_edge": 1540}, "patch_size": 14}, {"patch_size": 14}
    ),
    "gemma-3-4b": Published(
        "gemma3",
        {"size": {"height": 896, "width": 896}, "image_seq_length": 256},
        {"image_seq_length": 256},
        {"mm_tokens_per_image": 256},
    ),
    "gemma-4-E4B": Published("gemma4", {"max_soft_tokens": 280, "patch_size": 16}, patch=16),
    "Llama-4-Scout": Published(
        "llama4",
        {"max_patches": 16, "size": {"height": 336, "width": 336}},
        vision={"image_size": 336},
    ),
    "LFM2-VL-1.6B": Published(
        "lfm2_vl",
        {
            "encoder_patch_size": 16,
            "max_image_tokens": 256,
            "min_image_tokens": 64,
            "max_tiles": 10,
            "tile_size": 512,
        },
        patch=16,
        tokens=tuple(
            f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)
        ),
    ),
    "Kimi-VL-A3B": Published("kimi_vl", {"in_token_limit": 4096, "patch_size": 14}),
}


def write_settings(name: str, directory: Path) -> Path:
    """Write the files of a tiny or a published checkpoint into an empty directory."""
    published = PUBLISHED.get(name, Published("", {}))
    family_name = published.family or name
    family: VisionFamily = VISION_FAMILIES[family_name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([*family.tokens, *published.tokens])
    special = {token: tokenizer.token_to_id(token) for token in family.tokens}
    vision = {**family.vision_config, **published.vision}
    if published.family:
        vision["patch_size"] = published.patch
    config = {key: special.get(value, value) for key, value in family.config.items()}
    preprocessor = {**family.preprocessor, **published.preprocessor}
    for files, content in {
        "config.json": {
            "model_type": family_name,
            "text_config": family.text_config,
            "vision_config": vision,
            **config,
            **published.config,
        },
        "preprocessor_config.json": preprocessor,
        "processor_config.json": {**family.processor, **published.processor},
    }.items():
        (directory / files).write_text(json.dumps(content))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
