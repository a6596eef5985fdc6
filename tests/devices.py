"""What a test may expect of the device that MLX computes on.

Functions take the device, so that what is expected of a GPU is itself tested where there is none.
"""

from typing import TypeAlias

import mlx.core as mx

from engine.mlx_backend.launch import Launch, LaunchWhenIdle, launch_for

Device: TypeAlias = mx.Device

DEVICE: Device = mx.default_device()
GPU = mx.Device(mx.gpu, 0)


def is_cpu(device: Device) -> bool:
    return bool(device == mx.cpu)


def launches(device: Device = DEVICE) -> list[Launch]:
    """The launches to run a test under, the one that serves on the device first.

    Both on a CPU. On a GPU the other one copies pools, and nobody is served by it.
    """
    serving = launch_for(device)
    if not is_cpu(device):
        return [serving]
    return [serving, LaunchWhenIdle()]


SERVING_LAUNCH = launch_for(DEVICE)
