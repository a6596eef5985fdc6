"""What a model takes of memory, from its files alone. Imports no MLX."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.mlx_backend.loading.checkpoint_files import WEIGHTS, read_header
from engine.types.settings import EngineConfig

_PROCESS_BYTES = 256 << 20
_TOKEN_BYTES = 64 << 10
_LOGIT_BYTES = 48
"""What a step takes at most, from peaks measured on a CPU: 36 MB for a prompt of 512 tokens through
layers 1,024 and 4,096 wide, 400 MB to sample 64 rows of 151,936 logits. The process itself grows by
110 MB between its first look at the memory and its first answer; the rest is for wider layers."""

_VOCAB_SIZE = 150_000  # where a configuration does not say


def working_bytes(config: EngineConfig, vocab_size: int) -> int:
    """What the process and a step take beside weights, storage and attention's workspace."""
    logits = config.max_running * vocab_size
    return _PROCESS_BYTES + config.step_tokens * _TOKEN_BYTES + logits * _LOGIT_BYTES


def needed_bytes(config: EngineConfig, checkpoint: Path, storage_bytes: int) -> int:
    """What the model takes with so much for its KV cache and states, unless the settings say how
    much. Its engine is held to it. Raises ModelError for files that are not whole.
    """
    told = (config.kv_cache_bytes, config.state_cache_bytes)
    if config.kv_cache_bytes is not None:
        storage_bytes = sum(n_bytes for n_bytes in told if n_bytes is not None)
        storage_bytes += storage_bytes // 4 if config.state_cache_bytes is None else 0
    weights = sum(_weight_bytes(file) for file in checkpoint.glob(WEIGHTS))
    return weights + working_bytes(config, _vocab_size(checkpoint)) + storage_bytes


def _weight_bytes(file: Path) -> int:
    return sum(span.stop - span.start for span in read_header(file).spans.values())


def _vocab_size(checkpoint: Path) -> int:
    config: Mapping[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    sizes = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    return max(sizes, default=_VOCAB_SIZE)
