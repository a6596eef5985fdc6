"""Random checkpoints of mlx-lm's architectures, and tiny configs of all of them.

Tests, load tests, conformance and `doctor --measure` use the same ones.
"""

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.mlx_backend.loading.weights import named_weights


def _read_configs() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)["architectures"]
    return {name: {"model_type": name, **entry} for name, entry in entries.items()}


CONFIGS = _read_configs()
"""A tiny config of each architecture, by name."""

VOCAB_SIZE = 320
"""The vocabulary of each of these configs."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QuantizationRule = Callable[[str, Module], bool | dict[str, int]]
"""mlx-lm's quant_predicate: for a module's path, whether it is quantized, or its bits."""


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    seed: int,
    tokenizer: Tokenizer,
    dtype: mx.Dtype = mx.float16,
    quantization: Mapping[str, Any] | None = None,
    rule: QuantizationRule | None = None,
    chat_template: str = CHATML,
) -> None:
    """Write a random checkpoint that mlx-lm and transformers load.

    `config` is its config.json and names the architecture by `model_type`. `quantization`, when
    given, are arguments of mlx-lm's `quantize_model`, such as `bits` and `group_size`, and `rule`
    makes exceptions for single modules. The same arguments write the same weights. The directory is
    created atomically; an existing one stays as it is.
    """
    if directory.exists():
        return
    config = {**config, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    model = random_model(config, seed, dtype)
    if quantization is not None:
        model, config = quantize_model(model, dict(config), **quantization, quant_predicate=rule)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        _write_files(unfinished, model, config, tokenizer, chat_template)
        unfinished.rename(directory)
    except OSError:
        if not directory.exists():  # another process may have written it first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def random_model(config: Mapping[str, Any], seed: int, dtype: mx.Dtype) -> Module:
    """An mlx-lm model with normally distributed weights of variance 1 / fan-in.

    Vectors, and weights that a model packs itself, are as mlx-lm initializes them.
    """
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)  # some modules draw their vectors when they are made
    model: Module = architecture.Model(architecture.ModelArgs.from_dict(dict(config)))
    weights = named_weights(model)
    keys = mx.random.split(mx.random.key(seed), len(weights))
    drawn = [
        (name, mx.random.normal(array.shape, key=key) * array.shape[-1] ** -0.5)
        if array.ndim > 1 and mx.issubdtype(array.dtype, mx.floating)
        else (name, array)
        for (name, array), key in zip(weights.items(), keys, strict=True)
    ]
    model.update(tree_unflatten(drawn))
    model.set_dtype(dtype)
    return model


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. ChatML's special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few merges with VOCAB_SIZE tokens. Every call returns a new one: the
    caller may add tokens to it.
    """
    return Tokenizer.from_str(_tiny_tokenizer_json())


@cache
def _tiny_tokenizer_json() -> str:
    sentence = "the cat sat on the mat and the dog sat on the log\n"
    return train_tokenizer([sentence] * 4, VOCAB_SIZE).to_str()


def _write_files(
    directory: Path,
    model: Module,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    chat_template: str,
) -> None:
    file = str(directory / "model.safetensors")
    mx.save_safetensors(file, named_weights(model), {"format": "mlx"})
    _write_json(directory / "config.json", config)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": chat_template,
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
