"""Each quantization that mlx-lm knows: what is served says what mlx-lm's model says."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten
from mlx_lm.utils import load_model

from engine.api import ModelError
from engine.mlx_backend.loading.loader import open_model
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from measuring.random_checkpoint import random_model
from tests.checkpoints import Family
from tests.devices import tolerance
from tests.golden.driving import Driver, expect_greedy, random_tokens, reference, rms
from tests.offline import OfflineDaemon, Room, Served, load
from tests.quantized import (
    QUANTIZED,
    SCALED_EXPERTS,
    configure,
    read_tensors,
    write_packed,
    write_quantized,
)

PROMPTS = [random_tokens(n, seed=n) for n in (7, 33, 60)]
OUTPUT_TOKENS = 16
TOLERANCE = tolerance(2e-4)

FAST = ("linear-affine-4", "tied-mxfp8-8", "biased-mxfp4-4", "latent-nvfp4-4", "mixed-experts")

cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="elsewhere dtype and quantization stand"
)

Numbers = npt.NDArray[np.float32]


def nvfp4_by_hand(codes: npt.NDArray[np.uint32], scales: npt.NDArray[np.uint8]) -> Numbers:
    """The numbers of weights in nvfp4: codes of 4 bits (E2M1), the first in the lowest bits, and
    for 16 of them a scale of 8 bits (E4M3).
    """
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    of_code = np.concatenate([sizes, -sizes])
    numbers = of_code[(codes[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15]
    exponents, fractions = (scales >> 3).astype(np.int32) & 15, (scales & 7) / np.float32(8)
    normal = np.ldexp(1 + fractions, exponents - 7)
    factors = np.where(exponents == 0, np.ldexp(fractions, -6), normal)
    groups = numbers.reshape(*scales.shape, 16) * factors[..., None]
    return np.asarray(groups.reshape(*scales.shape[:-1], -1), np.float32)


def peer_by_hand(family: Family, checkpoint: Path) -> Module:
    """mlx-lm's model with a checkpoint's weights in nvfp4 dequantized here. An expert's own scale
    is what the largest number becomes: 6 times 448, the largest ones of codes and scales.
    """
    tensors = read_tensors(checkpoint)
    weights = {}
    for name, array in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weights[name] = array
        if f"{path}.scales" in tensors:
            numbers = nvfp4_by_hand(np.array(array), np.array(tensors[f"{path}.scales"]))
            weights[name] = mx.array(numbers)
            if f"{path}.global_scale" in tensors:
                weights[name] *= tensors[f"{path}.global_scale"][:, None, None] / (6 * 448)
    model = random_model(family.config, 0, mx.float32)
    model.update(tree_unflatten(list(weights.items())))
    return model


def quantized_peer(checkpoint: Path) -> Module:
    """mlx-lm's model, which multiplies by quantized weights, with float32 for all else."""
    model: Module = load_model(checkpoint)[0]
    model.set_dtype(mx.float32)
    return model


def expect_the_same(served: Served, peer: Module) -> None:
    """The served model's logits and greedy texts are those of `peer`."""
    driver = Driver(served, Attention())
    found = driver.logits([driver.subject(tokens) for tokens in PROMPTS], lasts=3)
    for logits, tokens in zip(found, PROMPTS, strict=True):
        assert rms(logits, reference(peer, tokens)[-4:]) < TOLERANCE
    daemon = OfflineDaemon(served, Attention(), Room(96))
    sampling = SamplingParams(temperature=0)
    requests = [
        Request(str(i), pack(tokens), OUTPUT_TOKENS, sampling) for i, tokens in enumerate(PROMPTS)
    ]
    said = daemon.serve(*requests)
    for request, tokens in zip(requests, PROMPTS, strict=True):
        expect_greedy(peer, tokens, said[request.id, 0])


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in QUANTIZED],
)
def test_each_quantization(name: str, tmp_path: Path) -> None:
    checkpoint = write_quantized(QUANTIZED[name], tmp_path)
    expect_the_same(load(checkpoint), quantized_peer(checkpoint))


@cpu
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_scales_in_half_precision_round_no_weights(dtype: mx.Dtype, tmp_path: Path) -> None:
    checkpoint = write_quantized(QUANTIZED["linear-affine-4"], tmp_path, dtype)
    expect_the_same(load(checkpoint), quantized_peer(checkpoint))


@cpu
@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "symmetric"])
def test_packed_by_others(method: str, zeros: bool, tmp_path: Path) -> None:
    checkpoint = write_packed(tmp_path, method, zeros=zeros)
    expect_the_same(load(checkpoint), quantized_peer(checkpoint))


def test_groups_that_are_not_contiguous_are_refused(tmp_path: Path) -> None:
    checkpoint = write_packed(tmp_path, "gptq", group_indices=True)
    with pytest.raises(ModelError, match=r"^mlx-lm cannot load it: Found .*g_idx"):
        load(checkpoint)


@cpu
def test_experts_with_scales_of_their_own(tmp_path: Path) -> None:
    checkpoint = write_quantized(SCALED_EXPERTS, tmp_path)
    expect_the_same(load(checkpoint), peer_by_hand(SCALED_EXPERTS, checkpoint))


@cpu
def test_without_memory_for_float32_such_experts_are_refused(tmp_path: Path) -> None:
    checkpoint = write_quantized(SCALED_EXPERTS, tmp_path)
    with pytest.raises(ModelError, match=r"global_scale.* on GPUs alone, and .* no memory for"):
        open_model(checkpoint, memory_bytes=1 << 16)


@cpu
@pytest.mark.parametrize("name", ["linear-mxfp8-8", "linear-nvfp4-4"])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 1 << 16], ids=["roomy", "tight"])
def test_quantized_activations_are_refused(name: str, memory_bytes: int, tmp_path: Path) -> None:
    checkpoint = write_quantized(QUANTIZED[name], tmp_path)
    configure(checkpoint, quantize_activations=True)
    with pytest.raises(ModelError, match=r"GPUs alone: without quantize_activations"):
        open_model(checkpoint, memory_bytes)
    configure(checkpoint, quantize_activations=False)
    expect_the_same(load(checkpoint), quantized_peer(checkpoint))
