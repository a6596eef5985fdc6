"""Weights in float32, which a CPU computes with where memory allows, and the check that layers
which were changed at load still compute what mlx-lm's layers compute.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QQLinear, QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from engine.api import ModelError
from engine.mlx_backend.model.plain_kernels import ternary_weight

_DENSE: dict[type[Module], type[Module]] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
    BitLinear: Linear,
}
"""The layers that can be dequantized, and what each becomes. A class derived from one of them may
compute something else, and stays quantized.
"""

_NVFP4_LARGEST = 6 * 448
"""The largest code times the largest scale of a group. An expert's own scale is what it becomes."""

_TOLERANCE = 1e-4
"""How far an output of a changed layer may be from mlx-lm's, relative to the output and the norm of
its weights. Sums in another order differ by 2e-6 in rows of 16,384 numbers.
"""

_SAMPLED_NUMBERS = 1 << 16
"""How many numbers of an array are compared that was only converted to another type."""

_NORM_STRIDE = 16
"""The norm of weights is estimated from every 16th column: only its order of size matters."""


def named_weights(model: Module) -> dict[str, mx.array]:
    """Every parameter of a model, by its dotted path."""
    return dict(tree_flatten(model.parameters()))


def to_float32(model: Module) -> None:
    """Make a model's weights float32, and dequantize its layers. All arrays stay lazy."""
    dense = [
        (path, _dequantized(module))
        for path, module in model.named_modules()
        if type(module) in _DENSE
    ]
    model.update_modules(tree_unflatten(dense))
    model.set_dtype(mx.float32, _is_converted)


def _is_converted(dtype: mx.Dtype) -> bool:
    return dtype != mx.float32 and bool(mx.issubdtype(dtype, mx.floating))


def _float32(scales: mx.array) -> mx.array:
    """Scales in float32; those that are codes themselves as they are."""
    return scales.astype(mx.float32) if _is_converted(scales.dtype) else scales


def _dequantized(module: Module) -> Module:
    """The layer without quantization.

    mlx-lm's `dequantize_model` rounds the weights to the precision of the scales, and omits the
    scale that each expert may have in addition to those of its groups.
    """

    biases: mx.array | None = module.get("biases")

    def dequantized(
        weight: mx.array, scales: mx.array, global_scale: mx.array | None = None
    ) -> mx.array:
        return mx.dequantize(
            weight,
            _float32(scales),
            None if biases is None else _float32(biases),
            module.group_size,
            module.bits,
            module.mode,
            global_scale,
            mx.float32,
        )

    of_experts = module.get("global_scale")
    if isinstance(module, BitLinear):
        weight = ternary_weight(module)
    elif of_experts is None:
        weight = dequantized(module.weight, module.scales)
    else:
        experts = zip(module.weight, module.scales, of_experts, strict=True)
        weight = mx.stack([dequantized(*expert) for expert in experts])
    dense: Module = _DENSE[type(module)](*weight.shape[::-1])
    dense.pop("bias", None)
    dense.weight = weight
    if "bias" in module:
        dense.bias = module.bias
    return dense


def gpu_only(model: Module) -> str:
    """What of a model MLX computes on GPUs alone, and what can be done; "" if nothing."""
    modules = [module for _, module in model.named_modules()]
    if any(isinstance(module, QQLinear) for module in modules):
        return (
            "it quantizes activations, which MLX does on GPUs alone: without quantize_activations "
            "in config.json its weights are multiplied by activations as they are"
        )
    if any(module.get("global_scale") is not None for module in modules):
        return (
            "its experts have scales of their own (global_scale), by which MLX multiplies on GPUs "
            "alone, and there is no memory for its weights in float32"
        )
    return ""


class OriginalLayers:
    """The layers of a model as mlx-lm loaded them, until those that serve have been compared."""

    def __init__(self, model: Module) -> None:
        """`model` is as mlx-lm loaded it. Nothing is read: its arrays are lazy."""
        self._modules = dict(model.named_modules())
        self._arrays = own_arrays(model)

    def check(self, path: str, module: Module, arrays: dict[str, mx.array]) -> None:
        """Compare a layer that serves, with these arrays, with the one that mlx-lm loaded at the
        path, and forget the latter. Raises ModelError if they differ in more than precision, or are
        of kinds that cannot be compared.
        """
        original, originals = self._modules.pop(path, None), self._arrays.pop(path, {})
        if original is module:
            same = originals.keys() == arrays.keys() and all(
                array is originals[name] or _has_same_numbers(array, originals[name])
                for name, array in arrays.items()
            )
        else:
            same = _computes_the_same(original, module)
        if not same:
            raise ModelError(
                f"{path or 'the model'} was changed at load and computes other numbers than "
                "mlx-lm's layer: report the model"
            )

    def close(self) -> None:
        """Raises ModelError if a layer that mlx-lm loaded has not been checked."""
        if self._modules:
            raise ModelError(f"{next(iter(self._modules))} was lost at load: report the model")


def own_arrays(model: Module) -> dict[str, dict[str, mx.array]]:
    """The parameters that each module has itself, by the paths of the modules. Their names are
    paths in the model.
    """
    found = {path: dict[str, mx.array]() for path, _ in model.named_modules()}
    for name, array in dict(tree_flatten(model.parameters())).items():
        path = name.rpartition(".")[0]
        while path not in found:  # arrays in a list
            path = path.rpartition(".")[0]
        found[path][name] = array
    return found


def _has_same_numbers(found: mx.array, expected: mx.array) -> bool:
    """Whether arrays of different types have the same numbers, by a sample of them."""
    if found.shape != expected.shape:
        return False
    stride = max(1, found.size // _SAMPLED_NUMBERS)
    sampled = found.reshape(-1)[::stride]
    return bool(mx.array_equal(sampled, expected.reshape(-1)[::stride], equal_nan=True))


def _computes_the_same(original: Module | None, module: Module) -> bool:
    """Whether a layer in the place of another computes the same for a random input, each by its own
    arithmetic: MLX multiplies by quantized weights without dequantizing them.
    """
    if type(original) is DynamicNTKScalingRoPE and type(module) is RoPE:
        return _rotates_the_same(original, module)
    if original is None or type(module) is not _DENSE.get(type(original)):
        return False
    x = mx.random.normal((1, module.weight.shape[-1]), key=mx.random.key(0))
    found, expected = _product(module, x), _product(original, x)
    if found.shape != expected.shape:
        return False
    norms = mx.linalg.norm(module.weight[..., ::_NORM_STRIDE], axis=-1)
    allowed = _TOLERANCE * (mx.abs(expected) + norms.reshape(expected.shape))
    same = (mx.abs(found - expected) <= allowed) | (found == expected)
    both_nan = mx.isnan(found) & mx.isnan(expected)
    return bool(mx.all(same | both_nan))


def _product(layer: Any, x: mx.array) -> mx.array:
    """The product of `x`, `[1, inputs]`, and all weights of a layer: float32."""
    project: Callable[..., mx.array] = layer
    if isinstance(layer, Embedding | QuantizedEmbedding):
        project = layer.as_linear
    if isinstance(layer, MultiLinear | QuantizedMultiLinear):
        return project(mx.broadcast_to(x, (layer.weight.shape[0], *x.shape)))
    if not isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        return project(x)
    experts = mx.arange(layer.weight.shape[0])
    scale: mx.array | None = layer.get("global_scale")
    if scale is None:
        return project(x, experts)
    product = mx.gather_qmm(
        x,
        layer.weight,
        layer.scales,
        rhs_indices=experts,
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    product *= (scale / _NVFP4_LARGEST)[:, None, None]
    return product + layer.bias[:, None] if "bias" in layer else product


def _rotates_the_same(original: DynamicNTKScalingRoPE, module: RoPE) -> bool:
    """Whether positions at the begin and the end of the original's first length are the same."""
    x = mx.random.normal((1, 1, 2, original.dims), key=mx.random.key(0))
    return all(
        bool(mx.allclose(module(x, offset=offset), original(x, offset=offset), 0, _TOLERANCE))
        for offset in (0, int(original.max_position_embeddings) - 2)
    )
