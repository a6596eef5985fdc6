"""What the backend hands to the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.step.runner import ModelRunner
from engine.types.memory import MemoryStats
from engine.types.model import ModelCard, Tokenizer
from kvstore.groups.sizes import StorageBytes, StorageSizes


@dataclass(frozen=True, slots=True)
class Backend:
    """All that the engine needs of a loaded model."""

    runner: ModelRunner
    card: ModelCard
    tokenizer: Tokenizer
    hf_tokenizer: Any  # transformers' fast tokenizer
    sizes: StorageSizes
    bytes: StorageBytes
    kv_format: str  # how the bytes lie that a step reads, of each part `part_bytes`
    software: str  # whose numbers these bytes are
    part_bytes: tuple[int, ...]  # of a block, of each window's block, of a state
    memory: Callable[[], MemoryStats]  # on any thread
    release_thread: Callable[[], None]  # gives back what MLX keeps for the thread; its last act
