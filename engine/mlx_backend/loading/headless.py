"""Checkpoints without an LM head, which embedders and rerankers may be, as mlx-lm can load them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm import utils

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, read_header

CLASSIFIER = "score.weight"
_HEAD = "lm_head."
_BODY = "model."

Weights: TypeAlias = dict[str, mx.array]
Classes: TypeAlias = Callable[..., tuple[type[Any], type[Any]]]


def model_config(checkpoint: Path) -> dict[str, Any]:
    """Fields to set in config.json, so that the body of the model loads by itself.

    The embedding then makes its logits, which are not used.
    """
    names = [name for file in checkpoint.glob(WEIGHTS) for name in read_header(file).spans]
    has_head = any(name.startswith(_HEAD) for name in names)
    return {} if has_head else {"tie_word_embeddings": True}


def classifier(checkpoint: Path) -> mx.array:
    """`[labels, dimensions]`, float32. Raises ModelError where there is none."""
    for file in checkpoint.glob(WEIGHTS):
        if CLASSIFIER in read_header(file).spans:
            tensors = mx.load(str(file))
            assert isinstance(tensors, dict), "safetensors are named"
            return tensors[CLASSIFIER].astype(mx.float32)
    raise ModelError(f"the classifier is missing: no weight file has {CLASSIFIER}")


def body(weights: Mapping[str, mx.array]) -> Weights:
    """As a generator's checkpoint has them: transformers writes the names of a body that is saved
    by itself without the prefix.
    """
    prefix = "" if any(name.startswith(_BODY) for name in weights) else _BODY
    return {
        name if name.startswith(_HEAD) else prefix + name: array
        for name, array in weights.items()
        if name != CLASSIFIER
    }


def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """The class of the model, which takes the weights of a body alone, and of its arguments."""
    model, args = utils._get_classes(config)

    has_own = hasattr(model, "sanitize")

    class Headless(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Weights) -> Weights:
            named = body(weights)
            return super().sanitize(named) if has_own else named

    return Headless, args
