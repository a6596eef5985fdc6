"""Checkpoints on which servers do equal work: random ones of every shape in shapes.py, and copies
of real ones in a dtype for which no server has a shortcut.

A single thing about random weights is not random: the output layer has a row of zeros, or nearly
so, for every token that is no word of the lexicon. Such a token's logit is about 0, which is never
the greatest of thousands of random ones, so greedy decoding writes words alone: no answer ends
early, and none changes when a client sends it back as text.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import mlx.core as mx
from mlx_lm import convert

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT, fingerprint
from engine.mlx_backend.loading.locate import find_checkpoint
from load_tests import vision
from load_tests.shapes import CONFIGS, Shape
from load_tests.tokenizer import SPECIAL_TOKENS, build_tokenizer, word_ids
from measuring.random_checkpoint import CHATML, write_checkpoint

TEMPLATES: Mapping[Shape, str] = {
    "qwen3": CHATML,
    "agent": json.loads((DEFAULT_CHECKPOINT / "tokenizer_config.json").read_text())[
        "chat_template"
    ],
    "wide": CHATML,
    "thin": CHATML,
    "hybrid": CHATML,
    "real": CHATML,
    "vision": vision.TEMPLATE,
}


CACHE = Path("build/load_tests")


def served_checkpoint(name: str) -> Path:
    """The directory of the random checkpoint of that shape, or else of the copy of a real one: a
    directory's or a model's. Raises ModelError.
    """
    for shape in get_args(Shape):
        if name == shape:
            return checkpoint(shape)
    return plain_copy(find_checkpoint(name, download=True))


def plain_copy(original: Path, cache: Path = CACHE) -> Path:
    """The directory of the same weights, written at the first call: not quantized, in float32 on a
    CPU, in bfloat16 on a GPU. On a CPU, where quantized products are slow, Rootstock dequantizes
    what it loads, and other servers do not.
    """
    dtype = str(_dtype()).rpartition(".")[2]
    stamp = fingerprint(original)[:12]
    directory = cache.resolve() / f"{original.name}-{stamp}-{dtype}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            is_quantized = "quantization" in json.loads((original / "config.json").read_text())
            convert(str(original), str(unfinished), dtype=dtype, dequantize=is_quantized)
            unfinished.rename(directory)
    return directory


def _dtype() -> mx.Dtype:
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def checkpoint(shape: Shape = "qwen3", seed: int = 0, cache: Path = CACHE) -> Path:
    """The directory of the checkpoint with these weights, written at the first call: in float32 on
    a CPU, in bfloat16 on a GPU.
    """
    dtype = _dtype()
    directory = cache.resolve() / f"{shape}-seed{seed}"
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            config = CONFIGS[shape]
            takes_images = "vision_config" in config
            special = vision.SPECIAL if takes_images else SPECIAL_TOKENS
            tokenizer = build_tokenizer(config["vocab_size"], special)
            if takes_images:
                config = vision.with_token_ids(config, tokenizer)
            template = TEMPLATES[shape]
            write_checkpoint(unfinished, config, seed, tokenizer, dtype, chat_template=template)
            if takes_images:
                vision.add_tower(unfinished, config, seed, dtype)
            silence_all_but(word_ids(tokenizer), unfinished / "model.safetensors")
            unfinished.rename(directory)
    return directory


def silence_all_but(token_ids: Sequence[int], weights_file: Path) -> None:
    """Zero the other tokens' rows of the output layer, in place. Where that is the embeddings, make
    them a thousand times smaller: norms undo it where they are read.
    """
    weights = mx.load(str(weights_file))
    assert isinstance(weights, dict)
    name, factor = ("lm_head.weight", 0.0)
    if name not in weights:
        name, factor = ("model.embed_tokens.weight", 1e-3)
    rows = weights[name]
    factors = mx.full((len(rows), 1), factor, rows.dtype)
    factors[mx.array(list(token_ids))] = 1
    weights[name] = rows * factors
    mx.eval(weights)  # before the file that they are read from is written
    mx.save_safetensors(str(weights_file), weights, {"format": "mlx"})
