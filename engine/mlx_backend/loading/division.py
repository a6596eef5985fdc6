"""The division of a model among ranks, by mlx-lm's own `shard`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.base import Module

from engine.api import ModelError, one_line
from engine.mlx_backend.kv.layout import Layout, discover
from engine.mlx_backend.loading.checkpoint import first_number
from engine.mlx_backend.loading.memory import MemoryPlan
from engine.mlx_backend.loading.weights import OriginalLayers, own_arrays
from engine.values.settings import EngineConfig
from engine.values.stats import readable_bytes

_DIVIDED = {
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
}
"""Fields of config.json that the number of ranks must divide. mlx-lm rounds some of them down."""


def refuse(config: EngineConfig) -> None:
    """Raise ModelError for settings that ranks do not support."""
    refused = {
        "adapters": (config.adapters, "which no test covers with ranks"),
        "draft_model": (config.draft_model_in_use, "which ranks do not compute; unset draft_model"),
        "disk_cache": (config.disk, "since the bytes of a block differ between ranks"),
    }
    for name, (value, why) in refused.items():
        if value:
            raise ModelError(f"ranks of {config.ranks} does not go with {name}, {why}")


class Part(Protocol):
    """Which part of a model a process has, of how many: MLX's group of ranks, or a plan of one."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part of a model whose memory is planned. Nothing is computed with it."""

    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class RankMemory(NamedTuple):
    """The memory of one rank."""

    total_bytes: float  # that it takes
    left_bytes: float  # that were not in use before
    n_blocks: float  # of the KV cache that it could hold


def rank_memory(plan: MemoryPlan) -> RankMemory:
    """The memory of a rank with this plan."""
    own = replace(plan, agreed=None)
    return RankMemory(plan.memory.total_bytes, plan.machine.left_bytes, own.sizes.n_blocks)


def describe_ranks(memories: Sequence[RankMemory]) -> str:
    """Describe what each rank takes, in order, and which one limits the KV cache."""
    parts = [
        f"rank {rank} takes {readable_bytes(int(each.total_bytes))} of "
        f"{readable_bytes(int(each.left_bytes))}"
        for rank, each in enumerate(memories)
    ]
    blocks = [each.n_blocks for each in memories]
    if min(blocks) == max(blocks):  # as those of one machine have
        return "; ".join(parts)
    return "; ".join([*parts, f"rank {blocks.index(min(blocks))} limits the KV cache"])


def describe_planned_ranks(config: EngineConfig, memory: RankMemory) -> str:
    """Describe what the ranks of this machine will take, by the plan of one; "" without others."""
    if config.ranks == 1:
        return ""
    if config.local_ranks == config.ranks:
        return describe_ranks([memory] * config.ranks)
    return f"on this machine {describe_ranks([memory])}; the daemon lists all when they have joined"


def divide(model: Module, config: Mapping[str, Any], part: Part) -> Layout:
    """Leave in a model, whose arrays are lazy, what one rank has of it. Returns the layout of that.
    Raises ModelError for a model that cannot be divided among that many ranks.
    """
    n = part.size()
    if not hasattr(model, "shard"):
        kind = config.get("model_type")
        raise ModelError(
            f"mlx-lm cannot divide a model of the type {kind} among ranks: set ranks to 1"
        )
    for field, words in _DIVIDED.items():
        number = first_number(config, (field,)) or 0
        if number % n:
            raise ModelError(
                f"its {number} {words} cannot be divided among {n} ranks: set ranks to a number "
                f"that divides {number}"
            )
    try:
        model.shard(part)
    except Exception as error:  # MLX and mlx-lm raise exceptions of several types
        raise ModelError(f"it cannot be divided among {n} ranks: {one_line(error)}") from error
    with _without_collectives(part):
        return discover(model)


@contextmanager
def _without_collectives(part: Part) -> Iterator[None]:
    """Within the context a model whose part is planned runs as if it were alone: the shapes are
    those that collectives return.
    """
    if not isinstance(part, PlannedPart):
        yield
        return

    def gathered(x: mx.array, **_: object) -> mx.array:
        return mx.concatenate([x] * part.size())

    with (
        patch.object(mx.distributed, "all_sum", lambda x, **_: x),
        patch.object(mx.distributed, "all_gather", gathered),
    ):
        yield


def compare_whole(whole: Module, original: OriginalLayers) -> None:
    """Compare the layers of a model before its division, which were changed at load, with mlx-lm's.
    Its arrays are released, each layer's as soon as it has been compared. Raises ModelError.
    """
    arrays = own_arrays(whole)
    for path, module in list(whole.named_modules()):
        original.check(path, module, arrays.pop(path))
        module.clear()
    original.close()
