"""Loads a checkpoint with mlx-lm and finds out what serving it takes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from engine.api import ModelError, Report
from engine.mlx_backend.errors import UnsupportedModel, one_line
from engine.mlx_backend.loading import headless
from engine.mlx_backend.loading.adapter_files import read_adapters
from engine.mlx_backend.loading.checkpoint import first_number, max_context_tokens
from engine.mlx_backend.loading.purpose import GENERATES, Purpose
from engine.mlx_backend.loading.selfcheck import find_execution, sparse_early
from engine.mlx_backend.loading.source import fingerprint
from engine.mlx_backend.loading.tokenizer import load_tokenizer
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.layout import Layout, discover
from engine.mlx_backend.model.patches import RowAdapters, install_adapters
from engine.mlx_backend.model.views import Attention
from engine.values.settings import AdapterConfig

_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
FLOAT32_SHARE = 0.8  # of memory; KV and whatever else must fit into the rest


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the engine must know about it. Its weights may not be in memory yet."""

    model: Module
    tokenizer: TokenizerWrapper
    layout: Layout
    eos_token_ids: frozenset[int]
    query_heads: int  # in the layer that has most
    max_context_tokens: int
    fingerprint: str
    weight_bytes: int  # with those of the adapters
    row_adapters: RowAdapters
    adapters: Mapping[str, str]  # their fingerprints by name
    purpose: Purpose = GENERATES


def open_model(
    checkpoint: Path,
    memory_bytes: int,
    purpose: Purpose = GENERATES,
    adapter_configs: Sequence[AdapterConfig] = (),
) -> LoadedModel:
    """Build the model, its adapters and its tokenizer; weights are read when `load_weights` asks
    for them.

    On the CPU device everything is float32, and quantized weights are dequantized, where the result
    leaves a fifth of `memory_bytes`: half precision and quantized products are 20 to 50 times
    slower there. Elsewhere the checkpoint's dtype and quantization stand.

    Raises ModelError or UnsupportedModel.
    """
    model, config = _build(checkpoint, purpose)
    if mx.default_device() == mx.cpu:
        model = _for_cpu(model, checkpoint, purpose, memory_bytes)
    max_tokens = fix_dynamic_rope(model, max_context_tokens(config))
    layout = discover(model).within(max_tokens)
    tokenizer = load_tokenizer(checkpoint, config, layout.vocab_size)
    adapters = read_adapters(adapter_configs, model, layout.vocab_size)
    row_adapters = install_adapters(model, adapters)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        query_heads=query_heads(config, layout),
        max_context_tokens=max_tokens,
        fingerprint=fingerprint(checkpoint),
        weight_bytes=_weight_bytes(model),
        row_adapters=row_adapters,
        adapters={adapter.name: adapter.fingerprint for adapter in adapters},
        purpose=purpose,
    )


def load_weights(loaded: LoadedModel, attentions: Sequence[Attention], report: Report) -> Execution:
    """Read the weights into memory and find out how the model runs over shared storage.

    `attentions` are those that may serve, the preferred one first. Raises UnsupportedModel when the
    model runs with none of them.
    """
    report(f"loading weights, {loaded.weight_bytes / 1e9:.1f} GB")
    if loaded.adapters:
        report(f"adapters: {', '.join(loaded.adapters)}")
    mx.eval(loaded.model.parameters())
    report("checking the model against its own caches")
    with sparse_early(loaded.model):
        execution = find_execution(loaded.model, loaded.layout, attentions, loaded.row_adapters)
    mx.clear_cache()  # what the check has left
    report(f"batches: {execution.batching.name}")
    if execution.attention is not attentions[0]:
        report(f"attention: {execution.attention.name}, since not {execution.rejected[-1]}")
    return execution


def query_heads(config: Mapping[str, Any], layout: Layout) -> int:
    """Heads of a config.json; those of K where it does not say, or says it layer by layer."""
    kv_heads = max((shape.kv_heads for shape in layout.kv_layers), default=0)
    return max(first_number(config, _HEADS_KEYS) or 0, kv_heads)


def fix_dynamic_rope(model: Module, max_context_tokens: int) -> int:
    """Make each dynamic NTK RoPE the plain one that it is up to its model's first context length.

    Beyond that its base changes, and with it all keys that have been cached. Returns how many
    tokens a sequence may have then.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DynamicNTKScalingRoPE)
    }
    plain = [(name, RoPE(rope.dims, rope.traditional, rope.base)) for name, rope in found.items()]
    model.update_modules(tree_unflatten(plain))
    return min(
        [max_context_tokens, *(int(rope.max_position_embeddings) for rope in found.values())]
    )


def named_weights(model: Module) -> dict[str, mx.array]:
    """Every parameter of a model, by its dotted path."""
    return dict(tree_flatten(model.parameters()))


def _weight_bytes(model: Module) -> int:
    return sum(array.nbytes for array in named_weights(model).values())


def _build(checkpoint: Path, purpose: Purpose) -> tuple[Module, dict[str, Any]]:
    find_classes = _get_classes if purpose.generates else headless.classes

    def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        if config.get("text_config") is None:
            config.pop("text_config", None)  # mlx-lm only checks whether the key is there
        return find_classes(config)

    try:
        model, config = load_model(
            checkpoint,
            lazy=True,
            model_config={} if purpose.generates else headless.model_config(checkpoint),
            get_model_classes=classes,
        )
    except SystemExit as error:  # olmo's module exits when it cannot import its package
        reason = error.__context__ or f"its module exits with {error}"
        raise UnsupportedModel(f"mlx-lm cannot load it: {reason}") from error
    except Exception as error:  # mlx-lm's modules raise whatever they like
        if misfit := _misfit(str(error)):
            raise ModelError(f"the weights do not fit config.json: {misfit}") from error
        raise UnsupportedModel(f"mlx-lm cannot load it: {one_line(error)}") from error
    return model, config


def _misfit(message: str) -> str:
    """The gist of what `Module.load_weights` says of wrong parameters, which it lists; or ""."""
    if message.startswith("Expected shape"):
        return message
    listed = re.match(r"(Missing|Received) (\d+) parameters[^\n]*\n([^\s,]+)", message)
    if listed is None:
        return ""
    verb, count, first = listed.groups()
    fault = "missing" if verb == "Missing" else "not the model's"
    return f"{count} of the parameters are {fault}, such as {first.rstrip('.')}"


def _for_cpu(model: Module, checkpoint: Path, purpose: Purpose, memory_bytes: int) -> Module:
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    if _weight_bytes(model) > FLOAT32_SHARE * memory_bytes:
        model, _ = _build(checkpoint, purpose)  # as it was: quantized, in its own dtype
    return model
