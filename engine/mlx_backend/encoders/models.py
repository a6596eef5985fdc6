"""Encoders: BERT, RoBERTa with XLM-R and CamemBERT, and ModernBERT, with their classifiers.

Each is a function of a batch of whole texts, padded on the right, over the weights that a
checkpoint has by their names. Nothing is cached: every token attends to all tokens of its text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu

from engine.api import ModelError
from engine.mlx_backend.model.attention import softmax_exp
from engine.values.request import Pooling

MOST_SCORES = 1 << 24
"""Attention scores that are computed at once, 64 MiB of float32: longer texts attend in parts of
their queries.
"""

_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "swish": silu,
}
_ROBERTA = frozenset({"roberta", "xlm-roberta", "camembert"})

Config: TypeAlias = Mapping[str, Any]
"""A config.json."""


class Batch(NamedTuple):
    """Texts as tokens, int32 `[texts, length]`, padded on the right. `lengths`: `[texts]`.

    `types` is 0 for the first text of a pair and 1 for the second.
    """

    ids: mx.array
    lengths: mx.array
    types: mx.array

    @property
    def is_token(self) -> mx.array:
        """Where there is no padding, bool `[texts, length]`."""
        return mx.arange(self.ids.shape[1]) < self.lengths[:, None]


Body: TypeAlias = Callable[[Batch], mx.array]
"""Computes the hidden states after the last norm, `[texts, length, dimensions]`."""

Head: TypeAlias = Callable[[mx.array, Batch], mx.array]
"""Computes the scores of a classifier from the hidden states, `[texts, labels]`."""


class Weights:
    """The weights of a checkpoint whose names begin with a prefix."""

    def __init__(self, named: Mapping[str, mx.array], prefix: str = "") -> None:
        self._named = named
        self._prefix = prefix

    def under(self, name: str) -> "Weights":
        """The weights below a name."""
        return Weights(self._named, f"{self._prefix}{name}.")

    def get(self, name: str) -> mx.array | None:
        return self._named.get(self._prefix + name)

    def __getitem__(self, name: str) -> mx.array:
        """Raises ModelError where the checkpoint has no such weight."""
        if (found := self.get(name)) is None:
            raise ModelError(f"the weights do not fit config.json: {self._prefix}{name} is missing")
        return found


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer. `weight`: `[outputs, inputs]`."""

    weight: mx.array
    bias: mx.array | None

    @classmethod
    def of(cls, *parts: Weights) -> "Linear":
        """One layer, or several with the same input as one."""
        biases = [bias for part in parts if (bias := part.get("bias")) is not None]
        weight = mx.concatenate([part["weight"] for part in parts])
        return cls(weight, mx.concatenate(biases) if biases else None)

    def __call__(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.weight.T
        return mx.addmm(self.bias, x, self.weight.T)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm, with or without a bias."""

    weight: mx.array
    bias: mx.array | None
    eps: float

    @classmethod
    def of(cls, weights: Weights, eps: float) -> "LayerNorm":
        return cls(weights["weight"], weights.get("bias"), eps)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> mx.array:
    """Attention of `[texts, heads, length, dim]`, as `[texts, length, heads * dim]`. `mask`: bool
    `[texts, 1, length or 1, length]`.
    """
    texts, heads, length, dim = queries.shape
    attention = _plain_attention if mx.default_device() == mx.cpu else _fused_attention
    part = max(1, MOST_SCORES // (texts * heads * length))
    attended = [
        attention(
            queries[:, :, start : start + part],
            keys,
            values,
            mask if mask.shape[2] == 1 else mask[:, :, start : start + part],
        )
        for start in range(0, length, part)
    ]
    joined = attended[0] if len(attended) == 1 else mx.concatenate(attended, axis=2)
    return joined.swapaxes(1, 2).reshape(texts, length, heads * dim)


def _fused_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array
) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _plain_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array
) -> mx.array:
    """For CPUs, on which MLX's own softmax takes several times as long as `softmax_exp`."""
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.swapaxes(-1, -2)
    scores = mx.where(mask, scores, -mx.inf)
    weights = softmax_exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights @ values) / weights.sum(axis=-1, keepdims=True)


def _split(x: mx.array, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values `[texts, heads, length, dim]` of joined projections. They are
    slices: an index would copy.
    """
    texts, length, _ = x.shape
    parts = x.reshape(texts, length, 3, heads, -1).swapaxes(1, 3)
    return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


def _activation(name: object) -> Callable[[mx.array], mx.array]:
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config.json has the activation {name!r}; served is one of {known}")
    return _ACTIVATIONS[str(name)]


@dataclass(frozen=True, slots=True)
class _BertLayer:
    qkv: Linear
    attended: Linear
    attention_norm: LayerNorm
    wide: Linear
    narrow: Linear
    norm: LayerNorm

    @classmethod
    def of(cls, own: Weights, eps: float) -> "_BertLayer":
        attention = own.under("attention")
        projections = (attention.under(f"self.{part}") for part in ("query", "key", "value"))
        return cls(
            Linear.of(*projections),
            Linear.of(attention.under("output.dense")),
            LayerNorm.of(attention.under("output.LayerNorm"), eps),
            Linear.of(own.under("intermediate.dense")),
            Linear.of(own.under("output.dense")),
            LayerNorm.of(own.under("output.LayerNorm"), eps),
        )


def _bert(config: Config, weights: Weights) -> Body:
    """BERT, and RoBERTa with its relatives, whose positions begin at the padding token's id + 1."""
    if config.get("is_decoder") or config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("config.json describes a decoder, or relative positions: not served")
    eps, heads = float(config.get("layer_norm_eps", 1e-12)), int(config["num_attention_heads"])
    activation = _activation(config.get("hidden_act", "gelu"))
    embeddings = weights.under("embeddings")
    words, by_position, by_type = (
        embeddings[f"{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    first_norm = LayerNorm.of(embeddings.under("LayerNorm"), eps)
    layers = [
        _BertLayer.of(weights.under(f"encoder.layer.{index}"), eps)
        for index in range(config["num_hidden_layers"])
    ]
    padding = _padding(config)

    def forward(batch: Batch) -> mx.array:
        positions = mx.arange(batch.ids.shape[1])
        if padding is not None:  # as transformers counts: a padding token in a text has none
            counted = batch.ids != padding
            positions = mx.cumsum(counted, axis=1) * counted + padding
        types = batch.types if len(by_type) > 1 else mx.zeros_like(batch.types)
        x = first_norm(words[batch.ids] + by_position[positions] + by_type[types])
        mask = batch.is_token[:, None, None]
        for layer in layers:
            attended = _attend(*_split(layer.qkv(x), heads), mask)
            x = layer.attention_norm(layer.attended(attended) + x)
            x = layer.norm(layer.narrow(activation(layer.wide(x))) + x)
        return x

    return forward


def _padding(config: Config) -> int | None:
    """The padding token that positions are counted from; None for BERT, which counts from 0."""
    return int(config.get("pad_token_id") or 1) if config["model_type"] in _ROBERTA else None


@dataclass(frozen=True, slots=True)
class _ModernLayer:
    attention_norm: LayerNorm | None  # None: the first layer has none
    qkv: Linear
    attended: Linear
    norm: LayerNorm
    wide: Linear
    narrow: Linear
    is_local: bool
    rope_base: float


def _modernbert(config: Config, weights: Weights) -> Body:
    """ModernBERT: rotary positions, gated layers, and windows in most of the layers."""
    eps, heads = float(config.get("norm_eps", 1e-5)), int(config["num_attention_heads"])
    activation = _activation(config.get("hidden_activation", "gelu"))
    bases = {kind: _rope_base(config, kind) for kind in _ROPE_KEYS}
    words = weights["embeddings.tok_embeddings.weight"]
    first_norm = LayerNorm.of(weights.under("embeddings.norm"), eps)
    last_norm = LayerNorm.of(weights.under("final_norm"), eps)
    radius = int(config.get("local_attention", 128)) // 2
    layers = list[_ModernLayer]()
    for index, kind in enumerate(_layer_kinds(config)):
        own = weights.under(f"layers.{index}")
        layers.append(
            _ModernLayer(
                LayerNorm.of(own.under("attn_norm"), eps) if index else None,
                Linear.of(own.under("attn.Wqkv")),
                Linear.of(own.under("attn.Wo")),
                LayerNorm.of(own.under("mlp_norm"), eps),
                Linear.of(own.under("mlp.Wi")),
                Linear.of(own.under("mlp.Wo")),
                kind == _LOCAL,
                bases[kind],
            )
        )

    def forward(batch: Batch) -> mx.array:
        x = first_norm(words[batch.ids])
        full = batch.is_token[:, None, None]
        positions = mx.arange(batch.ids.shape[1])
        distances = mx.abs(positions[:, None] - positions)
        # Padding attends to itself: a row of the mask without any key would be undefined.
        local = full & (distances <= radius) | (distances == 0)
        for layer in layers:
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            queries, keys, values = _split(layer.qkv(normed), heads)
            queries, keys = (
                mx.fast.rope(
                    part,
                    part.shape[-1],
                    traditional=False,
                    base=layer.rope_base,
                    scale=1.0,
                    offset=0,
                )
                for part in (queries, keys)
            )
            mask = local if layer.is_local else full
            x = x + layer.attended(_attend(queries, keys, values, mask))
            inner, gate = mx.split(layer.wide(layer.norm(x)), 2, axis=-1)
            x = x + layer.narrow(activation(inner) * gate)
        return last_norm(x)

    return forward


_FULL, _LOCAL = "full_attention", "sliding_attention"
_ROPE_KEYS = {_FULL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
"""For each kind of layer the field of its rotary base in older files, and its default."""


def _layer_kinds(config: Config) -> list[str]:
    """The kind of attention of each layer."""
    n_layers, every = int(config["num_hidden_layers"]), config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_LOCAL if index % int(every) else _FULL for index in range(n_layers)]
    if len(kinds) != n_layers or not set(kinds) <= {_FULL, _LOCAL}:
        raise ModelError(f"layer_types of config.json must be {n_layers} of {_FULL}, {_LOCAL}")
    return list(kinds)


def _rope_base(config: Config, kind: str) -> float:
    """The rotary base of one kind of layer."""
    older, default = _ROPE_KEYS[kind]
    stated = (config.get("rope_parameters") or {}).get(kind) or {}
    rope_type = stated.get("rope_type", "default")
    if rope_type != "default" or config.get("rope_scaling"):
        raise ModelError("config.json scales rotary positions, which encoders here do not")
    return float(stated.get("rope_theta") or config.get(older) or default)


class _Architecture(NamedTuple):
    body: Callable[[Config, Weights], Body]
    prefix: str  # of the body in a checkpoint with a head


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "bert": _Architecture(_bert, "bert"),
    **dict.fromkeys(_ROBERTA, _Architecture(_bert, "roberta")),
    "modernbert": _Architecture(_modernbert, "model"),
}


def longest_text(config: Config) -> int:
    """The most tokens of a text that the model has positions for."""
    padding = _padding(config)
    return int(config["max_position_embeddings"]) - (0 if padding is None else padding + 1)


def open_body(config: Config, named: Mapping[str, mx.array]) -> Body:
    """The encoder of a checkpoint, saved by itself or below a head. Raises ModelError."""
    open_architecture, prefix = _ARCHITECTURES[config["model_type"]]
    weights = Weights(named)
    if any(name.startswith(f"{prefix}.embeddings.") for name in named):
        weights = weights.under(prefix)
    return open_architecture(config, weights)


def pooled(hidden: mx.array, batch: Batch, pooling: Pooling) -> mx.array:
    """One vector of each text, float32 `[texts, dimensions]`."""
    hidden = hidden.astype(mx.float32)
    match pooling:
        case Pooling.FIRST:
            return hidden[:, 0]
        case Pooling.LAST:
            last = (batch.lengths - 1)[:, None, None]
            return mx.take_along_axis(hidden, last, axis=1)[:, 0]
        case Pooling.MEAN:
            kept = mx.where(batch.is_token[..., None], hidden, 0.0)
            return kept.sum(axis=1) / batch.lengths[:, None]


def open_head(config: Config, named: Mapping[str, mx.array]) -> Head:
    """The classifier of a checkpoint for sequence classification. Raises ModelError.

    Of two labels the score is the difference, whose sigmoid is the softmax over both.
    """
    weights, model_type = Weights(named), config["model_type"]
    name = "classifier.out_proj" if model_type in _ROBERTA else "classifier"
    last = Linear.of(weights.under(name))
    labels = last.weight.shape[0]
    if labels > 2:
        raise ModelError(f"its classifier has {labels} labels; a reranker has one, or two")
    if labels == 2:
        bias = last.bias
        last = Linear(
            last.weight[1:] - last.weight[:1], None if bias is None else bias[1:] - bias[:1]
        )
    if model_type != "modernbert":
        dense = "classifier.dense" if model_type in _ROBERTA else "bert.pooler.dense"
        first = Linear.of(weights.under(dense))
        return lambda hidden, batch: last(mx.tanh(first(hidden[:, 0])))
    return _modern_head(config, weights, last)


def _modern_head(config: Config, weights: Weights, last: Linear) -> Head:
    pooling = {"cls": Pooling.FIRST, "mean": Pooling.MEAN}[config.get("classifier_pooling", "cls")]
    activation = _activation(config.get("classifier_activation", "gelu"))
    dense = Linear.of(weights.under("head.dense"))
    norm = LayerNorm.of(weights.under("head.norm"), float(config.get("norm_eps", 1e-5)))

    def head(hidden: mx.array, batch: Batch) -> mx.array:
        first = pooled(hidden, batch, pooling).astype(hidden.dtype)
        return last(norm(activation(dense(first))))

    return head
