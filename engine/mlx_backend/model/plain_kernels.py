"""Plain MLX operations in the place of mlx-lm's kernels that exist for Metal alone.

mlx-lm computes parts of Muse Spark by the kernels of `mlx_lm.kernels`, and the ternary products of
BitNet by another. On any device but a GPU of Apple's their models compute with the functions here,
which have the signatures of the kernels, and their arithmetic: float32, rounded where they round.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.bitlinear_layers import BitLinear

_KERNELS = "mlx_lm.kernels"


def install_plain_kernels(model: Module) -> None:
    """Let the modules that this model's layers come from compute without Metal's kernels, where the
    device does not run them. Idempotent.
    """
    if mx.metal.is_available() and mx.default_device() != mx.cpu:
        return
    BitLinear.execute_matmul_kernel = _ternary_product
    kernels = sys.modules.get(_KERNELS)
    if kernels is None:
        return  # no architecture that has been imported uses them
    for module in {type(module).__module__ for _, module in model.named_modules()}:
        namespace = vars(sys.modules[module])
        for name, plain in PLAIN.items():
            if namespace.get(name) is getattr(kernels, name, None) is not None:
                namespace[name] = plain


def ternary_weight(layer: BitLinear) -> mx.array:
    """The weights of a ternary layer, float32 `[outputs, inputs]`: each is -1, 0 or 1 times the
    layer's scale, or divided by it. In half precision a quotient would be rounded, and all weights
    be off by the same share. A byte has those of four rows, a quarter of all rows apart.
    """
    quarters = [((layer.weight >> shift) & 3).astype(mx.int8) - 1 for shift in (0, 2, 4, 6)]
    signs = mx.concatenate(quarters)[: layer.out_features]
    scale: mx.array = layer.weight_scale.astype(mx.float32)
    return signs.astype(mx.float32) * (1 / scale if layer.invert_weight_scales else scale)


def _ternary_product(self: BitLinear, x: mx.array, packed_weights: mx.array) -> mx.array:
    """The product of `x`, `[..., inputs]`, and the weights of a ternary layer."""
    return (x.astype(mx.float32) @ ternary_weight(self).T).astype(x.dtype)


def _qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    """Queries and keys, `[..., heads, head_dim]`, of rows of queries, keys, values and gates."""
    n_both = n_heads + n_kv_heads
    both = qkvg[..., : n_both * head_dim].reshape(*qkvg.shape[:-1], n_both, head_dim)
    both = mx.fast.rms_norm(both, None, eps)
    queries, keys = both[..., :n_heads, :], both[..., n_heads:, :]
    return [(queries.astype(mx.float32) * query_scale).astype(qkvg.dtype), keys]


def _qk_norm_rope(
    qkvg: mx.array, *, head_dim: int, rope_base: float, offset: int | mx.array, **norm: Any
) -> list[mx.array]:
    """What `_qk_norm` returns of `[rows, length, ...]`, rotated. `offset`: the position of the
    first token, or of each row's first token.
    """
    return [
        mx.fast.rope(
            part.swapaxes(1, 2),
            head_dim,
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        ).swapaxes(1, 2)
        for part in _qk_norm(qkvg, head_dim=head_dim, **norm)
    ]


def _rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Attention's output, `[rows, heads, length, dim]`, normalized and gated by `[rows, length,
    heads * dim]`.
    """
    normed = mx.fast.rms_norm(x.astype(mx.float32), None, eps)
    normed = normed.swapaxes(1, 2).reshape(gate.shape)
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def _norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    """The float32 stream with a normalized branch added, and that normalized for the next one."""
    if post_weight is not None:
        branch = post_weight.astype(branch.dtype) * branch
    added = mx.fast.rms_norm(branch, None, post_eps).astype(mx.float32)
    stream = alpha.astype(mx.float32) * stream + beta.astype(mx.float32) * added
    if next_norm is None:
        return stream, None
    return stream, _pre_norm(stream, next_norm, dtype=branch.dtype)


def _pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    """The float32 stream normalized by a layer's norm."""
    return mx.fast.rms_norm(stream, norm.weight.astype(mx.float32), norm.eps).astype(dtype)


def _post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """The sum of the experts' outputs, `[..., experts, dim]`, each scaled, normalized and weighted
    by `[..., experts]`. The kernel rounds after each expert, this function once.
    """
    scaled = experts.astype(mx.float32) * norm_weight.astype(mx.float32)
    rounded = weights.astype(experts.dtype).astype(mx.float32)
    normed = mx.fast.rms_norm(scaled, None, eps) * rounded[..., None]
    return normed.sum(axis=-2).astype(experts.dtype)


def _expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """The experts of each token, the best first, and their weights, both `[..., top_k]`."""
    scores = mx.sigmoid(logits.astype(mx.float32) * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    found = mx.take_along_axis(scores, chosen, axis=-1)
    total = found.sum(axis=-1, keepdims=True) + score_eps
    return [chosen.astype(mx.uint32), found / total * route_scale]


PLAIN: Mapping[str, Callable[..., Any]] = {
    "expert_routing": _expert_routing,
    "norm_add_norm": _norm_add_norm,
    "post_expert_norm_combine": _post_expert_norm_combine,
    "pre_norm": _pre_norm,
    "qk_norm": _qk_norm,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm_sigmoid_gate": _rms_norm_sigmoid_gate,
}
"""The functions in the place of those of `mlx_lm.kernels`, by name."""
