"""What a test may expect of the device that MLX computes on.

Functions take the device, so that what is expected of a GPU is itself tested where there is none.
"""

from typing import TypeAlias

import mlx.core as mx
import pytest

from engine.mlx_backend.loading.selfcheck import GPU_TOLERANCE
from engine.mlx_backend.runner import Launch

Device: TypeAlias = mx.Device

DEVICE: Device = mx.default_device()
SERVING_LAUNCH = Launch.on(DEVICE)
"""As the daemon launches steps on this device."""


def is_cpu(device: Device) -> bool:
    return bool(device == mx.cpu)


def launches(device: Device = DEVICE) -> list[Launch]:
    """The launches to run a test under, the one that serves on the device first.

    Both on a CPU. On a GPU the other one copies pools, and nobody is served by it.
    """
    serving = Launch.on(device)
    return [serving, Launch.WHEN_IDLE] if is_cpu(device) else [serving]


def strategies(device: Device = DEVICE) -> tuple[str, ...]:
    """The attention strategies to run a test under. A GPU never serves `cascade` by default: it
    computes with products and streams that are a CPU's. On a CPU `paged` is what stands in for its
    kernel.
    """
    return ("gather", "cascade", "paged") if is_cpu(device) else ("gather", "paged")


def tolerance(on_cpu: float, device: Device = DEVICE) -> float:
    """How far float32 numbers about as large as 1 may be from mlx-lm's, as logits of random models
    are. A GPU may round products to TF32: there it is the tolerance of the product's own check.
    """
    return on_cpu if is_cpu(device) else max(on_cpu, GPU_TOLERANCE)


def rounding(on_gpu: float, device: Device = DEVICE) -> float:
    """How far the results of one computation alone and in a batch may differ. A CPU's are equal to
    the last bit. A GPU's kernels choose their tiles, and so the order of a sum, by the shapes.
    """
    return 0.0 if is_cpu(device) else on_gpu


cpu_memory = pytest.mark.skipif(
    not is_cpu(DEVICE), reason="a GPU keeps what a command buffer uses until it completes"
)
"""For tests that hold memory against what a CPU takes, operation by operation."""

cpu_attention = pytest.mark.skipif(
    "cascade" not in strategies(), reason="attention that is a CPU's alone"
)

cpu_float32 = pytest.mark.skipif(
    not is_cpu(DEVICE), reason="a GPU serves the checkpoint quantized, in half precision"
)
"""For tests that compare a quantized checkpoint with mlx-lm's dequantized one."""
