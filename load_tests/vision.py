"""What makes a random checkpoint one that takes images: a tower, its processor, and a template.

Weights and settings have the names and layouts of the published Qwen3-VL.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from engine.mlx_backend.loading.weights import named_weights
from engine.mlx_backend.vision.tower import TOWERS
from load_tests.tokenizer import SPECIAL_TOKENS

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = (*SPECIAL_TOKENS, *VISION_TOKENS)
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or part['type'] == 'image_url' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_PREPROCESSOR = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},  # pixels, despite their names
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def with_token_ids(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The config with the ids of the tokens that stand for an image."""
    return {**config, **{name: tokenizer.token_to_id(token) for name, token in _IDS.items()}}


def add_tower(directory: Path, config: Mapping[str, Any], seed: int, dtype: mx.Dtype) -> None:
    """Add a random tower with its processor to a text model's checkpoint, in place. Weights of the
    text model are renamed as they are next to a tower.
    """
    file = str(directory / "model.safetensors")
    text = mx.load(file)
    assert isinstance(text, dict)
    weights = {_published(name): array for name, array in text.items()}
    weights |= _random_tower(config, seed, dtype)
    mx.eval(weights)  # before the file that they are read from is written
    mx.save_safetensors(file, weights, {"format": "pt"})
    vision = config["vision_config"]
    sizes = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    }
    preprocessor = directory / "preprocessor_config.json"
    preprocessor.write_text(json.dumps({**_PREPROCESSOR, **sizes}, indent=2))


def _published(name: str) -> str:
    head = "language_model.lm_head"
    if name.startswith(head):
        return name.removeprefix("language_model.")
    return name.replace("language_model.model.", "model.language_model.", 1)


def _random_tower(config: Mapping[str, Any], seed: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Weights of variance 1 / fan-in; vectors as a new module has them."""
    tower = TOWERS[config["model_type"]](config).vision_tower
    named = named_weights(tower)
    keys = mx.random.split(mx.random.key(seed + 1), len(named))
    weights = {}
    for (name, array), key in zip(named.items(), keys, strict=True):
        drawn = array
        if array.ndim > 1:
            fan_in = math.prod(array.shape[1:])
            drawn = mx.random.normal(array.shape, key=key) * fan_in**-0.5
        if array.ndim > 2:
            drawn = drawn.moveaxis(-1, 1)  # channels come first in PyTorch's convolutions
        weights[f"model.visual.{name}"] = drawn.astype(dtype)
    return weights
