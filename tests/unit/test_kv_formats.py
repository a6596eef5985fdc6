"""KV formats: what is stored of a vector, what it takes, and which layers stay as they are."""

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.kv import formats, states
from engine.mlx_backend.kv import shape as shape_module
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.formats import is_rotatable
from engine.mlx_backend.kv.layout import KVCacheSpec, Layout, StateSpec
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.kv.states import ArrayShape
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.format_check import compare
from engine.mlx_backend.model import patches
from engine.mlx_backend.model.patches import rope_digest
from engine.mlx_backend.model.rows import RowGroup, TokenSpan
from engine.values.settings import KVFormat
from kvstore import sizes
from kvstore.ops import CopyBlock, FillBlock, ReadBlock
from kvstore.sizes import StateCounts, StorageSizes
from kvstore.types import BlockId
from tests.devices import DEVICE, is_cpu

QUANTIZED = (KVFormat.Q8, KVFormat.K8V4)
ALL = (KVFormat.FULL, KVFormat.F16, KVFormat.BF16, *QUANTIZED)
LARGEST_ERROR = {
    KVFormat.FULL: 0.0,
    KVFormat.F16: 0.001,
    KVFormat.BF16: 0.01,
    KVFormat.Q8: 0.04,
    KVFormat.K8V4: 0.5,
}
"""Of a number of unit size."""

A, B, C = BlockId(0), BlockId(1), BlockId(2)


@pytest.fixture(params=["cpu", "gpu"])
def device_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes in the order of a CPU, and of a GPU, where K and V share planes."""
    device = getattr(mx, request.param)
    monkeypatch.setattr(mx, "default_device", lambda: device)


each_order = pytest.mark.usefixtures("device_order")


def shape(
    format: KVFormat, dim: int = 64, dtype: mx.Dtype = mx.float32, kv_heads: int = 2
) -> LayerShape:
    return LayerShape(kv_heads, dim, dim, dtype, dtype, format)


def random_kv(n_tokens: int, of: LayerShape, seed: int = 0) -> list[mx.array]:
    """K and V, `[1, kv_heads, n_tokens, dim]`."""
    mx.random.seed(seed)
    return [
        mx.random.normal((1, of.kv_heads, n_tokens, dim)).astype(dtype) for dim, dtype in of.vectors
    ]


def put(arena: Arena, blocks: list[int], kv: list[mx.array], first: int = 0) -> None:
    """Write tokens to consecutive slots of these blocks."""
    at = np.arange(first, first + kv[0].shape[2])
    slots = (
        mx.array(np.array(blocks, np.uint32)[at // arena.block_size]),
        mx.array((at % arena.block_size).astype(np.uint32)),
    )
    for layer in arena.layers:
        layer.write(arena.slot_mapping(*slots, layer.heads), *kv)
    mx.eval(arena.planes())


def get(arena: Arena, blocks: list[int]) -> list[np.ndarray]:
    """K and V of whole blocks, in the rotation of the model."""
    [layer] = arena.layers
    keys, values = layer.read(arena.gather_ids(mx.array([blocks], mx.uint32), layer.heads))
    return [np.array(array.astype(mx.float32)) for array in (layer.rotated(keys), values)]


@each_order
@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_what_is_written_is_read_as_nearly_as_the_format_allows(format: KVFormat, dim: int) -> None:
    of = shape(format, dim)
    arena, kv = Arena([of], n_blocks=4, block_size=4), random_kv(11, of)
    put(arena, [2, 0, 3], kv)
    for found, written in zip(get(arena, [2, 0, 3]), kv, strict=True):
        error = np.abs(found[:, :, :11] - np.array(written)).max()
        assert error <= LARGEST_ERROR[format]
        assert error > 0 or format is KVFormat.FULL
        assert not found[:, :, 11:].any(), "what was never written is zero"


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_codes_mean_what_mlx_makes_of_them(format: KVFormat, dtype: mx.Dtype) -> None:
    """Attention on a CPU multiplies them by MLX's quantized product."""
    for codec in shape(format, 128, dtype).codecs:
        for n_rows in (3, 4):
            codes, scales = codec.encode(mx.random.normal((n_rows * 5, 128)).astype(dtype))
            biases = scales * -codec.zero
            of_mlx = codes.view(mx.uint32), scales, biases
            expected = mx.dequantize(*of_mlx, codec.group, codec.bits).reshape(n_rows, 5, 128)
            found = codec.decode([row.reshape(n_rows, 5, -1) for row in (codes, scales)])
            assert found.dtype == dtype
            assert mx.allclose(found.astype(mx.float32), expected, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("format", QUANTIZED)
def test_the_number_farthest_from_zero_is_kept_exactly(format: KVFormat) -> None:
    for codec in shape(format).codecs:
        numbers = np.linspace(-0.7, 1.0, 64, dtype=np.float32)
        vectors = mx.array(np.stack([numbers, -numbers, 0 * numbers]))
        found = np.array(codec.decode(codec.encode(vectors)))
        assert found[:, -1].tolist() == [1, -1, 0]
        assert not found[2].any()


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("unlike", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_becomes_none(format: KVFormat, unlike: float) -> None:
    """What was computed would be wrong, and nobody would notice."""
    for codec in shape(format).codecs:
        vectors = np.ones((64, 64), np.float32)
        np.fill_diagonal(vectors, unlike)
        assert not np.isfinite(np.array(codec.decode(codec.encode(mx.array(vectors))))).any()


@each_order
@pytest.mark.parametrize("format", QUANTIZED)
def test_a_vector_is_stored_alike_alone_and_among_others(format: KVFormat) -> None:
    of = shape(format)
    together, apart = (Arena([of], n_blocks=2, block_size=8) for _ in range(2))
    kv = random_kv(13, of)
    put(together, [0, 1], kv)
    for start, stop in ((0, 5), (5, 6), (6, 13)):
        put(apart, [0, 1], [array[:, :, start:stop] for array in kv], start)
    for one, other in zip(together.planes(), apart.planes(), strict=True):
        assert mx.array_equal(one, other)


@each_order
@pytest.mark.parametrize(
    ("format", "dtype", "dim", "share"),
    [
        (KVFormat.F16, mx.float32, 128, 0.5),
        (KVFormat.BF16, mx.float32, 128, 0.5),
        (KVFormat.Q8, mx.float32, 128, (8 + 32 / 64) / 32),
        (KVFormat.Q8, mx.bfloat16, 128, (8 + 32 / 64) / 16),
        (KVFormat.Q8, mx.bfloat16, 96, (8 + 32 / 32) / 16),
        (KVFormat.K8V4, mx.float16, 128, (6 + 32 / 64) / 16),
        (KVFormat.F16, mx.bfloat16, 128, 1.0),  # no smaller
        (KVFormat.Q8, mx.float32, 80, 1.0),  # no group divides it
    ],
)
def test_a_token_takes_what_the_format_says(
    format: KVFormat, dtype: mx.Dtype, dim: int, share: float
) -> None:
    of, full = shape(format, dim, dtype), shape(KVFormat.FULL, dim, dtype)
    assert of.token_bytes == share * full.token_bytes
    arena = Arena([of], n_blocks=5, block_size=8)
    held = sum(plane.nbytes for plane in arena.planes())
    assert held == (5 + 2) * 8 * of.token_bytes
    assert arena.bytes == 5 * 8 * of.token_bytes
    assert full.read_bytes == full.token_bytes
    unpacked = dim * of.kv_heads if format is KVFormat.K8V4 else 0
    assert of.read_bytes == full.token_bytes + (of.token_bytes + unpacked if share < 1 else 0)


def test_latents_of_which_all_heads_are_made_stay_full() -> None:
    latent = LayerShape(1, 512, 64, mx.bfloat16, mx.bfloat16, KVFormat.Q8)
    assert all(codec.is_plain for codec in latent.codecs)
    assert not latent.is_rotated
    one_head = LayerShape(1, 64, 64, mx.bfloat16, mx.bfloat16, KVFormat.Q8)
    assert not any(codec.is_plain for codec in one_head.codecs)


def test_keys_and_values_stay_full_each_for_itself() -> None:
    uneven = LayerShape(2, 80, 64, mx.float32, mx.float32, KVFormat.Q8)
    keys, values = uneven.codecs
    assert (keys.is_plain, values.is_plain, uneven.is_rotated) == (True, False, False)
    assert [is_rotatable(dim) for dim in (1, 64, 96, 112, 160, 192, 0, 80, 72, 100)] == [
        *([True] * 6),
        *(False, True, False, False),
    ]


def test_a_layout_says_which_layers_stay_full() -> None:
    layers = tuple(map(KVCacheSpec, (shape(KVFormat.FULL), shape(KVFormat.FULL, 80))))
    layout = Layout(layers, mx.float32, 10)
    named = {format: layout.stored_as(format).format_in_use for format in (*KVFormat,)}
    assert named == {
        KVFormat.AUTO: "full",
        KVFormat.FULL: "full",
        KVFormat.F16: "f16",
        KVFormat.BF16: "bf16",
        KVFormat.Q8: "q8 (1 of 2 layers full)",
        KVFormat.K8V4: "k8v4 (1 of 2 layers full)",
    }
    assert layout.stored_as(KVFormat.Q8).stored_as(KVFormat.FULL).specs == layout.specs


@each_order
@pytest.mark.parametrize("format", ALL)
def test_blocks_are_copied_moved_to_bytes_and_grown_as_they_are(format: KVFormat) -> None:
    of = shape(format)
    layout = Layout((KVCacheSpec(of),), mx.float32, 10)
    first, second = (
        Storage(layout, StorageSizes(6), block_size=4, first_blocks=n) for n in (None, 3)
    )
    put(first.full, [0], random_kv(4, of))
    expected = get(first.full, [0])
    first.execute([CopyBlock(A, B, 4), CopyBlock(A, C, 3)])
    for found, whole in zip(get(first.full, [1, 2]), expected, strict=True):
        assert np.array_equal(found[:, :, :4], whole)
        assert np.array_equal(found[:, :, 4:7], whole[:, :, :3])
        assert not found[:, :, 7:].any()
    [[part, *_]] = first.read([ReadBlock(B, 4)]).parts()
    assert part is not None
    assert len(part) == first.part_bytes[0] == 4 * of.token_bytes
    second.execute([FillBlock(C, bytes(part))])
    second.full.grow(6)
    for found, whole in zip(get(second.full, [2]), expected, strict=True):
        assert np.array_equal(found, whole)


def name_of(of: LayerShape, block_size: int = 4) -> str:
    layout = Layout((KVCacheSpec(of),), mx.float32, 10)
    return Storage(layout, StorageSizes(2), block_size).kv_format


def test_the_bytes_of_another_format_have_another_name() -> None:
    names = {name_of(shape(format)).split(" code=")[0] for format in ALL}
    assert len(names) == len(ALL)
    assert "kv1 block=4 full=1*2x64float32+64float32 state=" in names
    order = " by channel" if is_cpu(DEVICE) else ""
    keys = f"2x64float32 as 8 bits with a scale for 64{order}"
    values = "64float32 as 4 bits with a scale for 64"
    assert f"kv1 block=4 full=1*{keys}+{values} state=" in names


@pytest.mark.parametrize("format", QUANTIZED)
def test_bytes_that_mean_something_else_have_another_name(
    format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another block size, dtype, size of groups, and the order of codes of another device."""
    names = [name_of(shape(format)), name_of(shape(format), 8)]
    names.append(name_of(shape(format, dtype=mx.bfloat16)))
    for module, name, value in (
        (formats, "_GROUPS", (32,)),
        (mx, "default_device", lambda: mx.gpu if is_cpu(DEVICE) else mx.cpu),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            names.append(name_of(shape(format)))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (mx, "round", lambda numbers: mx.floor(numbers + 0.49)),
        (mx, "hadamard_transform", lambda vectors: -vectors),
        (formats.Codec, "zero", 100),
    ],
)
def test_what_other_code_stores_has_another_name(
    format: KVFormat, monkeypatch: pytest.MonkeyPatch, place: object, name: str, value: object
) -> None:
    before = name_of(shape(format))
    assert name_of(shape(format)) == before
    monkeypatch.setattr(place, name, value)
    assert name_of(shape(format)) != before


def test_states_that_are_rounded_in_another_way_have_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named() -> str:
        own, saved = (ArrayShape((4, 8), dtype) for dtype in (mx.float32, mx.float16))
        layout = Layout((StateSpec((own,), (saved,)),), mx.float32, 10)
        return Storage(layout, StorageSizes(2, (), StateCounts(1, 1)), 4).kv_format

    before = named()
    assert named() == before
    with monkeypatch.context() as patched:
        patched.setattr(states, "_as_type", lambda array, dtype: (array * 0.999).astype(dtype))
        assert named() != before
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "CHECKPOINT_TOKENS", 256)
        assert named() != before


def test_keys_that_are_rotated_in_another_way_are_other_software(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = rope_digest()
    assert rope_digest() == before
    monkeypatch.setattr(patches, "inverse_frequencies", lambda dims, *_: mx.ones(dims // 2))
    assert rope_digest() != before


def cascade(group: RowGroup, queries: mx.array, min_saved_blocks: int = 384) -> mx.array:
    """The attention `cascade` of scaled queries in the arena's only layer."""
    plan = CascadeAttention(min_saved_blocks).prepare(group, None)
    assert plan is not None
    found = plan.attend(queries, group.arena.layers[0], scale=1.0)
    assert found is not None
    return found


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("heads", [2, 6, 12])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.skipif(not is_cpu(DEVICE), reason="cascade is for CPUs")
def test_blocks_read_in_place_give_what_gathered_ones_do(
    format: KVFormat, heads: int, dim: int, block_size: int
) -> None:
    """With one query for a head of K and V, with few and with many."""
    of = shape(format, dim)
    arena = Arena([of], n_blocks=16, block_size=block_size)
    [layer] = arena.layers
    put(arena, list(range(16)), random_kv(16 * block_size, of))
    spans = [
        TokenSpan(4 * block_size - 2, 1, np.array([3, 9, 1, 7], np.uint32)),
        TokenSpan(4 * block_size + 1, 1, np.array([3, 9, 1, 12, 5], np.uint32)),
    ]
    group = RowGroup(spans, arena)
    queries = layer.rotated(mx.random.normal((2, heads, 1, dim)) / dim**0.5)
    keys, values = layer.read(group.gather_ids(layer.heads))
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=1.0, mask=group.mask()
    )
    for saved_blocks in (1, 1000):
        found = cascade(group, queries, saved_blocks)
        assert np.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("format", ALL)
@pytest.mark.skipif(not is_cpu(DEVICE), reason="cascade is for CPUs")
def test_rows_of_very_unlike_lengths_attend_each_to_their_own(format: KVFormat) -> None:
    """They take several passes, of which each has the queries of all rows."""
    arena = Arena([shape(format)], n_blocks=100, block_size=4)
    [layer] = arena.layers
    put(arena, list(range(100)), random_kv(400, shape(format)))
    tables = [np.arange(90, 93), np.arange(0, 88), np.arange(93, 98)]
    spans = [TokenSpan(4 * len(of) - 1, 1, of.astype(np.uint32)) for of in tables]
    group = RowGroup(spans, arena)
    queries = mx.random.normal((3, 4, 1, 64)) / 8
    keys, values = layer.read(group.gather_ids(layer.heads))
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=1.0, mask=group.mask()
    )
    assert np.allclose(cascade(group, queries), expected, atol=2e-5)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("format", [KVFormat.FULL, *QUANTIZED])
@pytest.mark.skipif(not is_cpu(DEVICE), reason="cascade is for CPUs")
def test_attention_to_few_blocks_takes_no_memory_for_the_others(format: KVFormat, dim: int) -> None:
    arena = Arena([shape(format, dim)], n_blocks=4096, block_size=32)
    group = RowGroup([TokenSpan(40, 1, np.array([3, 9], np.uint32))], arena)
    queries = mx.random.normal((1, 2, 1, dim))
    mx.eval(cascade(group, queries))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(cascade(group, queries))
    assert mx.get_peak_memory() - before < 1 << 20


def test_rotation_saves_the_small_channels_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    of = shape(KVFormat.Q8, 128)
    [keys, values] = random_kv(64, of)
    is_small = np.arange(128) % 32 != 0
    keys = keys * mx.where(mx.array(is_small), 1.0, 30.0)

    def error() -> float:
        arena = Arena([of], n_blocks=8, block_size=8)
        put(arena, list(range(8)), [keys, values])
        found = get(arena, list(range(8)))[0]
        return float(np.square((found - np.array(keys))[..., is_small]).mean())

    rotated = error()
    monkeypatch.setattr(shape_module, "is_rotatable", lambda dim: False)
    assert rotated < error() / 2


def test_predictions_are_compared() -> None:
    full = mx.array([[0.0, 1.0, -mx.inf], [2.0, 0.0, 0.0]])
    assert compare(full, full) == (0.0, 1.0)
    other = mx.array([[1.0, 0.0, -mx.inf], [2.0, 0.0, 0.0]])
    quality = compare(full, other)
    p = 1 / (1 + np.exp(-1.0))
    assert quality.divergence == pytest.approx((p - (1 - p)) / 2)
    assert quality.agreement == 0.5


@pytest.mark.parametrize("vocab_size", [1000, 49152, 262144])
def test_sums_over_large_vocabularies_are_exact(vocab_size: int) -> None:
    """Likeliest tokens of real models have logits of about 20, and most tokens less than 10."""
    random = np.random.default_rng(vocab_size)
    full = random.normal(5, 2, (4, vocab_size)).astype(np.float32)
    full[:, 7] = 20
    other = full + random.normal(0, 1e-3, full.shape).astype(np.float32)
    exact = [row.astype(np.float64) for row in (full, other)]
    expected, found = (row - np.log(np.exp(row).sum(axis=1, keepdims=True)) for row in exact)
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1).mean()
    quality = compare(mx.array(full), mx.array(other))
    assert quality.divergence == pytest.approx(divergence, rel=1e-4)


def test_equal_predictions_diverge_by_nothing_less() -> None:
    logits = mx.random.normal((20, 4, 50), key=mx.random.key(0))
    found = [compare(one, one + 100.3).divergence for one in logits]
    assert min(found) >= 0
    assert max(found) < 1e-5
    nan = logits[0] * mx.nan
    for full, stored in ((logits[0], nan), (nan, logits[0])):
        assert np.isnan(compare(full, stored).divergence), "which is refused"
