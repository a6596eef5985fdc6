"""The forward of Qwen3 in operations that a CPU computes and differentiates fast. The result equals
that of mlx-lm's model.
"""

import math
from typing import cast

import mlx.core as mx
from mlx_lm.models.qwen3 import MLP, Attention, Model

_HIDDEN = -60.0  # e^-60 vanishes next to 1, and no product with it is too small for float32


@mx.custom_function
def _power(exponents: mx.array) -> mx.array:
    return mx.power(math.e, exponents)


@_power.vjp
def _(exponents: mx.array, cotangents: mx.array, powers: mx.array) -> mx.array:
    return cotangents * powers


def exp(exponents: mx.array) -> mx.array:
    """e to the power of `exponents`: `mx.power` takes a third of `mx.exp`'s time on x86."""
    return cast(mx.array, _power(exponents))


def hidden_states(model: Model, ids: mx.array) -> mx.array:
    """The states `[rows, length, hidden]` after the last norm, of tokens `[rows, length]`."""
    hidden: mx.array = model.model.embed_tokens(ids)
    future = _future(ids.shape[1])
    for layer in model.model.layers:
        hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), future)
        hidden = hidden + _feed_forward(layer.mlp, layer.post_attention_layernorm(hidden))
    return cast(mx.array, model.model.norm(hidden))


def _attention(layer: Attention, hidden: mx.array, future: mx.array) -> mx.array:
    rows, length, _ = hidden.shape
    queries = layer.q_proj(hidden).reshape(rows, length, layer.n_heads, -1)
    keys = layer.k_proj(hidden).reshape(rows, length, layer.n_kv_heads, -1)
    values = layer.v_proj(hidden).reshape(rows, length, layer.n_kv_heads, -1)
    queries = layer.rope(layer.q_norm(queries).transpose(0, 2, 1, 3)) * layer.scale
    keys = layer.rope(layer.k_norm(keys).transpose(0, 2, 1, 3))
    # The query heads of a group one below the other: one product for each KV head.
    queries = queries.reshape(rows, layer.n_kv_heads, -1, queries.shape[-1])
    scores = queries @ keys.swapaxes(-1, -2)
    scores = scores.reshape(rows, layer.n_heads, length, length) + future
    powers = exp(scores - mx.stop_gradient(scores.max(-1, keepdims=True)))
    weights = powers.reshape(rows, layer.n_kv_heads, -1, length)
    attended = (weights @ values.transpose(0, 2, 1, 3)) / weights.sum(-1, keepdims=True)
    attended = attended.reshape(rows, layer.n_heads, length, -1).transpose(0, 2, 1, 3)
    return cast(mx.array, layer.o_proj(attended.reshape(rows, length, -1)))


def _feed_forward(layer: MLP, hidden: mx.array) -> mx.array:
    gate: mx.array = layer.gate_proj(hidden)
    return cast(mx.array, layer.down_proj(gate / (1 + exp(-gate)) * layer.up_proj(hidden)))


def _future(length: int) -> mx.array:
    """The causal mask `[length, length]`, which is added to attention scores."""
    positions = mx.arange(length)
    return mx.where(positions[:, None] < positions, _HIDDEN, 0.0)
