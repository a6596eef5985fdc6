"""The attentions that a model may be computed with, and which of them is to serve."""

from dataclasses import replace

import mlx.core as mx

from engine.api import ModelError, Report
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.gpu.paged import PagedAttention, as_it_is, smaller_units
from engine.mlx_backend.loading.loader import LoadedModel
from engine.mlx_backend.model.attention import Attention, RowByRowAttention, gathered_padding_keys
from engine.mlx_backend.tuning.choice import AttentionChoice, choose_attention, compares
from engine.mlx_backend.tuning.kinds import Kinds, kinds_of
from engine.values.settings import EngineConfig

UNSTATED_TOKENS = 1 << 20
"""The longest context of a model whose files state none, where memory allows as much."""


def attention_choice(
    config: EngineConfig, loaded: LoadedModel, spare_bytes: int | None, report: Report
) -> AttentionChoice:
    """See `choose_attention`. Raises ModelError."""
    if config.ranks > 1 and compares(config):  # each machine might find another the fastest
        config = replace(config, attention="gather")
    kinds, found = layer_kinds(config, loaded), attentions(config.attention, loaded)
    return choose_attention(config, kinds, found, spare_bytes, report)


def layer_kinds(config: EngineConfig, loaded: LoadedModel) -> Kinds:
    """The kinds of a model's layers with these settings."""
    longest = config.max_model_len or loaded.max_context_tokens or UNSTATED_TOKENS
    layout, block_size = loaded.layout, config.block_size
    return kinds_of(loaded.model, layout, loaded.query_heads, block_size, longest)


def attentions(name: str, loaded: LoadedModel) -> tuple[Attention, ...]:
    """The attentions that may serve under the setting `name`, the preferred one first; the last is
    the reference. On a GPU `auto` is `gather`, because MLX's own attention is fused there. On a CPU
    it never is `paged`, of which a CPU has only what stands in for the kernel.

    Raises ModelError for `cascade` on a GPU.
    """
    is_cpu = mx.default_device() == mx.cpu
    if name == "cascade" and not is_cpu:
        raise ModelError(
            "the setting attention is cascade, which is for CPUs: on a GPU it would multiply the "
            "KV cache block by block, where gather uses MLX's fused attention; set it to auto"
        )
    key_bytes = sum(layer.read_bytes for layer in loaded.layout.full_layers)
    kind = RowByRowAttention if not is_cpu and mx.cuda.is_available() else Attention
    gather = kind(gathered_padding_keys(loaded.weight_bytes, key_bytes))
    match name:
        case "paged":
            return PagedAttention(gather, smaller_units if is_cpu else as_it_is), gather
        case "gather":
            return (gather,)
        case _:
            return (CascadeAttention(), gather) if is_cpu else (gather,)


def attentions_to_measure(dtype: mx.Dtype) -> list[Attention]:
    """All attentions that this device runs with K and V of a dtype, the reference first. MLX
    multiplies blocks in place in float32 alone on a CPU, where `paged` only stands in.
    """
    is_cpu = mx.default_device() == mx.cpu
    found = [gather := Attention()]
    if dtype == mx.float32 or not is_cpu:
        found.append(CascadeAttention())
    if not is_cpu:
        found.append(PagedAttention(gather, as_it_is))
    return found
