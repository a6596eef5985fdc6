"""The engine's settings. Frozen values."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

DEFAULT_NAME = "rootstock-demo"
"""The name of the embedded model."""

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
"""The format of log lines of the server and its engines, which share one standard error."""


class DiskWrites(StrEnum):
    """The blocks that are written to disk."""

    SELECTIVE = "selective"  # long prefixes that are shared, idle or about to be evicted
    ALL = "all"  # every block, as soon as it is computed
    EXIT = "exit"  # nothing before shutdown


@dataclass(frozen=True, slots=True)
class DiskCacheConfig:
    """A folder for KV that the arena evicts. The engines of one daemon share it, and its limits."""

    directory: Path
    max_bytes: int  # of all files together; at least 16 MiB
    write: DiskWrites = DiskWrites.SELECTIVE
    daily_bytes: int | None = None  # the most that is written in a day of UTC; None: no limit
    shutdown_seconds: float = 10.0  # for writing what is still to be, at the end
    salted: bool = False  # write prompts that have a cache_salt, too
    daemon: str = ""  # whose engines share the folder; without a name this one is alone


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA of the model, as mlx-lm writes them, under a name that requests may ask for."""

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of the engine. Validated by the server's settings."""

    model: str  # a directory, a Hugging Face repository, or "" for the embedded default
    memory_bytes: int | None = None  # for all that it takes; None: what the machine has left
    kv_cache_bytes: int | None = None  # None: a share of what the machine has left
    max_model_len: int | None = None  # tokens of a sequence; None: as many as fit, of the model's
    block_size: int = 32  # tokens
    max_running: int = 32  # sequences computed in one step
    max_waiting: int = 1024  # sequences queued; of one client at most as many as places are free
    step_tokens: int = 512  # tokens computed in one step
    max_prompt_share: float = 0.75  # of a step's time next to decodes; 1: no limit
    prefix_cache: bool = True
    speculate: str = "auto"  # "auto" or "off": whether tokens are drafted, where that pays
    decode: str = "auto"  # "auto" or "eager": whether steady decodes are compiled where that pays
    attention: str = "auto"  # "auto", "gather" or "cascade"
    state_cache_bytes: int | None = None  # for saved recurrent states; None: a quarter of the KV's
    generation_config: str = "auto"  # "auto" or "none": where sampling defaults come from
    pooling: str = "auto"  # "auto", "last", "mean" or "first": how texts are embedded
    reranker: str = "auto"  # "auto" or "yes-no"
    disk: DiskCacheConfig | None = None
    adapters: tuple[AdapterConfig, ...] = ()  # no two of one name
