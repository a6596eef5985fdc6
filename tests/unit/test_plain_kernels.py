"""Plain operations compute what mlx-lm's Metal kernels compute, number by number in numpy here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.nn.layers.linear import Linear
from mlx_lm import kernels
from mlx_lm.models import muse_spark
from mlx_lm.models.bitlinear_layers import BitLinear

from engine.api import ModelError
from engine.mlx_backend.host import device_name
from engine.mlx_backend.kv.layout import discover
from engine.mlx_backend.loading.loader import open_model, read_weights
from engine.mlx_backend.model import plain_kernels
from engine.mlx_backend.model.plain_kernels import PLAIN, install_plain_kernels
from measuring.random_checkpoint import CONFIGS, random_model, tiny_tokenizer, write_checkpoint
from tests.devices import tolerance

Numbers = npt.NDArray[np.float64]

SHAPES = [(1, 1, 2, 1, 8), (3, 5, 4, 2, 16), (2, 7, 6, 3, 6)]
"""Rows, length, heads, KV heads and size of a head, which need be no power of two."""

EPS = 1e-6


def numbers(seed: int, *shape: int) -> Numbers:
    """Of float32, so that MLX is given the same ones."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def array(values: Numbers) -> mx.array:
    return mx.array(values.astype(np.float32))


def near(found: mx.array, expected: Numbers) -> bool:
    close = np.abs(np.array(found) - expected) <= tolerance(1e-5) * (1 + np.abs(expected))
    return found.shape == expected.shape and bool(close.all())


def rms(values: Numbers) -> Numbers:
    return np.asarray(values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPS))


def sigmoid(values: Numbers) -> Numbers:
    return np.asarray(1 / (1 + np.exp(-values)))


def test_every_kernel_has_a_plain_function() -> None:
    """Fails when mlx-lm has a new one."""
    assert PLAIN.keys() == set(kernels.__all__)


def heads_by_kernel(qkvg: Numbers, n_heads: int, n_kv_heads: int, dim: int) -> list[Numbers]:
    """Queries and keys as the kernel has them: head `h` of a token begins at `h * dim`."""
    found = [
        np.zeros((*qkvg.shape[:-1], n_heads, dim)),
        np.zeros((*qkvg.shape[:-1], n_kv_heads, dim)),
    ]
    for head in range(n_heads + n_kv_heads):
        normed = rms(qkvg[..., head * dim : (head + 1) * dim])
        if head < n_heads:
            found[0][..., head, :] = normed * 5.47
        else:
            found[1][..., head - n_heads, :] = normed
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_keys_are_normalized_and_scaled(shape: tuple[int, ...]) -> None:
    rows, length, n_heads, n_kv_heads, dim = shape
    qkvg = numbers(1, rows, length, 2 * (n_heads + n_kv_heads) * dim)
    found = PLAIN["qk_norm"](
        array(qkvg),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim,
        eps=EPS,
        query_scale=5.47,
    )
    for own, expected in zip(found, heads_by_kernel(qkvg, n_heads, n_kv_heads, dim), strict=True):
        assert near(own, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_and_rotated_by_each_rows_position(shape: tuple[int, ...], is_ragged: bool) -> None:
    rows, length, n_heads, n_kv_heads, dim = shape
    qkvg = numbers(2, rows, length, 2 * (n_heads + n_kv_heads) * dim)
    offsets = [9 + 4 * row for row in range(rows)] if is_ragged else [9] * rows
    found = PLAIN["qk_norm_rope"](
        array(qkvg),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim,
        eps=EPS,
        query_scale=5.47,
        rope_base=1000.0,
        offset=mx.array(offsets) if is_ragged else 9,
    )
    for own, normed in zip(found, heads_by_kernel(qkvg, n_heads, n_kv_heads, dim), strict=True):
        expected = np.zeros_like(normed)
        for row in range(rows):
            for token in range(length):
                for pair in range(dim // 2):
                    angle = (offsets[row] + token) * 1000.0 ** (-pair / (dim // 2))
                    first, second = (
                        normed[row, token, :, 2 * pair],
                        normed[row, token, :, 2 * pair + 1],
                    )
                    expected[row, token, :, 2 * pair] = first * np.cos(angle) - second * np.sin(
                        angle
                    )
                    expected[row, token, :, 2 * pair + 1] = first * np.sin(angle) + second * np.cos(
                        angle
                    )
        assert near(own, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_normalized_and_gated(shape: tuple[int, ...]) -> None:
    rows, length, heads, _, dim = shape
    output, gate = numbers(3, rows, heads, length, dim), numbers(4, rows, length, heads * dim)
    expected = np.zeros_like(gate)
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        expected[..., own] = rms(output[:, head]) * sigmoid(gate[..., own])
    assert near(PLAIN["rms_norm_sigmoid_gate"](array(output), array(gate), eps=EPS), expected)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
def test_a_branch_is_added_to_the_stream(is_scaled: bool, has_next: bool) -> None:
    branch, stream = numbers(5, 2, 3, 16), numbers(6, 2, 3, 16)
    alpha, beta, post, pre = (numbers(seed, 16) for seed in (7, 8, 9, 10))
    norm = SimpleNamespace(weight=array(pre), eps=EPS)
    found, normed = PLAIN["norm_add_norm"](
        array(branch),
        array(stream),
        alpha=array(alpha),
        beta=array(beta),
        post_weight=array(post) if is_scaled else None,
        post_eps=EPS,
        next_norm=norm if has_next else None,
    )
    expected = alpha * stream + beta * rms(branch * post if is_scaled else branch)
    assert near(found, expected)
    assert near(PLAIN["pre_norm"](array(expected), norm, dtype=mx.float32), rms(expected) * pre)
    assert near(normed, rms(expected) * pre) if has_next else normed is None


def test_experts_are_normalized_and_summed() -> None:
    experts, weights, norm = numbers(11, 2, 3, 4, 16), numbers(12, 2, 3, 4), numbers(13, 16)
    expected = sum(rms(experts[..., k, :] * norm) * weights[..., k, None] for k in range(4))
    found = PLAIN["post_expert_norm_combine"](
        array(experts), array(weights), norm_weight=array(norm), eps=EPS
    )
    assert near(found, np.asarray(expected))


def test_the_best_experts_are_found_and_of_equal_ones_the_first() -> None:
    logits, bias = numbers(14, 2, 5, 7), numbers(15, 7)
    logits[..., 5], bias[5] = logits[..., 2], bias[2]
    chosen, weights = PLAIN["expert_routing"](
        array(logits), array(bias), top_k=3, multiplier=0.2, score_eps=1e-15, route_scale=2.5
    )
    scores = sigmoid(logits * np.float32(0.2))
    for row, token in np.ndindex(2, 5):
        left = {expert: scores[row, token, expert] + bias[expert] for expert in range(7)}
        best = []
        for _ in range(3):
            best.append(max(left, key=lambda expert: (round(left[expert], 6), -expert)))
            del left[best[-1]]
        assert chosen[row, token].tolist() == best
        own = scores[row, token, best]
        assert near(weights[row, token], own / own.sum() * 2.5)


@pytest.mark.parametrize("is_inverted", [False, True])
def test_ternary_weights_are_unpacked_as_the_kernel_reads_them(is_inverted: bool) -> None:
    layer = BitLinear(12, 20, bias=False, invert_weight_scales=is_inverted)
    packed = np.random.default_rng(16).integers(0, 256, (5, 12), dtype=np.uint8)
    layer.weight, layer.weight_scale = mx.array(packed), mx.array([3.5])
    x = numbers(17, 2, 3, 12)
    expected = np.zeros((2, 3, 20))
    for row, column, part in np.ndindex(5, 12, 4):
        sign = ((int(packed[row, column]) >> 2 * part) & 3) - 1
        expected[..., row + part * 5] += x[..., column] * sign
    expected *= 1 / 3.5 if is_inverted else 3.5
    assert near(plain_kernels._ternary_product(layer, array(x), layer.weight), expected)


@pytest.mark.parametrize("is_inverted", [False, True])
def test_a_scale_in_half_precision_is_not_rounded_again(is_inverted: bool) -> None:
    """The kernel divides in float32. Otherwise all weights of a layer would be off by 0.2%."""
    layer = BitLinear(12, 20, bias=False, invert_weight_scales=is_inverted)
    layer.weight = mx.zeros((5, 12), mx.uint8)  # each weight is -1
    layer.weight_scale = mx.array([3.5], mx.bfloat16)
    scale = 1 / 3.5 if is_inverted else 3.5
    assert near(plain_kernels.ternary_weight(layer), np.full((20, 12), -scale))
    x = mx.ones((1, 12), mx.bfloat16)
    found = plain_kernels._ternary_product(layer, x, layer.weight)
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, mx.full((1, 20), -12 * scale).astype(mx.bfloat16))


def packed_bitnet(parent: Path) -> Path:
    """A checkpoint of BitNet whose packed weights are random, and its scales."""
    checkpoint = parent / "bitnet"
    write_checkpoint(checkpoint, CONFIGS["bitnet"], 0, tiny_tokenizer(), mx.bfloat16)
    file = str(checkpoint / "model.safetensors")
    loaded = mx.load(file)
    assert isinstance(loaded, dict)
    weights = dict(loaded)
    for index, (name, weight) in enumerate(weights.items()):
        if weight.dtype == mx.uint8:
            weights[name] = mx.random.randint(0, 256, weight.shape, mx.uint8, mx.random.key(index))
        elif name.endswith("weight_scale"):
            weights[name] = mx.array([1.0 + index / 64], weight.dtype)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return checkpoint


@pytest.mark.parametrize(("memory_bytes", "kind"), [(1 << 30, Linear), (1 << 10, BitLinear)])
def test_bitnet_is_dense_on_a_cpu_where_there_is_memory(
    tmp_path: Path, memory_bytes: int, kind: type
) -> None:
    """And computes with the weights as they are stored where there is none."""
    if mx.default_device() != mx.cpu:
        kind = BitLinear
    loaded = open_model(packed_bitnet(tmp_path), memory_bytes)
    read_weights(loaded, lambda line: None)  # raises where a layer computes something else
    assert type(loaded.model.layers[0].self_attn.q_proj) is kind


def _no_metal(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("[metal_kernel] No Metal back-end.")


# `pre_norm` is called by models that are split among machines alone.
@pytest.mark.parametrize("name", sorted(set(kernels.__all__) - {"pre_norm"}))
def test_a_missing_kernel_is_said_with_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(CONFIGS["muse_spark"], 0, mx.float32)
    install_plain_kernels(model)
    monkeypatch.setattr(muse_spark, name, _no_metal)
    with pytest.raises(ModelError) as refused:
        discover(model)
    assert f"a kernel for it that {device_name()} cannot run" in str(refused.value)
