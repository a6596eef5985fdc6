"""Writes the checkpoint directory that ships with the package, and its README."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.models.qwen3 import Model
from transformers import PreTrainedTokenizerFast

from engine.mlx_backend.loading.weights import named_weights
from tools.demo_model.score import Score
from tools.demo_model.tokens import CHAT_TEMPLATE
from tools.demo_model.train import CONFIG

_README = files(__package__).joinpath("README.template.md")
_FLOAT16_BYTES = 2
_LAST_NORM = "model.norm.weight"
_SHARPNESS = 4.0  # of the logits: clients sample at temperature 1 unless they say otherwise


def write_checkpoint(directory: Path, model: Model, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config.json, float16 weights, the tokenizer and its chat template, as mlx-lm loads
    them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = named_weights(model)
    weights[_LAST_NORM] = weights[_LAST_NORM] * _SHARPNESS
    weights = {name: array.astype(mx.float16) for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    config = {**CONFIG, "eos_token_id": tokenizer.eos_token_id}
    _write_json(directory / "config.json", config)
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": tokenizer.chat_template,
        },
    )


def read_weights(directory: Path) -> Mapping[str, mx.array]:
    """The weights of a checkpoint as they were before `write_checkpoint` sharpened them."""
    loaded = cast(dict[str, mx.array], mx.load(str(directory / "model.safetensors")))
    weights = {name: array.astype(mx.float32) for name, array in loaded.items()}
    return {**weights, _LAST_NORM: weights[_LAST_NORM] / _SHARPNESS}


def read_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer with the present chat template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    return cast(PreTrainedTokenizerFast, tokenizer)


def write_readme(directory: Path, scores: Sequence[Score]) -> None:
    """Write the README: what the model is, and its scores."""
    rows = [
        f"| {score.task} | {score.asked} | {score.right / score.asked:.1%} "
        f"| {score.stopped / score.asked:.1%} |"
        for score in scores
    ]
    weights = (directory / "model.safetensors").stat().st_size
    text = _README.read_text("utf-8").format(
        scores="\n".join(rows),
        parameters=f"{weights / _FLOAT16_BYTES / 1e6:.1f}",
        megabytes=f"{sum(file.stat().st_size for file in directory.iterdir()) / 1e6:.1f}",
    )
    (directory / "README.md").write_text(text, "utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
