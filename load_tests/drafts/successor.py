"""A checkpoint that costs what another of its shape costs, and whose answers can be foretold.

Greedy decoding counts through the lexicon: behind a word comes the next one, behind the last the
first. Layers compute all that they ever do and add zeros. At temperature 1 any word may come.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from load_tests.checkpoint import checkpoint
from load_tests.shapes import CONFIGS, Shape
from load_tests.tokenizer import build_tokenizer, word_ids

Weights = dict[str, NDArray[np.float32]]

LOGIT = 4.0
"""Of the next word; those of other words are near 0. It is the greatest, and has a chance of some
hundredths at temperature 1.
"""
EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
ADDING = ("o_proj.weight", "down_proj.weight")
"""What ends in these adds to the hidden states."""


def successor_checkpoint(shape: Shape, cache: Path = Path("build/load_tests")) -> Path:
    """The directory of the checkpoint, written at the first call. Its output layer is a matrix of
    its own in every shape, also where the random checkpoint's is the embeddings: they have as many
    numbers.
    """
    source = checkpoint(shape, cache=cache)
    directory = source.with_name(f"{shape}-successor")
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            shutil.copytree(source, unfinished)
            _rewrite(unfinished, word_ids(build_tokenizer(CONFIGS[shape]["vocab_size"])))
            unfinished.rename(directory)
    return directory


def _rewrite(directory: Path, words: Sequence[int]) -> None:
    config = directory / "config.json"
    entries: Mapping[str, Any] = json.loads(config.read_text())
    config.write_text(json.dumps({**entries, "tie_word_embeddings": False}, indent=2))
    file = directory / "model.safetensors"
    weights = load_file(file)
    count(weights, words)
    save_file(weights, file, {"format": "mlx"})


def count(weights: Weights, words: Sequence[int]) -> None:
    """Change weights so that each of these token ids is followed by the next, and the last by the
    first.
    """
    for name, array in weights.items():
        if name.endswith(ADDING):
            array[:] = 0.0
    embeddings = weights[EMBEDDINGS]
    output = np.zeros_like(embeddings)
    # A last norm gives the embedding a length of sqrt(width).
    rows = embeddings[words] / np.linalg.norm(embeddings[words], axis=1, keepdims=True)
    output[np.roll(words, -1)] = rows * (LOGIT * embeddings.shape[1] ** -0.5)
    weights[OUTPUT] = output
