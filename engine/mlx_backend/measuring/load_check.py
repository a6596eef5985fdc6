"""The load check of every architecture, on tiny random checkpoints, as the daemon does it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from engine.mlx_backend import host
from engine.mlx_backend.assembly import attentions
from engine.mlx_backend.loading.loader import LoadedModel, load_weights, open_model
from engine.mlx_backend.measuring.configs import CONFIGS
from engine.mlx_backend.measuring.random_checkpoint import tiny_tokenizer, write_checkpoint
from engine.mlx_backend.measuring.rounds import Figures, Sizes
from engine.mlx_backend.model.cached_model import Execution

_SEED = 0


class LoadCheck:
    """In float32, in which an error shows best, and on GPUs in bfloat16, which most models have."""

    def __init__(self, sizes: Sizes, scratch: Path) -> None:
        """Checkpoints are written below `scratch`, and removed at once."""
        self._scratch = scratch
        self._cases = {
            f"{name}, {str(dtype).removeprefix('mlx.core.')}": (name, dtype)
            for dtype in checked_dtypes(mx.default_device())
            for name in sizes.architectures or CONFIGS
        }

    def cases(self) -> Sequence[str]:
        return list(self._cases)

    def measure(self, case: str) -> Figures:
        """How it would be served. Raises ModelError, and whatever the model raises."""
        name, dtype = self._cases[case]
        with tempfile.TemporaryDirectory(dir=self._scratch) as parent:
            checkpoint = Path(parent) / "checkpoint"
            write_checkpoint(checkpoint, CONFIGS[name], _SEED, tiny_tokenizer(), dtype)
            _, execution = load(checkpoint)
        mx.clear_cache()
        return {
            "batches": execution.batching.name,
            "attention": execution.attention.name,
            "deviation": execution.deviation,
            "rejected_before": len(execution.rejected),
        }


def checked_dtypes(device: mx.Device) -> tuple[mx.Dtype, ...]:
    """The precisions to check on a device. A CPU serves all checkpoints in float32."""
    return (mx.float32,) if device == mx.cpu else (mx.float32, mx.bfloat16)


def load(checkpoint: Path) -> tuple[LoadedModel, Execution]:
    """As the daemon loads it. Raises ModelError."""
    loaded = open_model(checkpoint, host.examine().left_bytes)
    return loaded, load_weights(loaded, attentions("auto", loaded), lambda line: None)
