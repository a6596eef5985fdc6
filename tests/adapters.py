"""Random LoRA folders, written with mlx-lm's own tuner."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

from engine.mlx_backend.loading.adapter_files import CONFIG, WEIGHTS
from engine.mlx_backend.loading.weights import named_weights

SCALE = 4.0
"""With which a random adapter changes what a tiny model says."""


def write_adapter(
    checkpoint: Path,
    directory: Path,
    seed: int,
    *,
    rank: int = 4,
    n_layers: int = 1000,
    keys: Sequence[str] | None = None,
) -> Path:
    """An adapter of the last layers of a model; `keys` as in mlx-lm, where None is all of them."""
    parameters: dict[str, Any] = {"rank": rank, "scale": SCALE, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    model, _ = load_model(checkpoint)
    linear_to_lora_layers(model, n_layers, parameters)
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(array.shape) * array.shape[0] ** -0.5
        for name, array in named_weights(model).items()
        if name.endswith((".lora_a", ".lora_b"))
    }
    config = {"fine_tune_type": "lora", "num_layers": n_layers, "lora_parameters": parameters}
    return write_folder(directory, weights, config)


def write_folder(
    directory: Path, weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Path:
    """Any tensors and any configuration, where an adapter has its own."""
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / WEIGHTS), dict(weights))
    (directory / CONFIG).write_text(json.dumps(config), "utf-8")
    return directory


def adapted_peer(checkpoint: Path, directory: Path) -> Module:
    """The model with the adapter, as mlx-lm loads both."""
    model: Module = load_adapters(load_model(checkpoint)[0], str(directory))
    model.eval()
    return model
