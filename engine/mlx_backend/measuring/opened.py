"""A configured model, opened once and measured in several ways, and the machine around it."""

import os
import platform
from importlib import metadata

import mlx.core as mx

from engine.api import Report
from engine.core.step import Backend
from engine.mlx_backend import assembly, host
from engine.mlx_backend.cpu.blas import load_blas
from engine.mlx_backend.loading.loader import LoadedModel
from engine.mlx_backend.loading.memory import footprint, least_kv_bytes
from engine.mlx_backend.measuring.bare import BareModel
from engine.mlx_backend.measuring.rounds import Figures
from engine.mlx_backend.storage.arena import token_bytes
from engine.values.settings import EngineConfig
from kvstore.pool import blocks_for

_PACKAGES = ("mlx", "mlx-lm", "rootstock-serve")
_CHIP_FACTS = ("architecture", "compute_capability_major", "driver_version")
"""Of `mx.device_info`, where they are there."""


class MeasuredModel:
    """The engine's backend and mlx-lm's model, over the same weights."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ModelError."""
        self._opened = assembly.open_configured(config)

    @property
    def context_tokens(self) -> int:
        return self._loaded.max_context_tokens

    def kv_bytes(self, config: EngineConfig, rows: int, row_tokens: int) -> int:
        """Of a KV cache with room for so many rows of so many tokens, and all windows of each.

        It may be larger: where there are windows they get half of it, and no less than they need.
        """
        kept = footprint(self._loaded.layout, config.block_size)
        blocks_bytes = rows * blocks_for(row_tokens, config.block_size) * kept.block_bytes
        if not kept.windows:
            return blocks_bytes + least_kv_bytes(config, kept)
        return 2 * (blocks_bytes + config.max_running * least_kv_bytes(config, kept))

    def backend(self, config: EngineConfig, report: Report) -> Backend:
        """Reads the weights. Raises ModelError."""
        return assembly.assemble_opened(config, self._opened, load_blas(), report)

    def bare(self) -> BareModel:
        return BareModel(self._loaded.model, self._loaded.layout.vocab_size)

    def facts(self) -> Figures:
        """What it is, without a name that somebody gave it."""
        loaded, layout = self._loaded, self._loaded.layout
        return {
            "architecture": type(loaded.model).__module__.rpartition(".")[2],
            "weights_gib": loaded.weight_bytes / 2**30,
            "kv_bytes_a_token": token_bytes(layout.full_layers),
            "dtype": ", ".join(str(dtype).removeprefix("mlx.core.") for dtype in layout.dtypes),
            "caches": len(layout.specs),
            "full_attention": len(layout.full_layers),
            "windows": ", ".join(map(str, layout.windows)),
            "states": len(layout.states),
            "query_heads": loaded.query_heads,
            "context_tokens": loaded.max_context_tokens,
            "vocabulary": layout.vocab_size,
        }

    @property
    def _loaded(self) -> LoadedModel:
        return self._opened.loaded


def machine_facts() -> Figures:
    """The device, its memory, and the software, without the machine's name."""
    machine, info = host.examine(), mx.device_info()
    chip = {name: info[name] for name in _CHIP_FACTS if name in info}
    backends = {"metal": mx.metal.is_available(), "cuda": mx.cuda.is_available()}
    return {
        "device": machine.device,
        **chip,
        "backend": next((name for name, is_there in backends.items() if is_there), "cpu"),
        "memory_gib": machine.memory_bytes / 2**30,
        "free_gib": machine.left_bytes / 2**30,
        "cores": os.cpu_count() or 0,
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "blas": load_blas().brief,
        **{name: _version(name) for name in _PACKAGES},
    }


def wait_for_device() -> None:
    """Until all that has been launched is computed."""
    mx.synchronize()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
