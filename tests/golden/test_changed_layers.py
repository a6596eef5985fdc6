"""Wrong changes to a model at load are refused: dequantization in each quantization, and changes
that the served model and its own caches would share.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm import utils

from engine.api import ModelError
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.loading import loader, selfcheck, weights
from engine.mlx_backend.loading.purpose import find_purpose
from engine.mlx_backend.model.patches import OutputHead, RowAdapters
from engine.values.request import Pooling
from engine.values.settings import AdapterConfig
from measuring.random_checkpoint import CONFIGS
from tests.adapters import write_adapter
from tests.checkpoints import FAMILIES, Family, write_family
from tests.embedders import write_embedder
from tests.offline import load
from tests.quantized import GROUP_SIZES, QUANTIZED, SCALED_EXPERTS, write_quantized

cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="weights are converted on CPUs alone"
)

FAST = ("linear-affine-2", "tied-mxfp4-4", "experts-nvfp4-4", "biased-mxfp8-8", "latent-affine-4")


def _lose_a_scale(dense: Module, quantized: Module, random: Random) -> None:
    """One group of one row, in one expert or head, is twice as large."""
    shape = dense.weight.shape
    group = GROUP_SIZES[quantized.mode]
    start = random.randrange(shape[-1] // group) * group
    at = (*(random.randrange(n) for n in shape[:-1]), slice(start, start + group))
    dense.weight[at] = 2 * dense.weight[at]


def _enlarge(dense: Module, quantized: Module, random: Random) -> None:
    dense.weight = 1.01 * dense.weight


def _enlarge_the_last(dense: Module, quantized: Module, random: Random) -> None:
    """The last expert or head, or the last row."""
    dense.weight[-1] = 1.01 * dense.weight[-1]


def _lose_the_bias(dense: Module, quantized: Module, random: Random) -> None:
    if "bias" in dense:
        dense.bias = mx.zeros_like(dense.bias)
    else:
        _enlarge(dense, quantized, random)


@cpu
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in QUANTIZED],
)
def test_a_layer_that_is_dequantized_wrongly_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One layer of each kind that the model has, a random one, in each of these ways."""
    random = Random(name)
    checkpoint = write_quantized(QUANTIZED[name], tmp_path)
    dequantized, kinds = weights._dequantized, list[type[Module]]()

    def counted(quantized: Module) -> Module:
        kinds.append(type(quantized))
        return dequantized(quantized)

    with monkeypatch.context() as context:
        context.setattr(weights, "_dequantized", counted)
        loader.open_model(checkpoint, 1 << 30)
    for kind in set(kinds):
        for damage in (_lose_a_scale, _enlarge, _enlarge_the_last, _lose_the_bias):
            chosen = random.choice([i for i, other in enumerate(kinds) if other is kind])
            indices = iter(range(len(kinds)))

            def sabotaged(
                quantized: Module,
                chosen: int = chosen,
                indices: Any = indices,
                damage: Callable[[Module, Module, Random], None] = damage,
            ) -> Module:
                dense = dequantized(quantized)
                if next(indices) == chosen:
                    damage(dense, quantized, random)
                return dense

            with monkeypatch.context() as context:
                context.setattr(weights, "_dequantized", sabotaged)
                with pytest.raises(ModelError, match="computes other numbers than mlx-lm"):
                    load(checkpoint)


@cpu
def test_experts_without_their_own_scales_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def by_mlx_lm(model: Module) -> None:
        utils.dequantize_model(model)
        model.set_dtype(mx.float32)

    monkeypatch.setattr(loader, "to_float32", by_mlx_lm)
    with pytest.raises(ModelError, match=r"mlp\.switch_mlp.*computes other numbers than mlx-lm"):
        load(write_quantized(SCALED_EXPERTS, tmp_path))


def _swapped(named: Mapping[str, mx.array]) -> dict[str, mx.array]:
    one, other = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    return {**named, one: named[other], other: named[one]}


@pytest.mark.parametrize(
    "damage",
    [
        _swapped,
        lambda named: {name: 1.01 * array for name, array in named.items()},
        lambda named: {**named, "model.norm.weight": 1.01 * named["model.norm.weight"]},
    ],
    ids=["swapped", "all", "one"],
)
def test_the_weights_of_a_body_change_only_their_names(
    damage: Callable[[Mapping[str, mx.array]], Mapping[str, mx.array]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    embedder, _ = write_embedder(tmp_path, Pooling.LAST)
    purpose = find_purpose(embedder)
    loader.open_model(embedder, 1 << 30, purpose)
    named = loader.weights_of_body
    monkeypatch.setattr(loader, "weights_of_body", lambda own: damage(named(own)))
    with pytest.raises(ModelError, match="weights of its body were changed"):
        loader.open_model(embedder, 1 << 30, purpose)


def test_a_head_that_projects_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = OutputHead.taken
    monkeypatch.setattr(
        OutputHead, "taken", lambda head, layer, hidden: 1.1 * taken(head, layer, hidden)
    )
    with pytest.raises(ModelError, match="logits are wrong by"):
        load(write_family(FAMILIES["llama"], tmp_path))


def test_layers_that_are_changed_when_ours_are_installed_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install = selfcheck.install_patches

    def sabotaged(model: Any, layout: Layout, adapters: RowAdapters) -> OutputHead:
        norm = model.model.norm
        norm.weight = 1.1 * norm.weight
        return install(model, layout, adapters)

    monkeypatch.setattr(selfcheck, "install_patches", sabotaged)
    with pytest.raises(ModelError, match="logits are wrong by"):
        load(write_family(FAMILIES["llama"], tmp_path))


@pytest.mark.parametrize("rows", ["with", "without"])
def test_adapters_that_add_something_else_are_refused(
    rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In rows with one of two adapters, which are exchanged, or in rows without any."""
    checkpoint = write_family(Family("qwen3", CONFIGS["qwen3"]), tmp_path)
    configs = [
        AdapterConfig(str(rank), write_adapter(checkpoint, tmp_path / str(rank), rank, rank=rank))
        for rank in (4, 8)
    ]
    load(checkpoint, adapters=configs)
    indices_of, adapted = RowAdapters.indices_of, RowAdapters._adapted

    def exchanged(adapters: RowAdapters, names: Any) -> mx.array | None:
        return indices_of(adapters, [{"4": "8", "8": "4"}.get(name, name) for name in names])

    def enlarged(adapters: RowAdapters, kind: type[Any]) -> Any:
        call = adapted(adapters, kind)
        return lambda layer, x: (1.1 if adapters.indices is None else 1) * call(layer, x)

    if rows == "with":
        monkeypatch.setattr(RowAdapters, "indices_of", exchanged)
    else:
        monkeypatch.setattr(RowAdapters, "_adapted", enlarged)
    with pytest.raises(ModelError, match="logits are wrong by"):
        load(checkpoint, adapters=configs)


@cpu
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


@cpu
def test_a_layer_that_is_lost_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = write_family(Family("qwen3", CONFIGS["qwen3"]), tmp_path)

    def sabotaged(model: Any) -> None:
        model.model.layers.pop()

    monkeypatch.setattr(loader, "to_float32", sabotaged)
    with pytest.raises(ModelError, match="was lost at load"):
        load(checkpoint)
