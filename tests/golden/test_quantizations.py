"""Each quantization that mlx-lm knows: what is served says what mlx-lm's model says."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from engine.mlx_backend.model.views import Attention
from engine.values.request import Request, SamplingParams
from measuring.random_checkpoint import CONFIGS, random_model
from tests.checkpoints import Family, write_family
from tests.devices import tolerance
from tests.golden.driving import Driver, expect_greedy, random_tokens, reference, rms
from tests.offline import OfflineDaemon, Room, Served, load

NVFP4 = {"mode": "nvfp4", "group_size": 16, "bits": 4}
SCALED_EXPERTS = Family(
    "scaled_experts",
    CONFIGS["qwen3_moe"],
    {**NVFP4, "global_scale": True},
    rule=lambda path, _: not path.endswith("mlp.gate"),  # mlx-lm's own rule: 8 bits, affine
)
"""Experts with one scale each in addition to those of their groups, as ModelOpt exports them."""

PROMPTS = [random_tokens(n, seed=n) for n in (7, 33, 60)]
OUTPUT_TOKENS = 16
TOLERANCE = tolerance(2e-4)

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
    tensors = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(tensors, dict)
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


def expect_the_same(served: Served, peer: Module) -> None:
    """The served model's logits and greedy texts are those of `peer`."""
    driver = Driver(served, Attention())
    found = driver.logits([driver.subject(tokens) for tokens in PROMPTS], lasts=3)
    for logits, tokens in zip(found, PROMPTS, strict=True):
        assert rms(logits, reference(peer, tokens)[-4:]) < TOLERANCE
    daemon = OfflineDaemon(served, Attention(), Room(96))
    sampling = SamplingParams(temperature=0)
    requests = [
        Request(str(i), tuple(tokens), OUTPUT_TOKENS, sampling) for i, tokens in enumerate(PROMPTS)
    ]
    said = daemon.serve(*requests)
    for request, tokens in zip(requests, PROMPTS, strict=True):
        expect_greedy(peer, tokens, said[request.id, 0])


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU multiplies by these scales itself")
def test_experts_with_scales_of_their_own(tmp_path: Path) -> None:
    checkpoint = write_family(SCALED_EXPERTS, tmp_path)
    expect_the_same(load(checkpoint), peer_by_hand(SCALED_EXPERTS, checkpoint))
