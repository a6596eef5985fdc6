"""How a model runs over shared storage, as the check at load has found it out."""

from dataclasses import dataclass

from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.model.batching import Batching
from engine.mlx_backend.model.output_head import OutputHead


@dataclass(frozen=True, slots=True)
class Execution:
    """`rejected`: what was tried before, and why not."""

    batching: Batching
    attention: Attention
    head: OutputHead
    rejected: tuple[str, ...] = ()
