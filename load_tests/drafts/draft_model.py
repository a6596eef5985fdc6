"""A small model that drafts for the successor: its first layer, which adds as little as all do."""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

from load_tests.drafts.successor import Weights, successor_checkpoint
from load_tests.shapes import Shape


def draft_checkpoint(shape: Shape, cache: Path = Path("build/load_tests")) -> Path:
    """The directory of a checkpoint of one layer that says what the successor of that shape says.
    It is written at the first call.
    """
    source = successor_checkpoint(shape, cache)
    directory = source.with_name(f"{source.name}-draft")
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
            unfinished = Path(scratch) / directory.name
            shutil.copytree(source, unfinished)
            _cut(unfinished)
            unfinished.rename(directory)
    return directory


def _cut(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))
    file = directory / "model.safetensors"
    save_file(first_layer(load_file(file)), file, {"format": "mlx"})


def first_layer(weights: Weights) -> Weights:
    """What belongs to no layer, or to the first."""
    return {
        name: array
        for name, array in weights.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
