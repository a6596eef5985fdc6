"""Weights in float32: what a CPU computes with, where memory allows."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

_DENSE: dict[type[Module], type[Module]] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
"""The layers that can be dequantized, and what each becomes. A class derived from one of them may
compute something else, and stays quantized.
"""


def to_float32(model: Module) -> None:
    """Make a model's weights float32, and dequantize its layers. All arrays stay lazy."""
    dense = [
        (path, _dequantized(module))
        for path, module in model.named_modules()
        if type(module) in _DENSE
    ]
    model.update_modules(tree_unflatten(dense))
    model.set_dtype(mx.float32)


def _dequantized(module: Module) -> Module:
    """The layer without quantization. mlx-lm's `dequantize_model` would omit the scale that each
    expert may have in addition to the scales of its groups.
    """
    weight = _dequantized_weight(module)
    dense: Module = _DENSE[type(module)](*weight.shape[::-1])
    dense.pop("bias", None)
    dense.weight = weight
    if "bias" in module:
        dense.bias = module.bias
    return dense


def _dequantized_weight(module: Module) -> mx.array:
    def dequantized(
        weight: mx.array, scales: mx.array, global_scale: mx.array | None = None
    ) -> mx.array:
        found: mx.array = mx.dequantize(
            weight,
            scales,
            module.biases,
            module.group_size,
            module.bits,
            module.mode,
            global_scale,
        )
        return found

    of_experts = module.get("global_scale")
    if of_experts is None:
        return dequantized(module.weight, module.scales)
    experts = zip(module.weight, module.scales, of_experts, strict=True)
    return mx.stack([dequantized(*expert) for expert in experts])
