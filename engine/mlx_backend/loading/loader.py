"""Loads a checkpoint with mlx-lm and finds out what serving it takes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from engine.api import ModelError, Report
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.errors import UnsupportedModel, one_line
from engine.mlx_backend.loading.adapter_files import read_adapters
from engine.mlx_backend.loading.checkpoint import (
    WEIGHTS,
    fingerprint,
    first_number,
    max_context_tokens,
    read_header,
)
from engine.mlx_backend.loading.purpose import GENERATES, Embedding, Purpose, Ranking
from engine.mlx_backend.loading.selfcheck import find_execution, sparse_early
from engine.mlx_backend.model.adapters import RowAdapters
from engine.mlx_backend.model.adapters import install as install_adapters
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.discovery import discover
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.output_head import OutputHead
from engine.mlx_backend.pooling import HIDDEN_STATES, Pooler
from engine.values.model import Embedder, Reranker, TemplateKind
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
    find_classes = _get_classes if purpose.generates else headless_classes

    def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        if config.get("text_config") is None:
            config.pop("text_config", None)  # mlx-lm only checks whether the key is there
        return find_classes(config)

    try:
        model, config = load_model(
            checkpoint,
            lazy=True,
            model_config={} if purpose.generates else model_config(checkpoint),
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


def load_tokenizer(
    checkpoint: Path, config: Mapping[str, Any], vocab_size: int
) -> TokenizerWrapper:
    """Raises ModelError where it cannot be loaded or is not the model's."""
    try:
        end_tokens = _end_tokens(config, vocab_size)
        tokenizer = utils.load_tokenizer(checkpoint, eos_token_ids=end_tokens)
    except Exception as error:
        raise ModelError(f"cannot load its tokenizer: {one_line(error)}") from error
    _check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def template_kind(tokenizer: TokenizerWrapper, source: str = "") -> TemplateKind:
    """How the tokenizer's chat template is rendered, or `source` in its place."""
    if source:
        return TemplateKind(source=source)
    function = tokenizer._chat_template
    return TemplateKind(
        module="" if function is None else function.__module__.rpartition(".")[2],
        thinking_argument=tokenizer._thinking_kwarg,
        thinks=tokenizer.has_thinking,
    )


def _end_tokens(config: Mapping[str, Any], vocab_size: int) -> list[int] | None:
    """Of generation_config.json, which mlx-lm prefers, or else of config.json.

    None where they name none of the model's tokens: mlx-lm knows those of some tokenizers.
    """
    named = config.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    return [id for id in listed if isinstance(id, int) and 0 <= id < vocab_size] or None


def _check_vocabulary(wrapper: TokenizerWrapper, vocab_size: int) -> None:
    """Raise ModelError unless the tokenizer's tokens are some of a model's `vocab_size`.

    Added tokens may lie beyond: Gemma's for images, say, in a model of text alone.
    """
    if not wrapper.is_fast:
        raise ModelError("the checkpoint has no tokenizer.json, nor what one could be made of")
    backend = wrapper.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ordinary = backend.get_vocab(with_added_tokens=False).values() - added.keys()
    if not ordinary:
        raise ModelError("the tokenizer has no tokens")
    if max(ordinary) >= vocab_size:
        raise ModelError(
            f"the tokenizer is not the model's: its tokens go up to {max(ordinary):,}, and the "
            f"model has {vocab_size:,}"
        )


CLASSIFIER = "score.weight"
_HEAD = "lm_head."
_BODY = "model."

Weights: TypeAlias = dict[str, mx.array]
Classes: TypeAlias = Callable[..., tuple[type[Any], type[Any]]]


def model_config(checkpoint: Path) -> dict[str, Any]:
    """Fields to set in config.json, so that the body of the model loads by itself.

    The embedding then makes its logits, which are not used.
    """
    names = [name for file in checkpoint.glob(WEIGHTS) for name in read_header(file).spans]
    has_head = any(name.startswith(_HEAD) for name in names)
    return {} if has_head else {"tie_word_embeddings": True}


def classifier(checkpoint: Path) -> mx.array:
    """`[labels, dimensions]`, float32. Raises ModelError where there is none."""
    for file in checkpoint.glob(WEIGHTS):
        if CLASSIFIER in read_header(file).spans:
            tensors = mx.load(str(file))
            assert isinstance(tensors, dict), "safetensors are named"
            return tensors[CLASSIFIER].astype(mx.float32)
    raise ModelError(f"the classifier is missing: no weight file has {CLASSIFIER}")


def body(weights: Mapping[str, mx.array]) -> Weights:
    """As a generator's checkpoint has them: transformers writes the names of a body that is saved
    by itself without the prefix.
    """
    prefix = "" if any(name.startswith(_BODY) for name in weights) else _BODY
    return {
        name if name.startswith(_HEAD) else prefix + name: array
        for name, array in weights.items()
        if name != CLASSIFIER
    }


def headless_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """The class of the model, which takes the weights of a body alone, and of its arguments."""
    model, args = utils._get_classes(config)

    has_own = hasattr(model, "sanitize")

    class Headless(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Weights) -> Weights:
            named = body(weights)
            return super().sanitize(named) if has_own else named

    return Headless, args


QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "equalto", "system") | map(attribute="content") \
| first | default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "equalto", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "equalto", "document") | map(attribute="content") \
| first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""How Qwen3-Reranker asks, as its model card has it: with roles of its own, as vLLM's templates of
rerankers have them."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the runner pools with, and what the server must know of it."""

    pooler: Pooler = HIDDEN_STATES
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    template: str = ""  # in place of the tokenizer's own


def pooled_by(loaded: LoadedModel, head: OutputHead, checkpoint: Path) -> Pooled:
    """Raises ModelError where the model's hidden states cannot be had, or no score made of them."""
    purpose = loaded.purpose
    if purpose.embedding is None and purpose.ranking is None:
        return Pooled()
    if not head.dimensions:
        raise UnsupportedModel("its hidden states cannot be had: they are not projected as usual")
    if purpose.ranking is not None:
        return _reranker(loaded, head, checkpoint, purpose.ranking)
    assert purpose.embedding is not None
    return Pooled(embedder=_embedder(purpose.embedding, head.dimensions))


def _embedder(embedding: Embedding, dimensions: int) -> Embedder:
    return Embedder(
        pooling=embedding.pooling,
        dimensions=dimensions,
        normalized=embedding.normalized,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
    )


def _reranker(loaded: LoadedModel, head: OutputHead, checkpoint: Path, ranking: Ranking) -> Pooled:
    tokenizer = loaded.tokenizer
    if ranking.tokens:
        weight = head.rows([_token_id(tokenizer, token) for token in ranking.tokens])
    else:
        weight = classifier(checkpoint)
    own = takes_pairs(tokenizer)
    template = QWEN3_RERANKER if loaded.model.model_type == "qwen3" and not own else ""
    return Pooled(
        pooler=Pooler(_one_label(weight)),
        reranker=Reranker(ranking.has_sigmoid, is_templated=own or bool(template)),
        template=template,
    )


def takes_pairs(tokenizer: TokenizerWrapper) -> bool:
    """Whether its chat template knows queries and documents."""
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else ""
    return all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document"))


def _one_label(weight: mx.array) -> mx.array:
    """A softmax over two labels is a sigmoid of what lies between them. `[1, dimensions]`."""
    labels = weight.shape[0]
    if labels > 2:
        raise UnsupportedModel(f"its classifier has {labels} labels; a reranker has one, or two")
    one = weight[1:] - weight[:1] if labels == 2 else weight
    mx.eval(one)
    return one


def _token_id(tokenizer: TokenizerWrapper, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ModelError(f"its tokenizer has no token {token!r}, which a score would be made of")
    return int(token_id)
