"""The attention of DeepSeek-V4.1 over shared storage: a window, and KV of compressed groups.

A token attends to the tokens of its window, and to a few of the groups of `ratio` tokens that have
ended, which an indexer chooses. mlx-lm's attention takes one position for all rows and joins the
arrays of a cache of its own. The functions here compute the same for rows at positions of their
own, from the vectors of a `CompressedView`: index arrays are made on the device from positions and
block tables, so that a decode step can be compiled. The rest of the model is mlx-lm's.

Where a group's vectors lie: see `LayerShape.stride`. A group is compressed, and written, in the
forward that has its last token. No token sees it before, so it may be written again, by a draft
that is rejected and by the tokens that come instead. The tokens of a group that is still open are
kept as in a window, so that a sequence can be resumed within it.
"""

import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.kv.layout import (
    COMPRESSED_MODULE,
    FP4_GROUP,
    FP4_KEY_GROUP,
    FP8_GROUP,
    KVCacheSpec,
)
from engine.mlx_backend.kv.shape import SlotMapping
from engine.mlx_backend.model.rows import ArenaForward, RowGroup

T = TypeVar("T")

_NONE = -1
"""The index of no vector."""


class Part(NamedTuple):
    """What a layer keeps of one kind, and its rows."""

    spec: KVCacheSpec
    layer: LayerArena
    forward: ArenaForward

    @property
    def rows(self) -> RowGroup:
        return self.forward.groups[0]

    def write(self, slots: SlotMapping, keys: mx.array, values: mx.array | None = None) -> None:
        """Write vectors, `[rows, vectors, dim]`, in the dtypes that they are kept in."""
        shape = self.layer.shape
        if values is None:
            values = keys[..., :0]
        self.layer.write(
            slots, keys.astype(shape.key_dtype)[:, None], values.astype(shape.value_dtype)[:, None]
        )

    def read(self, ids: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
        """The vectors of gathered blocks, `[rows, vectors, dim]`."""
        keys, values = self.layer.read(ids)
        return keys[:, 0], values[:, 0]


class CompressedRows:
    """The rows of a forward, and the index arrays that its layers share, each made once.

    `starts`, `[rows]`: the position of each row's first token. `last_seen`, `[rows, length]`: the
    last position that each token sees; see `RowGroup`.
    """

    def __init__(self, forward: ArenaForward) -> None:
        """Raises ValueError for rows of unlike length."""
        if forward.stands_in:
            raise ValueError("its caches take no rows of unlike length in one forward")
        rows = forward.groups[0]
        self.length = rows.length
        self.starts = rows.starts
        self.last_seen = rows.last_seen_array()
        self._made = dict[Hashable, Any]()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, or returned when it was called with this name before."""
        if name not in self._made:
            self._made[name] = make()
        found: T = self._made[name]
        return found

    def first_group(self, ratio: int) -> mx.array:
        """The index of the group that each row's first token is in, `[rows]`."""
        return self.once(("first", ratio), lambda: self.starts // ratio)

    def groups(self, ratio: int) -> mx.array:
        """The indices of as many groups as may end in the new tokens, `[rows, groups]`."""
        n_groups = -(-self.length // ratio)
        return self.once(
            ("groups", ratio), lambda: self.first_group(ratio)[:, None] + mx.arange(n_groups)
        )

    def n_ended(self, ratio: int) -> mx.array:
        """The number of groups that have ended where each token stands, `[rows, length, 1]`."""
        return self.once(("ended", ratio), lambda: ((self.last_seen + 1) // ratio)[..., None])


class CompressedView:
    """What one layer keeps, for one forward.

    The model reads `offset`, `[rows]`, the position of each row's next token, and `window`, of
    which the attention here needs nothing.
    """

    window = None

    def __init__(
        self,
        rows: CompressedRows,
        window: Part,
        compressed: Part | None = None,
        open_group: Part | None = None,
    ) -> None:
        self.rows = rows
        self.offset = rows.starts
        self._window = window
        self._compressed = compressed
        self._open_group = open_group

    def window_vectors(self, new: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new tokens' vectors, `[rows, length, dim]`. Returns those of the rows' windows,
        `[rows, vectors, dim]`, and which of them each token sees, `[rows, length, window]`.
        """
        part = self._window
        part.write(part.forward.slot_mapping(part.layer.heads), new)
        vectors, _ = part.read(part.rows.gather_ids(part.layer.heads))
        return vectors, self.rows.once(
            ("window", part.spec.window), lambda: self._seen_in_window(vectors.shape[1])
        )

    def _seen_in_window(self, n_vectors: int) -> mx.array:
        window, first_keys = self._window.spec.window, self._window.rows.first_keys
        n_seen = n_vectors if window is None else min(window, n_vectors)
        last = self.rows.last_seen[..., None]
        positions = mx.maximum(last - n_seen + 1, 0) + mx.arange(n_seen)
        at = positions if first_keys is None else positions - first_keys[:, None, None]
        return mx.where((positions <= last) & (at >= 0), at, _NONE)

    def open_groups(self, ratio: int, kv: mx.array, gate: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new tokens' KV and gates, `[rows, length, dim]`. Returns those of the tokens of
        `CompressedRows.groups`, `[rows, groups, ratio, dim]`: anything for tokens to come.
        """
        part = self._open_group
        assert part is not None, "groups of one token are never open"
        part.write(part.forward.slot_mapping(part.layer.heads), kv, gate)
        found = part.read(part.rows.gather_ids(part.layer.heads))
        n_vectors, first_keys = found[0].shape[1], part.rows.first_keys

        def members() -> mx.array:
            positions = self.rows.groups(ratio)[..., None] * ratio + mx.arange(ratio)
            if first_keys is not None:
                positions = positions - first_keys[:, None, None]
            return mx.clip(positions, 0, n_vectors - 1).reshape(len(positions), -1, 1)

        at = self.rows.once(("members", ratio), members)
        of_kv, of_gate = (
            mx.take_along_axis(vectors, at, axis=1).reshape(len(at), -1, ratio, vectors.shape[-1])
            for vectors in found
        )
        return of_kv, of_gate

    def compressed(
        self, ratio: int, kv: mx.array, keys: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Write KV and index keys of `CompressedRows.groups`, `[rows, groups, dim]`, as far as they
        have ended. Returns those of all groups, `[rows, all groups, dim]`.
        """
        part = self._compressed
        assert part is not None, "the layer takes compressed KV from another one"
        heads, table, arena = part.layer.heads, part.rows.table, part.forward.arena

        def ended() -> SlotMapping:
            last = (self.rows.groups(ratio) + 1) * ratio - 1  # positions of the groups' last tokens
            entries = mx.minimum(last // arena.block_size, table.shape[1] - 1)
            blocks = mx.take_along_axis(table, entries, axis=1)
            blocks = mx.where(last <= self.rows.last_seen[:, -1:], blocks, arena.scratch)
            slots = last % arena.block_size // ratio
            return arena.slot_mapping(
                blocks.reshape(-1).astype(mx.uint32), slots.reshape(-1).astype(mx.uint32), heads
            )

        part.write(self.rows.once(("ended slots", heads), ended), kv, keys)
        blocks_of_group = max(1, ratio // arena.block_size)
        with_last = table[:, blocks_of_group - 1 :: blocks_of_group]
        return part.read(
            self.rows.once(("all groups", heads), lambda: arena.gather_ids(with_last, heads))
        )


def install_compressed(model: Module) -> None:
    """Let the layers of a model of this architecture attend to what a `CompressedView` has. With
    other caches they compute what they did before. Idempotent.
    """
    module = sys.modules.get(COMPRESSED_MODULE)
    if module is None or not isinstance(model, module.Model):
        return
    for layer in model.layers:
        if type(layer.self_attn) is module.Attention:
            layer.self_attn.__class__ = _over_views(module.Attention)


def _over_views(kind: type[Any]) -> type[Any]:
    """mlx-lm's class of attention with another call."""

    def call(self: Any, x: mx.array, *, cache: object, **others: Any) -> mx.array:
        if not isinstance(cache, CompressedView):
            computed: mx.array = kind.__call__(self, x, cache=cache, **others)
            return computed
        return _Attention(self, x, cache, others["shared"]).output()

    return type(kind.__name__, (kind,), {"__call__": call})


class _Attention:
    """One layer's attention in one forward, by the layer's own projections and norms.

    `shared`: what layers take from those before them: compressed KV, index keys, the chosen groups
    and those from which later indexers choose.
    """

    def __init__(
        self, layer: Any, x: mx.array, view: CompressedView, shared: dict[str, mx.array]
    ) -> None:
        self._module: Any = sys.modules[COMPRESSED_MODULE]
        self._layer = layer
        self._x = x
        self._view = view
        self._shared = shared

    def output(self) -> mx.array:
        layer, x, shared = self._layer, self._x, self._shared
        rows, length, _ = x.shape
        residual = layer.q_a_norm(layer.q_a_proj(x))
        queries = layer.q_b_proj(residual).reshape(rows, length, layer.num_heads, layer.head_dim)
        queries = self._rotated(queries)
        own = self._rotated_vectors(layer.kv_norm(layer.kv_proj(x)))
        kvs = [self._view.window_vectors(self._module._fake_quant_fp8(own, FP8_GROUP))]
        if layer.ratio:
            if layer.is_kv_source:
                self._compress()
            if layer.is_index_source:
                shared["topk_idx"] = self._chosen(residual)
            if "compress_kv" in shared and "topk_idx" in shared and shared["topk_idx"].size:
                kvs.append((shared["compress_kv"], shared["topk_idx"]))
        output = _attend(queries, kvs, layer.sinks, layer.head_dim**-0.5)
        output = self._rotated(output, inverse=True)
        output = output.reshape(rows * length, layer.o_groups, 1, -1)
        output = layer.o_a_proj(output, layer._group_ids)
        projected: mx.array = layer.o_b_proj(output.reshape(rows, length, -1))
        return projected

    def _rotated(self, heads: mx.array, **more: Any) -> mx.array:
        """Vectors `[rows, length, heads, dim]`, rotated by the positions of the tokens, or as
        `more` has it.
        """
        layer, rope = self._layer, {"offset": self._view.rows.starts, **more}
        rotated: mx.array = self._module._apply_rope(
            heads, layer.rope, rope_dim=layer.rope_dim, **rope
        )
        return rotated

    def _rotated_vectors(self, vectors: mx.array, **more: Any) -> mx.array:
        """`_rotated` of `[rows, length, dim]`."""
        return self._rotated(vectors[:, :, None], **more)[:, :, 0]

    def _compress(self) -> None:
        """Compress the groups that end, and share KV and index keys of all that have ended."""
        layer, ratio, module = self._layer, self._layer.ratio, self._module
        compressor, x = layer.compressor, self._x
        if ratio == 1:
            latent = compressor.kv_norm(compressor.kv_proj(x))
        else:
            wide = x.astype(mx.float32)
            kv, gate = self._view.open_groups(
                ratio, compressor.kv_proj(wide), compressor.gate_proj(wide)
            )
            pooled = mx.sum(kv * mx.softmax(gate, axis=2), axis=2)
            latent = compressor.kv_norm(pooled.astype(x.dtype))
        # A group has the position of its first token.
        at = {"offset": self._view.rows.first_group(ratio), "scale": float(ratio)}
        kv = self._rotated_vectors(latent, **at)
        kv = module._fake_quant_fp4(kv, block_size=FP4_GROUP, e4m3_scale=True)
        keys = None
        if layer.is_index_source:
            keys = layer.indexer.k_norm(layer.indexer.k_proj(latent))
            keys = self._rotated_vectors(keys, **at)
            keys = module._fake_quant_fp4(keys, block_size=FP4_KEY_GROUP)
        all_kv, all_keys = self._view.compressed(ratio, kv, keys)
        self._shared["compress_kv"] = all_kv
        if layer.is_index_source:
            self._shared["index_k"] = all_keys

    def _chosen(self, residual: mx.array) -> mx.array:
        """The groups that each token attends to, `[rows, length, groups]`."""
        indexer, shared = self._layer.indexer, self._shared
        rows, length, _ = self._x.shape
        keys = shared.get("index_k")
        if keys is None or keys.shape[1] == 0:
            return mx.zeros((rows, length, 0), mx.int32)
        queries = indexer.q_b_proj(residual)
        queries = queries.reshape(rows, length, indexer.num_heads, indexer.head_dim)
        queries = self._module._fake_quant_fp4(self._rotated(queries), block_size=FP4_KEY_GROUP)
        wide = keys.astype(mx.float32)[:, None].swapaxes(-1, -2)
        scores = mx.maximum(mx.matmul(queries.astype(mx.float32), wide), 0)
        scores = scores * (indexer.head_dim**-0.5)
        weights = indexer.weights_proj(self._x).astype(mx.float32) * (indexer.num_heads**-0.5)
        scores = mx.sum(scores * weights[..., None], axis=2)
        n_ended = self._view.rows.n_ended(indexer.ratio)
        scores = mx.where(mx.arange(scores.shape[-1]) < n_ended, scores, -mx.inf)
        if indexer.is_candidate_source and indexer.candidate_topk_blocks > 0:
            shared["candidates"] = _candidates(indexer, scores, n_ended)
        elif "candidates" in shared:
            scores = mx.where(shared["candidates"], scores, -mx.inf)
        n_chosen = min(indexer.index_topk, scores.shape[-1])
        chosen = mx.argpartition(-scores, n_chosen - 1, axis=-1)[..., :n_chosen].astype(mx.int32)
        return mx.where(chosen < n_ended, chosen, _NONE)


def _candidates(indexer: Any, scores: mx.array, n_ended: mx.array) -> mx.array:
    """The groups from which later layers choose, boolean `[rows, length, groups]`: those of the
    blocks with the best scores, and of the newest block, which is only partly full.
    """
    size = indexer.candidate_block_size
    padding = [(0, 0), (0, 0), (0, -scores.shape[-1] % size)]
    padded = mx.pad(scores, padding, constant_values=-mx.inf)
    best = padded.reshape(*scores.shape[:2], -1, size).max(axis=-1)
    n_blocks = best.shape[-1]
    newest = mx.where(n_ended > 0, (n_ended - 1) // size, _NONE)
    best = mx.where(mx.arange(n_blocks) == newest, mx.inf, best)
    n_chosen = min(indexer.candidate_topk_blocks, n_blocks)
    chosen = mx.argpartition(-best, n_chosen - 1, axis=-1)[..., :n_chosen]
    has_ended = mx.take_along_axis(best, chosen, axis=-1) > -mx.inf
    found = mx.put_along_axis(mx.zeros(best.shape, mx.bool_), chosen, has_ended, axis=-1)
    return mx.repeat(found, size, axis=-1)[..., : scores.shape[-1]]


def _attend(
    queries: mx.array, kvs: list[tuple[mx.array, mx.array]], sinks: mx.array, scale: float
) -> mx.array:
    """Attention of queries, `[rows, length, heads, dim]`, to the vectors that their indices name.

    `kvs`: vectors `[rows, vectors, dim]`, each with indices `[rows, length, seen]`.
    """
    rows, length, heads, dim = queries.shape
    seen = mx.concatenate([at for _, at in kvs], axis=-1) >= 0
    found = [
        mx.take_along_axis(kv, mx.maximum(at, 0).reshape(rows, -1, 1), axis=1).reshape(
            rows, length, -1, dim
        )
        for kv, at in kvs
    ]
    # Each token has keys of its own, and what nobody has written may be NaN.
    keys = mx.where(seen[..., None], mx.concatenate(found, axis=2).astype(mx.float32), 0)
    keys = keys.reshape(rows * length, 1, -1, dim)
    output = mx.fast.scaled_dot_product_attention(
        queries.reshape(rows * length, heads, 1, dim).astype(mx.float32),
        keys,
        keys,
        scale=scale,
        mask=seen.reshape(rows * length, 1, 1, -1),
        sinks=sinks.astype(mx.float32),
    )
    return output.reshape(rows, length, heads, dim).astype(queries.dtype)
