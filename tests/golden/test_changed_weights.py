"""Weights that are changed at load are compared with mlx-lm's: a wrong change is refused.

Each test makes one of the changes wrong, in a way that the comparison of the served model with
itself cannot see.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

from engine.api import ModelError
from engine.mlx_backend.loading import loader, weights
from engine.mlx_backend.model import patches
from engine.values.settings import AdapterConfig
from measuring.random_checkpoint import CONFIGS
from tests.adapters import write_adapter
from tests.checkpoints import Family, write_family
from tests.offline import load

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="weights are converted on CPUs alone"
)

Wrong = Callable[[Module, Random], None]
"""Changes a dequantized layer in place, somewhere."""


def _scale_all(layer: Module, random: Random) -> None:
    layer.weight = layer.weight * 1.01


def _scale_a_row(layer: Module, random: Random) -> None:
    row = random.randrange(layer.weight.shape[-2])
    factors = mx.ones((layer.weight.shape[-2], 1))
    factors[row] = 1.01
    layer.weight = layer.weight * factors


def _negate_a_column(layer: Module, random: Random) -> None:
    column = random.randrange(layer.weight.shape[-1])
    factors = mx.ones((layer.weight.shape[-1],))
    factors[column] = -1
    layer.weight = layer.weight * factors


def _swap_rows(layer: Module, random: Random) -> None:
    layer.weight = layer.weight[..., ::-1, :]


QUANTIZED = {"bits": 4, "group_size": 32}


@pytest.mark.parametrize("seed", range(8))
def test_a_wrong_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, seed: int, tmp_path: Path
) -> None:
    """One layer of those that are dequantized: a projection, an expert, or the embedding."""
    random = Random(seed)
    architecture = random.choice(["qwen3", "qwen3_moe", "deepseek_v3"])
    wrong: Wrong = random.choice([_scale_all, _scale_a_row, _negate_a_column, _swap_rows])
    checkpoint = write_family(Family(architecture, CONFIGS[architecture], QUANTIZED), tmp_path)
    dequantized, layers = weights._dequantized, list[Module]()

    def recorded(layer: Module) -> Module:
        layers.append(dequantized(layer))
        return layers[-1]

    monkeypatch.setattr(weights, "_dequantized", recorded)
    load(checkpoint)
    chosen = random.randrange(len(layers))
    layers.clear()

    def sabotaged(layer: Module) -> Module:
        dense = recorded(layer)
        if len(layers) == chosen + 1:
            wrong(dense, random)
        return dense

    monkeypatch.setattr(weights, "_dequantized", sabotaged)
    with pytest.raises(ModelError, match="computes other numbers than mlx-lm"):
        load(checkpoint)


def test_wrong_numbers_after_a_conversion_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = write_family(Family("half", CONFIGS["qwen3"]), tmp_path, dtype=mx.float16)
    to_float32 = weights.to_float32

    def sabotaged(model: Any) -> None:
        to_float32(model)
        norm = model.model.layers[1].input_layernorm
        norm.weight = norm.weight * 1.01

    monkeypatch.setattr(loader, "to_float32", sabotaged)
    with pytest.raises(ModelError, match=r"layers\.1\.input_layernorm was changed"):
        load(checkpoint)


def test_a_wrong_rope_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    config = {**CONFIGS["llama"], **scaling}
    checkpoint = write_family(Family("dynamic", config), tmp_path)
    load(checkpoint)

    def other_base(dims: int, traditional: bool, base: float) -> RoPE:
        return RoPE(dims, traditional, base * 1.01)

    monkeypatch.setattr(loader, "RoPE", other_base)
    with pytest.raises(ModelError, match="computes other numbers than mlx-lm"):
        load(checkpoint)


def test_a_layer_that_is_lost_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_family(Family("qwen3", CONFIGS["qwen3"]), tmp_path)

    def sabotaged(model: Any) -> None:
        model.model.layers.pop()

    monkeypatch.setattr(loader, "to_float32", sabotaged)
    with pytest.raises(ModelError, match="was lost at load"):
        load(checkpoint)


def test_wrong_adapters_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_family(Family("qwen3", CONFIGS["qwen3"]), tmp_path)
    adapter = AdapterConfig("one", write_adapter(checkpoint, tmp_path / "one", seed=1, rank=4))
    load(checkpoint, adapters=[adapter])
    stacked = patches._stacked

    def sabotaged(*arguments: Any) -> tuple[mx.array, mx.array]:
        a, b = stacked(*arguments)
        return a, b * 1.1

    monkeypatch.setattr(patches, "_stacked", sabotaged)
    with pytest.raises(ModelError):
        load(checkpoint, adapters=[adapter])
